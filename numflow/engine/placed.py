"""A model over several devices: from a device string to a running plan (`numflow.load(..., devices="0&1;2&3")`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from numflow import formats, network
from numflow.engine.adapters.given import GivenAdapter, with_adapters
from numflow.engine.requantise import Requantising, requantised
from numflow.errors import DeviceError, option
from numflow.formats.checkpoint import Checkpoint
from numflow.network.adapters.steps import adaptable
from numflow.ops import Network
from numflow.partition.cut.cpu_layers import with_cpu_layers
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import executors_of, parse_devices
from numflow.partition.run.program import PROGRESS_S, PlanProgram
from numflow.registry.progress import Silent
from numflow.spec.reader import Spec


@dataclass(frozen=True)
class SharedWeights:
    """Weights of a device, from a checkpoint that is open in this process."""

    checkpoint: Checkpoint

    def __call__(self, part: Network) -> network.WeightSource:
        return network.WeightSource(part, self.checkpoint)


@dataclass(frozen=True)
class FileWeights:
    """Weights of a device, from the model's files, which the device's process opens.

    quantising: quantisation while weights are read, as by `numflow.load`. adapters: merged before quantisation.
    """

    path: Path
    spec: Spec
    quantising: Requantising | None = None
    adapters: tuple[GivenAdapter, ...] = ()

    def __call__(self, part: Network) -> network.WeightSource:
        checkpoint = with_adapters(formats.open_checkpoint(self.path), self.spec, self.adapters)
        if self.quantising is not None:
            checkpoint = requantised(checkpoint, self.spec, self.quantising, None, Silent(), kept=not self.adapters)
        return network.WeightSource(part, checkpoint)


def placed_program(built: Network, backend: str, modules: Mapping[str, str], devices: str | None,
                   checkpoint: Checkpoint, files: FileWeights, transport: str = "threads", timeout: float = PROGRESS_S,
                   cpu_layers: int = 0, options: Mapping[str, Any] | None = None, adapting: bool = False) -> Any:
    """Program of a model over several devices.

    built: the network with separate matrix products (fuse=False). modules: modules of the executors, by name.
    files: weights for devices that are not threads of this process. transport: as for PlanProgram, or "ray" for
    RayProgram. timeout: as for PlanProgram. cpu_layers: number of layers on the CPU beside the GPUs of `devices`
    (partition/cut/cpu_layers.py). options: options of the executors' Programs. adapting: whether rows may use adapters
    of their own; not with transport "ray".

    Raises:
        DeviceError: the device string is wrong, the backend does not support it, or a device cannot be started.
    """
    if backend == "cuda" and transport not in ("threads", "ray"):
        raise DeviceError(f"{option('transport', transport)} is for devices of the CPU; those of backend 'cuda' "
                          "are threads of one process, or of an actor for each group "
                          f"({option('transport', 'ray')})")
    placement, layers = parse_devices("0" if devices is None else devices), None
    if cpu_layers:
        placement, layers = with_cpu_layers(built, devices, cpu_layers)
    runs = executors_of(placement, backend)
    plan = partition(built, placement, runs, layers=layers)
    if adapting:
        plan = replace(plan, devices=tuple(replace(part, network=adaptable(part.network, checkpoint))
                                           for part in plan.devices))
    if transport == "ray":
        from numflow.partition.cluster.program import RayProgram

        return RayProgram(plan, {name: modules[name] for name in set(runs.values())}, files, timeout,
                          **dict(options or {}))
    executors = {name: import_module(modules[name]) for name in set(runs.values())}
    source = files if transport == "processes" else SharedWeights(checkpoint)
    return PlanProgram(plan, executors, source, transport, timeout, **dict(options or {}))
