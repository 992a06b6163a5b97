"""Options that travel together: a command's parameter of such a class becomes one option per field."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from numflow.cli import options
from numflow.cli.strategies import strategy


@dataclass(frozen=True)
class Execution:
    """Executor and number types: the options that all commands hand on to numflow.load."""

    threads: options.Threads = None
    device: options.Device = "cpu"
    activations: options.Activations = "int8"
    weights: options.Weights = None
    imatrix: options.Imatrix = None
    kv: options.KV = None
    kv_k: options.KVK = None
    kv_v: options.KVV = None
    host_embeddings: options.HostEmbeddings = False
    host_kv_percent: options.HostKV = 0.0
    cpu_layers: options.CpuLayers = 0
    devices: options.Devices = None
    transport: options.Transport = "threads"
    collectives: options.Collectives = None
    spec: options.SpecFile = None
    offline: options.Offline = False

    def arguments(self) -> dict[str, Any]:
        """Arguments of numflow.load. What only GPUs have is there if it was given."""
        given = dict(vars(self))
        given["backend"] = given.pop("device")
        return {name: value for name, value in given.items()
                if value or name not in ("host_embeddings", "host_kv_percent", "cpu_layers", "collectives")}

    @property
    def compiles(self) -> bool:
        """Whether kernels for the processor may have to be compiled."""
        return self.device == "cpu" or bool(self.cpu_layers) or "cpu" in (self.devices or "").lower()


@dataclass(frozen=True)
class SamplingOptions:
    """Options for choosing the next token."""

    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    seed: options.Seed = None
    decoding: options.Decoding = None
    repetition_penalty: options.RepetitionPenalty = None
    set_: options.Set = None
    speculate: options.Speculate = None

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings of a generation that were given, these and others.

        Raises:
            RequestError: as of `strategy`.
        """
        given = dict(vars(self))
        return strategy(given.pop("set_"), decoding_alg=given.pop("decoding"), **given, **more)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with an option for every field of its parameters that are groups."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        kind = groups[parameter.name]
        types = get_type_hints(kind, include_extras=True)
        parameters += [inspect.Parameter(field.name, plain, default=field.default, annotation=types[field.name])
                       for field in fields(kind)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
