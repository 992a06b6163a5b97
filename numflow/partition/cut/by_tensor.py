"""Cut by tensor (tensor parallel): each device of a group gets its own steps, on slices of the weights.

The layout of a value over the devices is: whole on every device, or one of these:
    Split    device i has columns spans[i], contiguous in a separate buffer ("qkv.part")
    Partial  the value is the sum of terms on devices `adds`; other devices have nothing
             (rows of a table: one device has a token's row, the others have -0.0, which changes no bits)
    Routed   as Partial, for rows of routes: each row is 0 except on the device with the expert
An `all_gather` or `all_reduce` is emitted before a step that needs the whole value, so several terms of a sum (routed
experts and shared expert) share one all_reduce.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from numflow.ops import Cache, Network, State, Step, View, Weight, param, states_of
from numflow.partition.cut.apart import taken_apart
from numflow.partition.cut.by_layer import PipelineStage
from numflow.partition.cut.choose import (
    COLUMNS,
    EXPERTS,
    FIRST,
    SUM,
    TOKENS,
    CacheCut,
    Sharding,
    choose,
    of_heads,
    own_columns,
)
from numflow.partition.cut.recurrent import RECURRENT, StateCut, own_params, read_in_pieces
from numflow.partition.cut.slices import columns_of, experts_of, rows_of
from numflow.partition.cut.spans import Spans, holders


@dataclass(frozen=True)
class Split:
    """Device i of the group has columns spans[i]."""

    spans: Spans


@dataclass(frozen=True)
class Partial:
    """The value is the sum over devices `adds` of the group."""

    adds: tuple[int, ...]
    routed: bool = False


Layout = Split | Partial


class DeviceSteps:
    """One device's part: steps by entry, weights, caches, states."""

    def __init__(self, network: Network):
        self.entries: dict[str, list[Step]] = {entry: [] for entry in network.entries}
        self.weights: dict[str, Weight] = {}
        self.caches: dict[str, Cache] = {}
        self.states: dict[str, State] = {}
        self.outputs: dict[str, View] = {}

    def weight(self, weight: Weight) -> str:
        """Add a slice of a weight; its name."""
        self.weights[weight.name] = weight
        return weight.name


def cut_by_tensor(network: Network, stage: PipelineStage, group: tuple[int, ...], shares: tuple[float, ...],
                  groups: tuple[tuple[int, ...], ...], caches: Mapping[str, CacheCut],
                  states: Mapping[str, StateCut], embedding: str = "split",
                  head: str = "split") -> list[DeviceSteps]:
    """The steps of each device of a group.

    group: indices of the group's devices in the plan; groups: such indices of all groups. caches, states: the group's
    cuts. embedding, head: as in `choose`.
    """
    local = replace(network, entries=stage.entries)
    if len(group) > 1:
        local = taken_apart(local, states)
    emitter = _Emitter(local, group, groups, caches, states)
    for entry, steps in local.entries.items():
        emitter.entry = entry
        for step, choice in zip(steps, choose(local, entry, shares, caches, states, embedding, head), strict=True):
            emitter.step(step, choice)
    return emitter.devices


