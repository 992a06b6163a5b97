"""A plan: the steps and weight slices of each device, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from numflow.ops import Network
from numflow.partition.cut.devices import Devices, PlacedDevice


@dataclass(frozen=True)
class DevicePart:
    """One device's part of a network.

    name:     as in the device string ("0", "cpu"). executor: executor name ("cpu", "reference", "cuda").
    index:    index in Plan.devices, used in `peer` and `group` of exchange steps.
    group:    index in Plan.groups. share: as in the device string.
    layers:   layers of the device, by stack: {"": range(0, 12)}, or "enc." and "dec.".
    network:  the device's steps in order, with exchanges (ops.EXCHANGES); their buffers, weights and caches, cut to the
              device's part. A slice of a weight is a separate weight, "blk.0.attn_q.weight[0:288]" (rows) or
              "blk.0.ffn_down.weight[:, 0:768]" (columns). Outputs: the model's outputs that this device has, on R rows.
              A run that stops at an output ends, on a device with this output, at the step that completes the output;
              other devices run all their steps.
    """

    name: str
    executor: str
    index: int
    group: int
    share: float
    layers: Mapping[str, range]
    network: Network


@dataclass(frozen=True)
class Plan:
    """A network cut for several devices.

    network: the whole model.
    placement: the device string. groups: indices into `devices`, one tuple per group, in layer order. Devices run
             concurrently. A `send` waits only for buffer space; all other exchanges wait for their peers.
    """

    network: Network
    placement: Devices
    devices: tuple[DevicePart, ...]
    groups: tuple[tuple[int, ...], ...]

    def part(self, index: int) -> Network:
        """The network as device `index` runs it."""
        return self.devices[index].network

    def owners(self, output: str) -> tuple[int, ...]:
        """Indices of the devices that have this output."""
        return tuple(part.index for part in self.devices if output in part.network.outputs)


def single_device(network: Network, executor: str, name: str = "0") -> Plan:
    """The plan of a single device."""
    layers = layers_by_stack(network)
    part = DevicePart(name, executor, 0, 0, 1.0, layers, network)
    return Plan(network, Devices(((PlacedDevice(name),),)), (part,), ((0,),))


def layer_of(label: str) -> tuple[str, int] | None:
    """Stack and layer index of a step's label: ("dec.", 3) for "dec.blk.3.attn_q"; None outside layers."""
    words = label.split(".")
    index = words.index("blk") if "blk" in words[:2] else -1
    return None if index < 0 else ("".join(f"{word}." for word in words[:index]), int(words[index + 1]))


def layers_by_stack(network: Network) -> dict[str, range]:
    """Range of layers with steps in the network, by stack ("", or "enc." and "dec.")."""
    found: dict[str, list[int]] = {}
    for steps in network.entries.values():
        for place in filter(None, (layer_of(step.label) for step in steps)):
            found.setdefault(place[0], []).append(place[1])
    return {stack: range(min(layers), max(layers) + 1) for stack, layers in found.items()}
