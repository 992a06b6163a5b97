"""Splitting of fused steps before a recurrent step, so that each part can be cut in its own way.

A matrix that computes gates, values, keys, queries and steps together becomes one matrix per part, as does the
convolution behind it. Parts that are not cut stay together. Rows of a matrix, and channels of a convolution, are
independent, so results do not change.

    [z | x B C | dt] = in(u)          z = in_z(u)    x = in_x(u)    B C = in_bc(u)    dt = in_dt(u)
    [x B C] = conv([x B C])     ->                   x = conv(x)    B C = conv(B C)
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from numflow.ops import Network, Step, View, local, param
from numflow.partition.cut.recurrent import RECURRENT, StateCut, gates_of, read_in_pieces
from numflow.partition.cut.slices import rows_of


def taken_apart(network: Network, cuts: Mapping[str, StateCut]) -> Network:
    """The network with such steps split. cuts: cuts of its recurrent steps, by state."""
    taker = _Taker(network, cuts)
    entries = {entry: taker.steps(steps) for entry, steps in network.entries.items()}
    return replace(network, entries=entries, weights=taker.weights, states=taker.states)


class _Taker:
    """Visits steps from last to first. wanted: views that later steps read separately."""

    def __init__(self, network: Network, cuts: Mapping[str, StateCut]):
        self.cuts, self.weights, self.states = cuts, dict(network.weights), dict(network.states)
        self.wanted: set[View] = set()

    def steps(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        found: list[Step] = []
        self.wanted = set()
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            parts = self._parts(step)
            alone = len(parts) > 1 or any(view in self.wanted for view in step.outputs)
            self.wanted = {view for view in self.wanted if not any(view.overlaps(y) for y in step.outputs)}
            if step.op in RECURRENT:
                self.wanted |= {*read_in_pieces(step, self.cuts[param(step, "state")]), *gates_of(steps, at)[0]}
            elif alone and (step.op == "rms_norm" or _by_element(step)):
                self.wanted |= {view for part in parts for view in part.inputs}
            found += parts[::-1]
        return tuple(found[::-1])

    def _parts(self, step: Step) -> list[Step]:
        """The step, or one step per wanted view in its output and per remaining gap."""
        if not step.outputs or not (step.op == "linear" or _by_element(step)):
            return [step]
        y = step.outputs[0]
        inside = sorted((view for view in self.wanted if y.covers(view) and view != y), key=lambda view: view.start)
        borders = [y.start, *(border for view in inside for border in (view.start, view.start + view.width)),
                   y.start + y.width]
        if not inside or borders != sorted(borders):
            return [step]
        spans = [(begin - y.start, end - y.start) for begin, end in pairwise(borders)]
        return [self._part(step, *span) for span in spans if span[1] > span[0]]

    def _part(self, step: Step, begin: int, end: int) -> Step:
        """The step for columns begin .. end - 1 of the output."""
        def part(view: View) -> View:
            return View(view.buffer, view.start + begin, end - begin)

        inputs = step.inputs if step.op == "linear" else tuple(map(part, step.inputs))
        weights, params = {}, dict(step.params)
        for role, name in step.weights.items():
            whole, suffix = self.weights[name], name.rsplit(".", 1)[-1]
            cut = replace(rows_of(whole, begin, end), name=f"{name.removesuffix('.' + suffix)}.{begin}-{end}.{suffix}")
            self.weights[cut.name], weights[role] = cut, cut.name
        if step.op == "causal_conv":
            state = self.states[param(step, "state")]
            own = replace(state, name=f"{state.name}.{begin}-{end}", shape=(state.shape[0], end - begin))
            self.states[own.name] = own
            params["state"] = own.name
        return replace(step, inputs=inputs, outputs=(part(step.outputs[0]),), weights=weights, params=params,
                       label=f"{step.label}.{begin}-{end}")


def _by_element(step: Step) -> bool:
    """Whether each output column depends only on the same input column."""
    return step.op in ("causal_conv", "softplus") or local(step) == "elements"
