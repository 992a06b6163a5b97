"""Plans of tiny models, and the results of one device for the same inputs."""

from importlib import import_module

import numpy as np

from numflow import network
from numflow.network import WeightSource
from numflow.network.passes.merge_linears import fuse_linears
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from tests.specs.case import gguf_checkpoint, load_case, memory_checkpoint, run

TOLERANCE = 1e-5  # by tensor, sums are made in another order


def model_of(name: str, gguf: bool = False):
    """(unfused network, checkpoint, arguments of `run`) of a family's tiny model."""
    case = load_case(name)
    checkpoint = gguf_checkpoint(case) if gguf else memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    given = case.inputs[0]
    if "decoder_ids" in given:
        return built, checkpoint, {"ids": given["decoder_ids"], "encoder_ids": given["ids"]}
    return built, checkpoint, {"ids": given["ids"], "types": given.get("types")}


def executor(backend: str):
    return import_module(f"numflow.{backend}.program")


def options(backend: str) -> dict:
    return {"activations": "f32", "threads": 1} if backend == "cpu" else {}


def one_device(built, checkpoint, backend: str, **given) -> np.ndarray:
    """Logits of one device (hidden states of models without a head)."""
    whole = fuse_linears(built)
    program = executor(backend).Program(whole, WeightSource(whole, checkpoint), **options(backend))
    try:
        return run(program, output=_output(built), **given)
    finally:
        program.close()


def several_devices(built, checkpoint, backend: str, devices: str, plan: dict | None = None, **given) -> np.ndarray:
    """Logits or hidden states of a plan's devices."""
    program = placed(built, checkpoint, backend, devices, plan)
    try:
        return run(program, output=_output(built), **given)
    finally:
        program.close()


def placed(built, checkpoint, backend: str, devices: str, plan: dict | None = None, **more) -> PlanProgram:
    cut = partition(built, devices, backend, **(plan or {}))
    return PlanProgram(cut, executor(backend), lambda part: WeightSource(part, checkpoint), **options(backend) | more)


def _output(built) -> str:
    return "logits" if "logits" in built.outputs else "hidden"


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the standard deviation of the expected values."""
    return float(np.abs(found - expected).max() / expected.std())
