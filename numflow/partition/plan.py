"""Which device runs which steps of a network. Plain data: no device is touched."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from numflow.ops import Network, Step


@dataclass(frozen=True)
class DevicePart:
    """The steps of one device, by entry. `device` is an executor's name ("cpu", "reference")."""

    device: str
    entries: Mapping[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Plan:
    """A network and its parts, one per device, in the order the data flows."""

    network: Network
    devices: tuple[DevicePart, ...]

    def part(self, index: int) -> Network:
        """The network as device `index` runs it: its own steps and the weights and caches that they name."""
        entries = self.devices[index].entries
        steps = [step for part in entries.values() for step in part]
        weights = {name for step in steps for name in step.weights.values()}
        caches = {step.params["cache"] for step in steps if "cache" in step.params}
        return replace(self.network, entries=entries,
                       weights={name: w for name, w in self.network.weights.items() if name in weights},
                       caches={name: c for name, c in self.network.caches.items() if name in caches})


def single_device(network: Network, device: str) -> Plan:
    """Everything on one device."""
    return Plan(network, (DevicePart(device, network.entries),))
