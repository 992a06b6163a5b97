"""Which steps of an entry are done by the kernels of another one.

A `linear` takes over the `add` that follows it, and computes its operand out of a norm or an activation that nothing
else reads. What goes away is a pass over memory and a barrier; the numbers stay the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence

from numflow.cpu.context import overlap
from numflow.cpu.operands import can_make
from numflow.ops import Step, View


def adds_taken_over(steps: Sequence[Step], outputs: Iterable[View]) -> dict[int, int]:
    """Index of a linear -> index of the add that it does: y = a + scale * linear."""
    kept = tuple(outputs)
    return {i: i + 1 for i in range(len(steps) - 1) if _adds(steps[i], steps[i + 1])
            and not any(overlap(view, steps[i].outputs[0]) for view in kept)
            and _dead_after(steps, i + 1, steps[i].outputs[0])}


def _adds(linear: Step, add: Step) -> bool:
    if linear.op != "linear" or add.op != "add":
        return False
    (a, b), t = add.inputs, linear.outputs[0]
    return b == t and not overlap(a, t)


def _dead_after(steps: Sequence[Step], index: int, view: View) -> bool:
    """Whether no step after `index` reads the view before it is written anew."""
    for step in steps[index + 1:]:
        if any(overlap(view, x) for x in step.inputs):
            return False
        if any(_covers(y, view) for y in step.outputs):
            return True
    return True


def operands_made(steps: Sequence[Step], outputs: Iterable[View], int8: Callable[[Step], bool]) -> dict[int, int]:
    """Index of a step -> index of the linear that computes it while it makes its operand.

    int8: tells of a linear whether its operand is int8.
    """
    kept, found = tuple(outputs), {}
    for i, step in enumerate(steps):
        if can_make(step) and not any(overlap(view, step.outputs[0]) for view in kept):
            readers = _readers(steps, i)
            if readers and len({int8(steps[reader]) for reader in readers}) == 1 and _unchanged(steps, i, readers[0]):
                found[i] = readers[0]
    return found


def _readers(steps: Sequence[Step], index: int) -> list[int]:
    """Indices of the linears that read what a step writes; none if something else reads or writes a part of it."""
    view, readers = steps[index].outputs[0], []
    for k in range(index + 1, len(steps)):
        step = steps[k]
        if any(overlap(view, x) for x in step.inputs):
            if step.op != "linear" or step.inputs[0] != view:
                return []
            readers.append(k)
        if any(overlap(view, y) for y in step.outputs):
            return readers if any(_covers(y, view) for y in step.outputs) else []
    return readers


def _unchanged(steps: Sequence[Step], index: int, reader: int) -> bool:
    """Whether what the step reads is still there when its reader begins."""
    return not any(overlap(x, y) for step in steps[index + 1:reader] for y in step.outputs for x in steps[index].inputs)


def _covers(a: View, b: View) -> bool:
    return a.buffer == b.buffer and a.start <= b.start and b.start + b.width <= a.start + a.width
