"""A pass over a finished network that drops unwanted rows as early as possible.

After the last step in which rows interact (attention, or a cache write), rows are independent. Of a prompt only the
last row is wanted, so the rest of the last layer, mainly its feed-forward block, is skipped for all other rows. The
results of wanted rows are the same bits.
"""

from dataclasses import replace

from numflow.ops import Buffer, Network, Step, View, local

SUFFIX = ".wanted"  # of buffers with wanted rows only


def select_early(network: Network) -> Network:
    """The network with `select_rows` moved forward in every entry."""
    buffers, entries = dict(network.buffers), {}
    for name, steps in network.entries.items():
        entries[name] = _moved(steps, buffers, tuple(network.outputs.values()))
    return replace(network, entries=entries, buffers=buffers)


def _moved(steps: tuple[Step, ...], buffers: dict[str, Buffer], kept: tuple[View, ...]) -> tuple[Step, ...]:
    """The steps with `select_rows` moved forward. kept: outputs of the network, which keep all their rows."""
    selecting = [i for i, step in enumerate(steps) if step.op == "select_rows"]
    if len(selecting) != 1:
        return steps
    end = begin = selecting[0]
    while begin > 0 and _is_alone(steps[begin - 1], buffers, kept):
        begin -= 1
    select, alone = steps[end], steps[begin:end]
    later = {view.buffer for step in steps[end + 1:] for view in step.inputs}
    if not alone or later & {view.buffer for step in alone for view in step.outputs}:
        return steps
    renamed = {view.buffer: f"{view.buffer}{SUFFIX}" for step in (*alone, select) for view in step.inputs}
    renamed |= {view.buffer: f"{view.buffer}{SUFFIX}" for step in alone for view in step.outputs}
    buffers |= {new: replace(buffers[old], name=new, rows="logits") for old, new in renamed.items()}

    def wanted(view: View) -> View:
        return replace(view, buffer=renamed[view.buffer])

    selects = [replace(select, inputs=(view,), outputs=(wanted(view),), label=f"{select.label}.{view.buffer}")
               for view in _read_first((*alone, select))]
    on_rows = [replace(step, inputs=tuple(map(wanted, step.inputs)), outputs=tuple(map(wanted, step.outputs)))
               for step in alone]
    last = replace(select, op="copy", inputs=(wanted(select.inputs[0]),))
    return (*steps[:begin], *selects, *on_rows, last, *steps[end + 1:])


def _is_alone(step: Step, buffers: dict[str, Buffer], kept: tuple[View, ...]) -> bool:
    """Whether rows of the step's outputs depend on the same input rows only. Ops on heads are next to attention and
    stay."""
    views = (*step.inputs, *step.outputs)
    return local(step) in ("elements", "rows") and all(buffers[view.buffer].rows == "tokens" for view in views) \
        and not any(view.overlaps(y) for y in kept for view in step.outputs)


def _read_first(steps: tuple[Step, ...]) -> list[View]:
    """Views that these steps read before writing them completely."""
    found: dict[View, None] = {}
    written: list[View] = []
    for step in steps:
        for view in step.inputs:
            if not any(w.covers(view) for w in written):
                found[view] = None
        written += step.outputs
    return list(found)
