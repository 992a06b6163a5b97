"""Fusion: steps of an entry that are done by the kernels of another step.

A `linear` takes over the `add` that follows it, and computes its operand out of a norm or an activation that nothing
else reads. What goes away is a pass over memory and a barrier; the numbers stay the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence

from numflow.cpu.linear.operands import can_make
from numflow.network.passes.dataflow import adds_taken_over, readers, unchanged
from numflow.ops import Step, View

__all__ = ["adds_taken_over", "operands_made"]


def operands_made(steps: Sequence[Step], outputs: Iterable[View], kinds: Callable[[Step], object]) -> dict[int, int]:
    """Index of a step -> index of the linear that computes it while it makes its operand.

    kinds: tells of a linear what kinds of operands it has; all readers have to agree.
    """
    kept, made = tuple(outputs), {}
    for i, step in enumerate(steps):
        if can_make(step) and not any(view.overlaps(step.outputs[0]) for view in kept):
            found = readers(steps, i)
            if found and len({kinds(steps[reader]) for reader in found}) == 1 and unchanged(steps, i, found[0]):
                made[i] = found[0]
    return made
