"""A plan: the steps and slices of weights of each device. Plain data: no device is touched."""

from collections.abc import Mapping
from dataclasses import dataclass

from numflow.ops import Network
from numflow.partition.cut.devices import Devices, PlacedDevice


@dataclass(frozen=True)
class DevicePart:
    """One device's part of a network.

    name:     as in the device string ("0", "cpu"). executor: who runs it ("cpu", "reference", "cuda").
    index:    its place in Plan.devices, which is what the `peer` and `group` of exchange steps name.
    group:    its place in Plan.groups. share: as in the device string.
    layers:   layers of the model whose steps it runs, by stack: {"": range(0, 12)}, or "enc." and "dec.".
    network:  its own steps, in order, with exchanges (ops.EXCHANGES) where the devices meet; the buffers, weights and
              caches that they name, cut to the device's share. A slice of a weight is a weight of its own, called
              "blk.0.attn_q.weight[0:288]" (rows) or "blk.0.ffn_down.weight[:, 0:768]" (columns).
              Outputs: those of the model that this device has, on R rows. A run that stops at an output ends, on
              a device that has it, with the step that completes it; all others run all of their steps.
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

    network: the whole model, as one device would run it.
    placement: the device string it follows. groups: indices into `devices`, one tuple per group, in the order of
             the layers. Devices run at the same time; a `send` never waits for more than room, all other exchanges
             wait for their peers.
    """

    network: Network
    placement: Devices
    devices: tuple[DevicePart, ...]
    groups: tuple[tuple[int, ...], ...]

    def part(self, index: int) -> Network:
        """The network as device `index` runs it."""
        return self.devices[index].network

    def owners(self, output: str) -> tuple[int, ...]:
        """Devices that have this output of the model at the end of a run."""
        return tuple(part.index for part in self.devices if output in part.network.outputs)


def single_device(network: Network, executor: str, name: str = "0") -> Plan:
    """Everything on one device."""
    layers = layers_by_stack(network)
    part = DevicePart(name, executor, 0, 0, 1.0, layers, network)
    return Plan(network, Devices(((PlacedDevice(name),),)), (part,), ((0,),))


def layer_of(label: str) -> tuple[str, int] | None:
    """Stack and number of the layer that a step's label names: ("dec.", 3) of "dec.blk.3.attn_q"; None of others."""
    words = label.split(".")
    at = words.index("blk") if "blk" in words[:2] else -1
    return None if at < 0 else ("".join(f"{word}." for word in words[:at]), int(words[at + 1]))


def layers_by_stack(network: Network) -> dict[str, range]:
    """First to last layer of each stack ("" or "enc." and "dec.") that has steps in the network."""
    found: dict[str, list[int]] = {}
    for steps in network.entries.values():
        for place in filter(None, (layer_of(step.label) for step in steps)):
            found.setdefault(place[0], []).append(place[1])
    return {stack: range(min(numbers), max(numbers) + 1) for stack, numbers in found.items()}
