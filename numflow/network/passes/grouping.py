"""Groups of steps that an executor's kernels run fused: data beside the steps, which are not changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numflow.ops import Step


@dataclass(frozen=True)
class Group:
    """Fused steps.

    steps:   indices in the entry, in order.
    at:      index of the step in whose place the group runs; the others run nothing.
    pattern: the ops in order: "rms_norm+linear", "linear+add".
    """

    steps: tuple[int, ...]
    at: int
    pattern: str


def grouped(steps: Sequence[Step], done_by: Mapping[int, int]) -> tuple[Group, ...]:
    """Groups in the order of the steps where they run.

    done_by: index of a fused step -> index of the step where its group runs.
    """
    members: dict[int, list[int]] = {}
    for index, at in done_by.items():
        members.setdefault(at, [at]).append(index)
    return tuple(Group(tuple(sorted(found)), at, "+".join(steps[i].op for i in sorted(found)))
                 for at, found in sorted(members.items()))


def done_by(groups: Sequence[Group]) -> dict[int, int]:
    """Index of each fused step -> index of the step where its group runs."""
    return {index: group.at for group in groups for index in group.steps if index != group.at}
