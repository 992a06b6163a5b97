"""Profiler counters of four kernels, beside those of the cost model.

Nsight Compute (`ncu`) profiles a step of each case in a separate process, and the PTX interpreter counts the same
launch (tests/cuda/ptx). If they differ, the model is wrong, or ptxas has changed the code.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from experiments.gpu_suite.setting import Setting
from numflow.cuda.compiler.compile import cached
from numflow.cuda.device.gpu import Gpu, open_device
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.errors import DeviceError
from tests.cuda.attention_shapes import attention_case
from tests.cuda.matrices import linear_case

TOOL = "ncu"
_READ, _WRITE = ("l1tex__t_{}_pipe_lsu_mem_global_op_" + way + ".sum" for way in ("ld", "st"))
_CONFLICTS = tuple(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{way}.sum" for way in ("ld", "st"))
_INSTRUCTIONS, _TIME, _BYTES = "smsp__inst_executed.sum", "gpu__time_duration.sum", "dram__bytes_read.sum"
METRICS = (_INSTRUCTIONS, *(way.format(what) for way in (_READ, _WRITE) for what in ("requests", "sectors")),
           *_CONFLICTS, _TIME, _BYTES)
CASES = {"q4, 1 token": "gemv", "q3h, 1 token": "gemv", "q4, 128 tokens": "gemm", "attention, 1 token": "attention_few"}


def counters(setting: Setting) -> None:
    """Profiler counters of four kernels beside the model's."""
    tool = None if setting.simulator else shutil.which(TOOL)
    if tool is None:
        setting.add(what=f"left out: counters are the profiler's, and {TOOL} is not on the PATH (cuda.bindings has no "
                    "CUPTI)" if not setting.simulator else "left out: the simulator has no counters")
        return
    for name in CASES:
        if setting.is_over:
            return
        if not setting.was_tried(case=name):
            with setting.attempt(case=name):
                kernel, on, measured = profiled(setting, tool, name)
                model = expected(name, on, setting.quick)
                setting.add(case=name, kernel=kernel, on=on, **beside(measured, model))


def beside(measured: dict, model: dict) -> dict:
    """Measured and predicted values side by side, or why there is no prediction."""
    if "failed" in model:
        return {**measured, "model": model["failed"]}
    return {key: value for name, number in measured.items()
            for key, value in ((name, number), (f"{name} (model)", model[name]))}


def profiled(setting: Setting, tool: str, name: str) -> tuple[str, str, dict]:
    """Profile a case: the kernel, the GPU, and the profiler's counters of the kernel's last launch.

    Raises:
        RuntimeError: the profiler or the profiled program failed; the message quotes it.
    """
    names = setting.out / "counters-names.json"
    names.unlink(missing_ok=True)
    command = [tool, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "mangled",
               "--clock-control", "none", "--target-processes", "all", "--metrics", ",".join(METRICS),
               sys.executable, "-m", "experiments.gpu_suite.counters", "--case", name, "--names", str(names),
               *["--quick"] * setting.quick]
    found = subprocess.run(command, capture_output=True, text=True, timeout=max(setting.left_s, 1), check=False)
    rows = raw_page(found.stdout)
    if found.returncode or not rows:
        said = [line for line in f"{found.stdout}\n{found.stderr}".splitlines() if line.startswith("==ERROR==")]
        raise RuntimeError(said[0] if said else f"{TOOL} ended with {found.returncode} and {len(rows)} kernels: "
                           f"{found.stderr.strip()[-150:]}")
    kernel, symbol, on = json.loads(names.read_text())
    mine = [row for row in rows if row["Kernel Name"].partition("(")[0] == symbol]
    if not mine:
        raise RuntimeError(f"{TOOL} saw no launch of {kernel}")
    number = {metric: float(mine[-1][metric].replace(",", "")) for metric in METRICS}

    def per_request(way: str) -> float:
        return number[way.format("sectors")] / max(number[way.format("requests")], 1)

    return kernel, on, {
        "instructions": number[_INSTRUCTIONS], "sectors of a read": per_request(_READ),
        "sectors of a write": per_request(_WRITE), "conflicts": sum(number[way] for way in _CONFLICTS),
        "us": number[_TIME] / 1e3, "MB": number[_BYTES] / 1e6}


def raw_page(text: str) -> list[dict[str, str]]:
    """Rows of kernels in the profiler's CSV output, without the profiled program's output and the row of units."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(line for line in lines[begin:] if line.startswith('"'))
    return [row for row in rows if row["ID"]]


def expected(name: str, on: str, quick: bool) -> dict:
    """The same counters from the PTX interpreter, and the time from the cost model.

    on: name of the GPU; if it is not known to the model, an H200 is taken. "failed": why there is no prediction.
    """
    from tests.cuda.on_ptx.predict import Options, Sampling, predicted
    from tests.cuda.ptx.model import CARDS

    card = next((key for key in CARDS if key in on), "H200")
    device = Sampling(1 << 30, Options.for_card(card))
    try:
        run(name, device, quick)
        work, checks = next(pair for pair in reversed(device.found) if pair[0].kernel.name.startswith(CASES[name]))
        model = predicted(work, checks, CARDS[card])
    except DeviceError as problem:  # no compiler here, and no PTX brought along
        return {"failed": f"no prediction: {problem}"[:200]}
    found = checks.counters[work.kernel.name]
    scale = int(np.prod(work.grid)) / max(found.blocks, 1)
    extra = sum(found.of("shared", way).passes - found.of("shared", way).least for way in ("read", "write"))
    return {"instructions": scale * found.instructions, "sectors of a read": found.sectors_per_request(),
            "sectors of a write": found.sectors_per_request("write"), "conflicts": scale * extra,
            "us": 1e6 * model.seconds, "MB": model.bytes / 1e6}


def run(name: str, device, quick: bool) -> None:
    """Run a case on a device; its last step is the one to be counted."""
    kind, _, rest = name.partition(", ")
    n, k = (128, 512) if quick else (4096, 4096)
    if kind == "attention":
        case = attention_case(32, 8, 128, 128, (((0, 40 if quick else 1000),), ((0, 1),)))
    else:
        case = linear_case(kind, n, k, int(rest.split()[0]), fill="repeated")
    program = Program(case.network, case.weights, gpu=device)
    try:
        program.reserve(case.blocks(program.block_size))
        device.counts = True
        for step in case.runs(program.block_size):
            program.run(step.batch, step.entry, step.output)
    finally:
        program.close()


def main() -> None:
    """Run a case on the GPU, for the profiler; write the kernel's name, its symbol and the GPU's name to the file
    --names."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_suite.counters", description=main.__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--names", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    notebook, device = Notebook(), open_device("gpu", careful=True)
    run(options.case, notebook, options.quick)
    kernel = next(work.kernel for work in reversed(notebook.launches) if work.kernel.name.startswith(
        CASES[options.case]))
    assert isinstance(device, Gpu)
    options.names.write_text(json.dumps([kernel.name, cached(kernel, device.capability).symbol, device.name]))
    run(options.case, device, options.quick)
    device.close()


if __name__ == "__main__":
    main()
