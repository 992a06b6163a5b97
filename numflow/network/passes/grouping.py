"""Groups of steps that an executor's kernels do together, as data beside the steps, which stay as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numflow.ops import Step


@dataclass(frozen=True)
class Group:
    """Steps that are done together.

    steps:   their indices in the entry, in order.
    at:      the index in whose place they run; the others have nothing to run.
    pattern: their ops in order: "rms_norm+linear", "linear+add".
    """

    steps: tuple[int, ...]
    at: int
    pattern: str


def grouped(steps: Sequence[Step], done_by: Mapping[int, int]) -> tuple[Group, ...]:
    """Groups in the order of their places.

    done_by: index of a step that another one does -> index of that one, which none does.
    """
    members: dict[int, list[int]] = {}
    for index, at in done_by.items():
        members.setdefault(at, [at]).append(index)
    return tuple(Group(tuple(sorted(found)), at, "+".join(steps[i].op for i in sorted(found)))
                 for at, found in sorted(members.items()))


def done_by(groups: Sequence[Group]) -> dict[int, int]:
    """Index of each step that another one does -> index of that one."""
    return {index: group.at for group in groups for index in group.steps if index != group.at}
