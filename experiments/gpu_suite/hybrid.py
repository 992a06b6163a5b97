"""Plans over several devices: GPUs by layer and by tensor, a CPU beside a GPU: speed and error."""

import time

import numpy as np

from experiments.gpu_suite.setting import Setting
from numflow.cpu import program as cpu
from numflow.cuda import program as cuda
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch
from numflow.partition.cut.cpu_layers import with_cpu_layers
from numflow.partition.cut.cut import partition
from numflow.partition.cut.devices import executors_of, parse_devices
from numflow.partition.run.program import PlanProgram

SHAPES = {"1b": Shape(16, 2048, 32, 8, 8192, 128256, 8192), "8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192)}
TOY = {"toy": Shape(2, 64, 4, 2, 96, 101, 512)}
PLANS = ("0", "0;1", "0&1", "0&1;2&3")
CPU_LAYERS = (1, 2, 4, 8, -2)
PROMPT, STEPS = 512, 32


def hybrid(setting: Setting) -> None:
    """Decoding speed and prompt time of each plan, and its difference from one GPU."""
    for name, shape in (TOY if setting.quick else SHAPES).items():
        network, checkpoint = random_network(shape, "q4", fuse=False)
        alone = None
        for devices, layers in _placements(network, setting.quick):
            if setting.is_over:
                return
            counts = ";".join(map(str, next(iter(layers.values())))) if layers else "even"
            if setting.was_tried(model=name, devices=str(devices), layers=counts):
                continue
            with setting.attempt(model=name, devices=str(devices), layers=counts):
                program = program_of(network, checkpoint, devices, layers, setting)
                try:
                    facts, logits = measured(program, shape, setting.quick)
                finally:
                    program.close()
                alone = logits if alone is None else alone
                setting.add(model=name, devices=str(devices), layers=counts,
                            off=float(np.abs(logits - alone).max() / alone.std()), **facts)


def _placements(network, quick: bool):
    """Device strings of GPUs, then numbers of layers on the CPU."""
    found = [(parse_devices(text), None) for text in (PLANS[:3] if quick else PLANS)]
    return found + [with_cpu_layers(network, None, count) for count in ((1, -1) if quick else CPU_LAYERS)]


def program_of(network, checkpoint, devices, layers, setting: Setting, **options) -> PlanProgram:
    """A program of GPUs and a CPU, with memory for a prompt and the tokens that are measured after it."""
    plan = partition(network, devices, executors_of(devices, "cuda"), layers=layers)
    program = PlanProgram(plan, {"cpu": cpu, "cuda": cuda}, lambda part: WeightSource(part, checkpoint),
                          gpu="simulator" if setting.simulator else "gpu", **options)
    program.reserve(-(-(PROMPT + STEPS) // program.block_size))
    return program


def measured(program: PlanProgram, shape: Shape, quick: bool) -> tuple[dict, np.ndarray]:
    """The measurements, and the logits after the prompt."""
    tokens, steps = (6, 2) if quick else (PROMPT, STEPS)
    ids = np.random.default_rng(0).integers(0, shape.vocabulary, tokens)
    for _ in range(1 if quick else 2):
        begin = time.perf_counter()
        logits = program.run(_batch(program, ids, 0))
        prompt = time.perf_counter() - begin
    times = []
    for step in range(steps):
        begin = time.perf_counter()
        program.run(_batch(program, ids[:1], tokens + step))
        times.append(time.perf_counter() - begin)
    token = float(np.median(times))
    weights = [n / 1e9 for n in program.device_weights_bytes]
    return {"prompt_tokens_per_s": tokens / prompt, "milliseconds_a_token": token * 1e3, "tokens_per_s": 1 / token,
            "gigabytes": " ".join(f"{n:.3g}" for n in weights)}, logits


def _batch(program: PlanProgram, ids: np.ndarray, begin: int) -> Batch:
    count = len(ids)
    blocks = np.arange(-(-(begin + count) // program.block_size))[None]
    return Batch(ids, np.arange(begin, begin + count), np.array([0, count]), blocks, np.array([count - 1]))
