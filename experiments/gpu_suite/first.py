"""First facts about a GPU: its limits, whether kernels load, and the main kernels against the reference."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from experiments.gpu_suite.compiling import wanted
from experiments.gpu_suite.models import SHAPES, TOY
from experiments.gpu_suite.parity import _compare, _model
from experiments.gpu_suite.setting import Setting
from numflow.cuda.compiler.compile import cached, folder, is_cached
from numflow.cuda.device.gpu import Gpu
from tests.cuda.attention_shapes import attention_case
from tests.cuda.matrices import linear_case

ATTRIBUTES = ("MULTIPROCESSOR_COUNT", "CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH", "L2_CACHE_SIZE",
              "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
              "MAX_REGISTERS_PER_MULTIPROCESSOR", "MAX_THREADS_PER_MULTIPROCESSOR")
TOOL = "compute-sanitizer"


def limits(setting: Setting) -> None:
    """The GPU's attributes, and whether every compiled kernel loads."""
    device = setting.device()
    if not isinstance(device, Gpu):
        setting.add(what="left out: the simulator has no limits")
        return
    setting.add(name=device.name, capability=list(device.capability), free_bytes=device.free_bytes(),
                **{name.lower(): device.attribute(name) for name in ATTRIBUTES})
    own = [kernel for kernel in wanted().values() if kernel.runs_on(device.capability)]
    brought = [kernel for kernel in own if is_cached(kernel, device.capability)]
    for kernel in brought:
        with setting.attempt(kernel=kernel.name):
            device.load(cached(kernel, device.capability))
    setting.add(what="kernels that load", brought=len(brought), of=len(own), folder=str(folder()))
    device.close()


def main_cases() -> Iterator[tuple]:
    """Twelve kernels that every model needs: (case, bound, options)."""
    for kind in ("q4", "q3h", "F16"):
        for tokens in (1, 9, 130):
            yield linear_case(kind, 130, 2048, tokens, bias=True), 0.05, {"activations": "int8"}
    tokens = (((0, 70), (1, 3)), ((0, 1), (1, 1)))
    for kind in ("f16", "q4", "q3h"):
        yield attention_case(8, 2, 128, 128, tokens), 6e-3, {"kv_k": kind, "kv_v": kind}


def main_kernels(setting: Setting) -> None:
    """The main kernels against the reference; a second time under compute-sanitizer, if it is installed."""
    for case, bound, options in list(main_cases())[:2 if setting.quick else None]:
        _compare(setting, case, bound, **options)
    tool = None if setting.simulator else shutil.which(TOOL)
    if tool is None or setting.was_tried(what=TOOL):
        return
    with setting.attempt(what=TOOL):
        command = [tool, "--error-exitcode", "9", sys.executable, "-m", "experiments.gpu_suite", "--here", "--quick",
                   "--parts", "main", "--out", str(setting.out / "sanitizer")]
        found = subprocess.run(command, capture_output=True, text=True, timeout=max(setting.left_s, 1), check=False)
        setting.add(what=TOOL, status=found.returncode, said=found.stdout.strip()[-200:], good=found.returncode == 0)


def two_layers(setting: Setting) -> None:
    """An 8B model with two layers: a prompt and two tokens, against the reference."""
    shape = TOY["toy"] if setting.quick else replace(SHAPES["8b"], layers=2, vocabulary=32000, context=2048)
    for kind in ("q4", "F16"):
        if setting.is_over:
            return
        if not setting.was_tried(model="8b, 2 layers", weights=kind, activations="int8"):
            with setting.attempt(model="8b, 2 layers", weights=kind, activations="int8"):
                _model(setting, "8b, 2 layers", shape, kind, "int8")
