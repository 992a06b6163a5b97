"""Cut by layer (pipeline parallel): steps are assigned to stages, with `send` and `receive` between stages.

A step belongs to the stage of its layer; a step outside layers, to the stage of its first input. The pass visits steps
in order and tracks the stages that have the current value of each view. If a stage reads a value that it does not have,
the producing stage gets a `send` after its steps so far, and the reader a `receive`. So an encoder's output is sent
once to each stage with decoder layers. Rotary angles are recomputed instead of sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from numflow.errors import DeviceError, NetworkError
from numflow.ops import Network, Step, View
from numflow.partition.cut.plan import layer_of, layers_by_stack
from numflow.partition.cut.spans import layer_spans, nearest_spans

_RECOMPUTED = ("rope_angles",)


@dataclass(frozen=True)
class PipelineStage:
    """Steps of one group of devices, by entry. Exchanges have the index of the other stage in `peer`. layers: by
    stack."""

    entries: Mapping[str, tuple[Step, ...]]
    layers: Mapping[str, range]


def cut_by_layer(network: Network, shares: tuple[float, ...],
                 layers: Mapping[str, tuple[int, ...]] | None = None) -> tuple[PipelineStage, ...]:
    """Stages in order.

    shares: approximate fractions of the layers; layers that share a cache stay together. layers: for each stack ("", or
    "enc." and "dec."), the number of layers of each stage instead.

    Raises:
        DeviceError: fewer layers than stages, or counts that do not add up.
        NetworkError: a cache is used by layers of two stages.
    """
    ranges = {stack: _ranges(stack, found, shares, layers, _within_caches(network, stack))
              for stack, found in layers_by_stack(network).items()}
    walk = _Walk(network, len(shares), ranges)
    for entry, steps in network.entries.items():
        walk.entry(entry, steps)
    return tuple(PipelineStage({entry: tuple(steps) for entry, steps in stage.items()},
                               {stack: spans[i] for stack, spans in ranges.items()})
                 for i, stage in enumerate(walk.stages))


def _within_caches(network: Network, stack: str) -> set[int]:
    """Layers at which no stage may begin, because a cache is shared by layers before and from there on."""
    users: dict[str, list[int]] = {}
    for step in (step for steps in network.entries.values() for step in steps if "cache" in step.params):
        place = layer_of(step.label)
        if place and place[0] == stack:
            users.setdefault(step.params["cache"], []).append(place[1])
    return {border for layers in users.values() for border in range(min(layers) + 1, max(layers) + 1)}


def _ranges(stack: str, found: range, shares: tuple[float, ...], layers, closed: set[int]) -> list[range]:
    """The layers of a stack for each stage. found: range of layers with steps. closed: see `_within_caches`."""
    if layers is not None:
        counts = layers[stack]
        if len(counts) != len(shares) or min(counts) < 1 or sum(counts) != len(found):
            raise DeviceError(f"layers {counts} of {len(shares)} groups should be at least 1 each and {len(found)} "
                              "together")
        ends = [found.start + sum(counts[:i + 1]) for i in range(len(counts))]
        return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    if len(found) < len(shares):
        raise DeviceError(f"{len(found)} layers cannot be cut into {len(shares)} groups of devices: name at most "
                          f"{len(found)} groups, or join devices with '&'")
    spans = nearest_spans(layer_spans(len(found), shares), {border - found.start for border in closed})
    return [range(found.start + begin, found.start + end) for begin, end in spans]


@dataclass
class _Value:
    """The current value of a view: producing stage, stages that have it, and the step, if it may be recomputed."""

    view: View
    owner: int
    stages: set[int]
    source: Step | None = None


class _Walk:
    """Assigns the steps of one entry after another to stages."""

    def __init__(self, network: Network, stages: int, ranges: Mapping[str, list[range]]):
        self.network, self.ranges = network, ranges
        self.stages: list[dict[str, list[Step]]] = [{entry: [] for entry in network.entries} for _ in range(stages)]
        self.cache_stage: dict[str, int] = {}

    def entry(self, entry: str, steps: tuple[Step, ...]) -> None:
        """Assign all steps of an entry."""
        self.lists = [stage[entry] for stage in self.stages]
        self.values: list[_Value] = []
        first = next((self._of_layer(step) for step in steps if layer_of(step.label)), 0)
        others = [other for name, other in self.network.entries.items() if name != entry]
        for index, step in enumerate(steps):
            self.later = [steps[index + 1:], *others]
            stage = self._stage(step, first)
            self._check_cache(step, stage)
            for view in step.inputs:
                self._bring(view, stage)
            for view in step.outputs:
                self._write(view, stage, step)
            self.lists[stage].append(step)

    def _stage(self, step: Step, first: int) -> int:
        if layer_of(step.label) is not None:
            return self._of_layer(step)
        owners = [value.owner for value in self.values if step.inputs and value.view.overlaps(step.inputs[0])]
        return owners[-1] if owners else first

    def _of_layer(self, step: Step) -> int:
        stack, layer = layer_of(step.label) or ("", 0)
        return next(i for i, span in enumerate(self.ranges[stack]) if layer in span)

    def _check_cache(self, step: Step, stage: int) -> None:
        cache = step.params.get("cache")
        if cache is not None and self.cache_stage.setdefault(cache, stage) != stage:
            raise NetworkError(f"{step}: cache {cache!r} belongs to a layer of another group of devices; cut the "
                               "model elsewhere, or by tensor")

    def _bring(self, view: View, stage: int) -> None:
        """Send all current values in a view to a stage that lacks them."""
        for value in self.values:
            if stage in value.stages or not value.view.overlaps(view):
                continue
            value.stages.add(stage)
            if value.source is not None:
                self.lists[stage].append(value.source)
                continue
            label = f"{value.view.buffer}: group {value.owner} to {stage}"
            self.lists[value.owner].append(Step("send", (value.view,), (), {}, {"peer": stage}, label))
            self.lists[stage].append(Step("receive", (), (value.view,), {}, {"peer": value.owner}, label))

    def _write(self, view: View, stage: int, step: Step) -> None:
        """Record a new value of a stage. Values that it overwrites in part are sent there first, if the rest of their
        columns is read later; else they are no values any more."""
        current = []
        for value in self.values:
            if not value.view.overlaps(view):
                current.append(value)
            elif any(self._is_read(rest) for rest in _without(value.view, view)):
                self._bring(value.view, stage)
                current.append(replace(value, owner=stage, stages={stage}))
        source = step if step.op in _RECOMPUTED else None
        self.values = [*current, _Value(view, stage, {stage}, source)]

    def _is_read(self, view: View) -> bool:
        """Whether a later step or another entry reads columns of a view before they are written, or they are output."""
        return (any(_read_before_written(view, steps) for steps in self.later)
                or any(view.overlaps(output) for output in self.network.outputs.values()))


def _without(view: View, written: View) -> list[View]:
    """The columns of a view before and behind another one."""
    begin, end, behind = view.start, view.start + view.width, written.start + written.width
    pieces = [View(view.buffer, begin, written.start - begin), View(view.buffer, behind, end - behind)]
    return [piece for piece in pieces if piece.width > 0]


def _read_before_written(view: View, steps: tuple[Step, ...]) -> bool:
    for step in steps:
        if any(view.overlaps(x) for x in step.inputs):
            return True
        if any(y.covers(view) for y in step.outputs):
            return False
    return False