class _Emitter:
    """Emits steps in order; `layouts` has the values that are not whole, `makers` the labels of their steps."""

    def __init__(self, network: Network, group, groups, caches, states):
        self.network, self.group, self.groups, self.caches, self.states = network, group, groups, caches, states
        self.devices = [DeviceSteps(network) for _ in group]
        self.layouts: dict[View, Layout] = {}
        self.makers: dict[View, str] = {}
        self.entry = "main"

    def step(self, step: Step, choice: Sharding) -> None:
        """One step of the stage, with the exchanges that it needs first."""
        for view in list(self.layouts):  # a value that is overwritten in part must be whole
            if any(view.overlaps(y) and view != y for y in step.outputs):
                self.whole(view)
        layout = self._emit(step, choice)
        for view in step.outputs:
            self.layouts.pop(view, None)
            if layout is not None:
                self.layouts[view], self.makers[view] = layout, step.label
        self._outputs(step)

    def _emit(self, step: Step, choice: Sharding) -> Layout | None:
        if step.op in ("send", "receive"):
            self._exchange(step)
            return None
        if choice.how == COLUMNS:
            return self._columns(step, choice.spans)
        if choice.how == SUM:
            return self._sum(step, choice.spans)
        if choice.how == EXPERTS:
            return self._experts(step, choice.spans)
        if choice.how == TOKENS:
            return self._tokens(step, choice.spans)
        if choice.how == FIRST:
            return self._first(step)
        return self._everywhere(step)

    # Reading

    def whole(self, view: View) -> None:
        """Emit exchanges that make all values in a view whole on all devices."""
        for value in [value for value in self.layouts if value.overlaps(view)]:
            layout = self.layouts.pop(value)
            label = f"{self.makers[value]}.{'gather' if isinstance(layout, Split) else 'sum'}"
            for i, device in enumerate(self.devices):
                x: tuple[View, ...] = ()
                if isinstance(layout, Split):
                    op, params = "all_gather", {"group": self.group, "spans": layout.spans}
                    if layout.spans[i][1] > layout.spans[i][0]:
                        x = (piece(value, layout.spans[i]),)
                else:
                    op, params = "all_reduce", {"group": self.group, "adds": tuple(self.group[a] for a in layout.adds)}
                    if i in layout.adds:
                        x = (value,)
                device.entries[self.entry].append(Step(op, x, (value,), {}, params, label))

    def split(self, view: View, spans: Spans, i: int) -> View:
        """Columns spans[i] of a view on device i: in the piece buffer or in the whole one."""
        if self.layouts.get(view) == Split(spans):
            return piece(view, spans[i])
        begin, end = spans[i]
        return View(view.buffer, view.start + begin, end - begin)

    def _ready(self, view: View, spans: Spans | None) -> None:
        """Make a value whole before it is read, unless it is split by `spans`."""
        if spans is None or self.layouts.get(view) != Split(spans):
            self.whole(view)

    # The ways to share a step

    def _everywhere(self, step: Step) -> Layout | None:
        layout = self._carried(step)
        if layout is None:
            for view in step.inputs:
                self.whole(view)
        for i in range(len(self.devices)) if layout is None else layout.adds:
            self._append(i, step)
        return layout

    def _carried(self, step: Step) -> Partial | None:
        """The output layout of a step that can be applied to terms of a sum (linear in them); else None."""
        layouts = [self.layouts.get(view) for view in step.inputs]
        first = layouts[0] if layouts else None
        if not isinstance(first, Partial):
            return None
        if first.routed:
            carries = step.op in ("act", "act_mul") and all(x == first for x in layouts)
            combines = step.op == "expert_combine"
            return Partial(first.adds, routed=carries) if carries or combines else None
        alone = len(first.adds) == 1 and self.network.buffers[step.outputs[0].buffer].rows == "logits"
        linear = (step.op in ("copy", "scale", "gate_rows") and "shift" not in step.weights) \
            or (step.op == "add" and layouts[1] == first)
        others = [view for view, layout in zip(step.inputs, layouts, strict=True) if layout != first]
        if step.op == "gate_rows":  # a product: only one factor may be a sum
            others = [step.inputs[1]]
        if not (alone or linear) or any(value.overlaps(view) for view in others for value in self.layouts):
            return None
        return first

    def _first(self, step: Step) -> Layout | None:
        for view in step.inputs:
            self.whole(view)
        self._append(0, step)
        lone = Partial((0,))
        if self.network.buffers[step.outputs[0].buffer].rows == "logits":
            return lone
        self.layouts[step.outputs[0]], self.makers[step.outputs[0]] = lone, step.label
        self.whole(step.outputs[0])
        return None

    def _sum(self, step: Step, spans: Spans) -> Layout:
        x, (weight, bias) = step.inputs[0], self._matrix(step)
        self._ready(x, spans)
        adds = holders(spans)
        for i in adds:
            weights = {"weight": columns_of(weight, *spans[i])}
            if bias is not None and i == adds[0]:
                weights["bias"] = bias
            self._append(i, step, inputs=(self.split(x, spans, i),), weights=weights)
        return Partial(adds)

    def _experts(self, step: Step, spans: Spans) -> Layout:
        (x, ids), (weight, bias) = step.inputs, self._matrix(step)
        self.whole(ids)
        adds = holders(spans)
        if self.layouts.get(x) != Partial(adds, routed=True):
            self.whole(x)
        for i in adds:
            weights = {"weight": experts_of(weight, *spans[i])}
            if bias is not None:
                weights["bias"] = experts_of(bias, *spans[i])
            self._append(i, step, weights=weights, params={**step.params, "first": spans[i][0]})
        return Partial(adds, routed=True)

    def _tokens(self, step: Step, spans: Spans) -> Layout:
        table = self.network.weights[step.weights["table"]]
        for view in step.inputs:
            self.whole(view)
        for i in holders(spans):
            self._append(i, step, weights={"table": rows_of(table, *spans[i])},
                         params={**step.params, "first": spans[i][0], "vocabulary": table.shape[0]})
        return Partial(holders(spans))

    def _columns(self, step: Step, spans: Spans) -> Layout | None:
        """Each device computes its output columns; the op determines the inputs that are read in pieces."""
        pieces = self._pieces(step, spans)
        for view in step.inputs:
            self._ready(view, pieces.get(view))
        for i in holders(spans):
            begin, end = spans[i]
            self._append(
                i, step,
                inputs=tuple(self.split(v, pieces[v], i) if v in pieces else v for v in step.inputs),
                outputs=tuple(piece(v, spans[i]) for v in step.outputs),
                weights={role: self._slice(step, role, begin, end) for role in step.weights},
                params=self._params(step, i, begin, end), cache=i if "cache" in step.params else None,
                state=((end - begin), step.outputs[0].width) if states_of(step) else (1, 1))
        return Split(spans) if step.outputs else None

    def _pieces(self, step: Step, spans: Spans) -> dict[View, Spans]:
        if step.op == "linear":
            return {}
        if step.op == "rope":
            return {step.inputs[0]: spans}
        if step.op == "head_concat":
            return {view: of_heads(spans, step.outputs[0], view) for view in own_columns(step)}
        if step.op in ("head_linear", "block_select"):
            return {step.inputs[0]: of_heads(spans, step.outputs[0], step.inputs[0])}
        if step.op == "gate_rows":
            (x, gate), (y,) = step.inputs, step.outputs
            return {x: spans, gate: of_heads(spans, y, gate)}
        if step.op in RECURRENT:
            return read_in_pieces(step, self.states[param(step, "state")])
        if step.op in ("attention", "cache_write"):
            cache = self.network.caches[param(step, "cache")]
            cut = self.caches[cache.name]
            if step.op == "attention":
                pieces = {view: of_heads(spans, step.outputs[0], view) for view in step.inputs
                          if self.network.buffers[view.buffer].dtype == "f32"}
                if param(step, "block"):
                    size = step.inputs[1].width // cache.kv_heads
                    pieces[step.inputs[1]] = tuple((b * size, e * size) for b, e in cut.kv_heads)
                return pieces
            return {view: tuple((b * size, e * size) for b, e in cut.kv_heads)
                    for view, size in zip(step.inputs, (cache.k_dim, cache.v_dim))}
        return dict.fromkeys(step.inputs, spans)

    def _slice(self, step: Step, role: str, begin: int, end: int) -> Weight:
        weight = self.network.weights[step.weights[role]]
        if step.op == "attention":
            if role == "position_buckets":
                return weight
            value_dim = step.outputs[0].width // param(step, "heads")
            cut = columns_of if role == "buckets" else rows_of
            return cut(weight, begin // value_dim, end // value_dim)
        if step.op == "head_linear":
            size = step.outputs[0].width // param(step, "heads")
            return experts_of(weight, begin // size, end // size)
        if step.op == "linear_attention":  # values per head
            return rows_of(weight, *(column * weight.shape[0] // step.outputs[0].width for column in (begin, end)))
        if step.op in ("linear", "causal_conv") or weight.shape == (step.outputs[0].width,):
            return rows_of(weight, begin, end)
        return weight  # a norm's, the same for every head

    def _params(self, step: Step, i: int, begin: int, end: int) -> dict:
        if step.op in RECURRENT:
            return own_params(step, self.states[param(step, "state")], i)
        key = {"rms_norm": "groups", "layer_norm": "groups", "rope": "heads", "head_concat": "heads",
               "head_linear": "heads", "attention": "heads", "block_select": "heads"}.get(step.op)
        if key is None:
            return dict(step.params)
        return {**step.params, key: param(step, key) * (end - begin) // step.outputs[0].width}

    def _exchange(self, step: Step) -> None:
        """Exchange with another group: receiver j gets its copy from sender j modulo the number of senders."""
        for view in step.inputs:
            self.whole(view)
        peers, members = self.groups[param(step, "peer")], self.group
        if step.op == "send":
            pairs = [(j % len(members), peer) for j, peer in enumerate(peers)]
        else:
            pairs = [(j, peers[j % len(peers)]) for j in range(len(members))]
        for i, peer in pairs:
            self._append(i, step, params={"peer": peer})

    # Writing

    def _append(self, i: int, step: Step, inputs=None, outputs=None, weights=None, params=None, cache=None,
                state: tuple[int, int] = (1, 1)) -> None:
        """Append the step to device i, with the given replacements. state: (part, whole) of the device's share of
        states."""
        device = self.devices[i]
        if weights is None:
            for name in step.weights.values():
                device.weight(self.network.weights[name])
        names = step.weights if weights is None else {role: device.weight(each) for role, each in weights.items()}
        if "cache" in step.params:
            for name in filter(None, (param(step, "cache"), step.params.get("cross"))):
                whole = self.network.caches[name]
                is_cut = cache is not None and name in self.caches  # keys of an index are whole on every device
                begin, end = self.caches[name].kv_heads[i] if is_cut else (0, whole.kv_heads)
                device.caches[name] = replace(whole, kv_heads=end - begin)
            if entries := step.params.get("entries"):  # one head: every device has it
                device.caches[entries] = self.network.caches[entries]
        for name in states_of(step).values():
            device.states[name] = _share_of(self.network.states[name], *state)
        if inputs or outputs or weights or params:
            step = Step(step.op, inputs or step.inputs, outputs or step.outputs, names, params or step.params,
                        step.label)
        device.entries[self.entry].append(step)

    def _matrix(self, step: Step) -> tuple[Weight, Weight | None]:
        found = {role: self.network.weights[name] for role, name in step.weights.items()}
        return found["weight"], found.get("bias")

    def _outputs(self, step: Step) -> None:
        """Record outputs of the model: on every device as whole values, or on the single device that has them."""
        if step.op == "receive":
            return
        for name, view in self.network.outputs.items():
            if not any(view.overlaps(y) for y in step.outputs):
                continue
            layout = self.layouts.get(view)
            if isinstance(layout, Partial) and len(layout.adds) == 1:
                self.devices[layout.adds[0]].outputs[name] = view
                continue
            self.whole(view)
            for device in self.devices:
                device.outputs[name] = view


def _share_of(state: State, part: int, whole: int) -> State:
    """A device's share of the heads or channels of a state."""
    sizes = list(state.shape)
    sizes[state.axis] = sizes[state.axis] * part // whole
    return replace(state, shape=tuple(sizes))


PIECES = ".part"


def piece(view: View, span: tuple[int, int]) -> View:
    """A device's columns of a split value, in the piece buffer. `start` is still the start of the whole view."""
    return View(view.buffer + PIECES, view.start, span[1] - span[0])
