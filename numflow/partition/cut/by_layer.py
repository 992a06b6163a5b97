"""The pass that cuts a network by layer: whole steps go to stages; `send` and `receive` where a stage needs a value.

Each step is assigned to the stage of its layer; a step outside of the layers goes where its first input is. Walking
the steps in order, the pass knows which stages have the newest value of every view: a stage that reads a value it does
not have gets it by a `send` right after the steps so far of the stage that made it, and a `receive` of its own. So an
encoder's output reaches every stage that has decoder layers, once. Rotary angles are computed again rather than sent.
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
    """Steps of one group of devices, by entry. Exchanges name the other stage in `peer`. layers: by stack."""

    entries: Mapping[str, tuple[Step, ...]]
    layers: Mapping[str, range]


def cut_by_layer(network: Network, shares: tuple[float, ...],
                 layers: Mapping[str, tuple[int, ...]] | None = None) -> tuple[PipelineStage, ...]:
    """Stages in order.

    shares: how much of the layers each stage takes, about: layers that share a cache stay together. layers: for each
    stack ("" or "enc." and "dec."), how many layers each stage takes instead.

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
    """Layers of a stack that no stage may begin with, as a layer before shares a cache with one from there on."""
    users: dict[str, list[int]] = {}
    for step in (step for steps in network.entries.values() for step in steps if "cache" in step.params):
        place = layer_of(step.label)
        if place and place[0] == stack:
            users.setdefault(step.params["cache"], []).append(place[1])
    return {border for layers in users.values() for border in range(min(layers) + 1, max(layers) + 1)}


def _ranges(stack: str, found: range, shares: tuple[float, ...], layers, closed: set[int]) -> list[range]:
    """The layers of a stack that each stage takes; `found`: those that have steps, from the first to the last."""
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
    """Content of a view: the stage that made it, the stages that have it, and its step if that may be run again."""

    view: View
    owner: int
    stages: set[int]
    source: Step | None = None


class _Walk:
    """Deals the steps of one entry after the other out to the stages."""

    def __init__(self, network: Network, stages: int, ranges: Mapping[str, list[range]]):
        self.network, self.ranges = network, ranges
        self.stages: list[dict[str, list[Step]]] = [{entry: [] for entry in network.entries} for _ in range(stages)]
        self.cache_stage: dict[str, int] = {}

    def entry(self, entry: str, steps: tuple[Step, ...]) -> None:
        """All steps of an entry."""
        self.lists = [stage[entry] for stage in self.stages]
        self.values: list[_Value] = []
        first = next((self._of_layer(step) for step in steps if layer_of(step.label)), 0)
        for step in steps:
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
        """Let a stage have all values that a view shows."""
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
        """A stage makes a new value; of others that overlap, what is not overwritten is brought there first."""
        for value in self.values:
            if value.view.overlaps(view) and not view.covers(value.view):
                self._bring(value.view, stage)
        self.values = [replace(value, owner=stage, stages={stage}) if value.view.overlaps(view) else value
                       for value in self.values if not view.covers(value.view)]
        source = step if step.op in _RECOMPUTED else None
        self.values.append(_Value(view, stage, {stage}, source))
