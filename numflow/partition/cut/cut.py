"""Cut of a network to a Plan: by layer to stages, each stage by tensor, then a network per device."""

from collections.abc import Mapping
from dataclasses import replace

from numflow.errors import DeviceError
from numflow.network.cost import all_floats
from numflow.network.passes.merge_linears import fuse_linears
from numflow.network.steps.checks import verify
from numflow.ops import Buffer, Network, Step, View
from numflow.partition.cut.by_layer import cut_by_layer
from numflow.partition.cut.by_tensor import PIECES, DeviceSteps, cut_by_tensor
from numflow.partition.cut.choose import cut_caches
from numflow.partition.cut.devices import Devices, parse_devices
from numflow.partition.cut.plan import DevicePart, Plan, layers_by_stack
from numflow.partition.cut.recurrent import cut_states

PLACES = ("split", "placed")


def partition(network: Network, devices: str | Devices, executor: str | Mapping[str, str] = "cpu", *,
              layers: Mapping[str, tuple[int, ...]] | None = None, embedding: str = "split", head: str = "split",
              fuse: bool = True) -> Plan:
    """Cut a network for devices.

    network:   built with fuse=False: fused q, k and v cannot be cut between heads.
    executor:  executor of all devices, or by device name; devices of a group must have the same.
    layers:    for each stack ("", or "enc." and "dec."), the number of layers of each group, instead of shares.
    embedding: the embedding table is "split" by rows in a group, or "placed" on the group's first device.
    head:      the output matrix is "split" by rows, or "placed" on the last group's first device. With tied embeddings,
    a
               group with both holds the table once if both are split or both placed.
    fuse:      merge neighbouring matrix products on each device.

    Raises:
        DeviceError: the device string is wrong, there are fewer layers than groups, or a group has several executors.
        NetworkError: the network cannot be cut there.
    """
    placement = parse_devices(devices) if isinstance(devices, str) else devices
    runs = dict.fromkeys((device.name for device in placement), executor) if isinstance(executor, str) else executor
    _check_groups(placement, runs)
    for name, value in (("embedding", embedding), ("head", head)):
        if value not in PLACES:
            raise DeviceError(f"{name} should be one of {', '.join(PLACES)}, is {value!r}")
    groups = _indices(placement)
    stages = cut_by_layer(network, placement.group_shares, layers)
    parts: list[DevicePart] = []
    for group_index, (stage, group) in enumerate(zip(stages, placement.groups, strict=True)):
        shares = tuple(device.share for device in group)
        cut = cut_by_tensor(network, stage, groups[group_index], shares, groups, cut_caches(network, shares),
                            cut_states(network, shares), embedding, head)
        for device, index, steps in zip(group, groups[group_index], cut, strict=True):
            part = _network(network, steps, fuse)
            verify(part)
            layers_of = stage.layers or layers_by_stack(part)
            parts.append(DevicePart(device.name, runs[device.name], index, group_index, device.share, layers_of, part))
    return Plan(network, placement, tuple(parts), groups)


def _check_groups(placement: Devices, runs: Mapping[str, str]) -> None:
    """Check that each group has one executor: devices of a group exchange data in every layer."""
    for group in placement.groups:
        kinds = {runs[device.name] for device in group}
        if len(kinds) > 1:
            text = "&".join(map(str, group))
            raise DeviceError(f"devices {text}: a group runs on one executor, not on {' and '.join(sorted(kinds))}: "
                              f"put ';' between them, as in {text.replace('&', ';')}")


def _indices(placement: Devices) -> tuple[tuple[int, ...], ...]:
    groups, first = [], 0
    for group in placement.groups:
        groups.append(tuple(range(first, first + len(group))))
        first += len(group)
    return tuple(groups)


def _network(network: Network, device: DeviceSteps, fuse: bool) -> Network:
    """A device's network: its steps and their buffers; piece buffers have only the pieces' columns."""
    views = {view for steps in device.entries.values() for step in steps for view in (*step.inputs, *step.outputs)}
    starts = _places({view for view in views if view.buffer.endswith(PIECES)})

    placed = {view: View(view.buffer, starts[view.buffer, view.start], view.width)
              for view in views if view.buffer.endswith(PIECES)}
    cut = {view.buffer for view in placed}

    def moved(step: Step) -> Step:
        if not any(view.buffer in cut for view in (*step.inputs, *step.outputs)):
            return step
        inputs, outputs = (tuple(placed.get(view, view) for view in side) for side in (step.inputs, step.outputs))
        return Step(step.op, inputs, outputs, step.weights, step.params, step.label)

    buffers = {}
    for name in dict.fromkeys(view.buffer for view in sorted(views, key=lambda v: (v.buffer, v.start))):
        whole = network.buffers[name.removesuffix(PIECES)]
        width = max(placed.get(view, view).start + view.width for view in views if view.buffer == name)
        buffers[name] = Buffer(name, whole.rows, width if name.endswith(PIECES) else whole.width, whole.dtype)
    own = replace(network, entries={entry: tuple(map(moved, steps)) for entry, steps in device.entries.items()},
                  buffers=buffers, weights=device.weights, caches=device.caches, outputs=device.outputs,
                  states=device.states,
                  # Executors choose by the types of all weights of the model: same choice on all devices.
                  facts={**network.facts, "all_floats": all_floats(network)})
    return fuse_linears(own) if fuse else own


def _places(views: set[View]) -> dict[tuple[str, int], int]:
    """First column of each piece, by (buffer, start of the whole view); pieces are contiguous, in order of views."""
    widths: dict[tuple[str, int], int] = {}
    for view in views:
        widths[view.buffer, view.start] = max(view.width, widths.get((view.buffer, view.start), 0))
    places: dict[tuple[str, int], int] = {}
    ends: dict[str, int] = {}
    for buffer, start in sorted(widths):
        places[buffer, start] = ends.get(buffer, 0)
        ends[buffer] = places[buffer, start] + widths[buffer, start]
    return places
