"""Dataflow analysis of a list of steps, for the fusion of steps in executors."""

from collections.abc import Iterable, Sequence

from numflow.ops import Step, View


def fusible_adds(steps: Sequence[Step], outputs: Iterable[View]) -> dict[int, int]:
    """Fusible adds: index of a linear -> index of the add y = a + scale * linear, if the linear has no other reader.

    outputs: views that must stay readable.
    """
    kept = tuple(outputs)
    return {i: i + 1 for i in range(len(steps) - 1) if _adds(steps[i], steps[i + 1])
            and not any(view.overlaps(steps[i].outputs[0]) for view in kept)
            and dead_after(steps, i + 1, steps[i].outputs[0])}


def _adds(linear: Step, add: Step) -> bool:
    if linear.op != "linear" or add.op != "add":
        return False
    (a, b), t = add.inputs, linear.outputs[0]
    return b == t and not a.overlaps(t)


def dead_after(steps: Sequence[Step], index: int, view: View) -> bool:
    """Whether the view is dead after step `index`: no later step reads it before it is overwritten."""
    for step in steps[index + 1:]:
        if any(view.overlaps(x) for x in step.inputs):
            return False
        if any(y.covers(view) for y in step.outputs):
            return True
    return True


def readers(steps: Sequence[Step], index: int, beside: Sequence[str] = ()) -> list[int]:
    """Indices of the linears that read a step's output; none if another op reads or overwrites a part of it.

    beside: other ops that may read it.
    """
    view, found = steps[index].outputs[0], []
    for k in range(index + 1, len(steps)):
        step = steps[k]
        if any(view.overlaps(x) for x in step.inputs):
            if step.op not in ("linear", *beside) or step.inputs[0] != view:
                return []
            found += [k] if step.op == "linear" else []
        if any(view.overlaps(y) for y in step.outputs):
            return found if any(y.covers(view) for y in step.outputs) else []
    return found


def unchanged(steps: Sequence[Step], index: int, reader: int) -> bool:
    """Whether the inputs of step `index` are unchanged when step `reader` begins."""
    return not any(x.overlaps(y) for step in steps[index + 1:reader] for y in step.outputs for x in steps[index].inputs)
