"""The GPU suite is robust: failures become rows, killed processes are noted, results are not lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu_suite import counters
from experiments.gpu_suite.__main__ import PARTS, STAGES, apart
from experiments.gpu_suite.report import write
from experiments.gpu_suite.setting import FAULT_CODE, INTERRUPTED, MOST_FAILURES, OVER, Setting, kept
from numflow.cuda.survey import Notebook
from tests.cuda.kernels import compiler_is_there

BEGIN = """
import os, sys, time
from pathlib import Path
from experiments.gpu_suite.setting import Setting
setting = Setting(True, True, Path(sys.argv[1]), "copies")
setting.device()
setting.add(what="copy on the device", megabytes=1, gigabytes_per_s=2.0)
"""


@pytest.fixture
def setting(tmp_path):
    return Setting(True, True, tmp_path, "copies")


def _apart(setting, code, limit_s=60.0):
    apart(setting, [sys.executable, "-c", BEGIN + code, str(setting.out)], limit_s)
    return kept(setting.path)


def test_what_fails_is_a_row_and_the_part_goes_on(setting):
    def part(setting):
        for size in (1, 2, 3):
            with setting.attempt(size=size):
                if size == 2:
                    raise ValueError("two | is\ntoo much")
                setting.add(size=size, good=True)

    setting.run(part)
    facts = kept(setting.path)
    assert [row.get("failed") for row in facts["rows"]] == [None, "ValueError: two | is\ntoo much", None]
    assert facts["error"] == "" and not facts["complete"]
    assert setting.is_done()
    write(setting.out)
    assert "| 2 | ValueError: two / is too much |" in (setting.out / "README.md").read_text()


FAULTY = """
from numflow.errors import DeviceFaultError
from experiments.gpu_suite.setting import FAULT_CODE
setting = Setting(True, True, Path(sys.argv[1]), "copies")
def part(setting):
    for size in range(5):
        if not setting.was_tried(size=size):
            with setting.attempt(size=size):
                if size in (1, 3):
                    raise DeviceFaultError("kernel copy_rows: CUDA_ERROR_ILLEGAL_ADDRESS")
                setting.add(size=size, good=True, process=os.getpid())
sys.exit(FAULT_CODE if setting.run(part) else 0)
"""


def test_a_fault_ends_the_process_and_the_next_one_goes_on_behind_the_row(setting):
    command = [sys.executable, "-c", BEGIN.rpartition("setting = ")[0] + FAULTY, str(setting.out)]
    assert [apart(setting, command) for _ in range(3)] == [FAULT_CODE, FAULT_CODE, 0]
    facts = kept(setting.path)
    assert [(row["size"], "failed" in row) for row in facts["rows"]] == [
        (0, False), (1, True), (2, False), (3, True), (4, False)]
    assert len({row["process"] for row in facts["rows"] if "process" in row}) == 3
    assert facts["error"] == "" and setting.is_done()


def test_a_part_in_which_everything_fails_gives_up(setting):
    def part(setting):
        for size in range(100):
            with setting.attempt(outer=size), setting.attempt(size=size):
                raise RuntimeError("the GPU is lost")

    setting.run(part)
    facts = kept(setting.path)
    assert len(facts["rows"]) == MOST_FAILURES
    assert facts["error"].startswith("GivenUp") and "the GPU is lost" in facts["error"]
    assert not setting.is_done()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "how"), [("os.kill(os.getpid(), 9)", "its process ended with signal 9"),
                                           ("sys.exit(3)", "its process ended with code 3")])
def test_a_process_that_ends_early_leaves_what_it_found(setting, code, how):
    facts = _apart(setting, code)
    assert facts["rows"] == [{"what": "copy on the device", "megabytes": 1, "gigabytes_per_s": 2.0}]
    assert facts["error"].endswith(how) and facts["device"] == "simulated GPU 0"
    assert not setting.is_done()


def test_a_process_that_never_ends_is_killed(setting):
    facts = _apart(setting, "time.sleep(600)", 0.5)
    assert facts["error"] == "killed after 0.5 s"
    assert not setting.is_done()


@pytest.mark.slow
def test_what_is_run_again(setting):
    """Interrupted parts, damaged files and results of other sizes are run again; finished parts are not."""
    assert not setting.is_done()
    assert _apart(setting, "")["error"] == INTERRUPTED  # as after a kill of both processes
    assert not setting.is_done()
    setting.path.write_text('{"part": "copies", "rows": [')
    assert not setting.is_done()
    write(setting.out)
    assert not (setting.out / "README.md").exists()
    setting.run(lambda setting: setting.add(what="all"))
    assert setting.is_done()
    assert not Setting(False, False, setting.out, "copies").is_done()


def test_a_part_that_the_clock_ends_goes_on(setting):
    """Existing rows are not measured again; missing ones are."""
    def part(setting, until):
        for size in range(4):
            if not setting.was_tried(size=size):
                with setting.attempt(size=size):
                    setting.add(size=size)
            if size == until:
                setting.limit_s = -1.0
            if setting.is_over:
                return

    setting.run(lambda setting: part(setting, 1))
    assert kept(setting.path)["error"] == OVER and not setting.is_done()
    again = Setting(True, True, setting.out, "copies")
    again.run(lambda setting: part(setting, None))
    assert [row["size"] for row in kept(setting.path)["rows"]] == [0, 1, 2, 3]
    assert again.is_done() and kept(setting.path)["complete"]


@pytest.mark.slow
def test_a_stage_leaves_one_file_for_all_of_its_parts(tmp_path):
    command = [sys.executable, "-m", "experiments.gpu_suite", "--simulator", "--quick", "--stage", "1", "--out",
               str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=600)
    found = kept(tmp_path / "stage-1.json")
    assert [part["part"] for part in found["parts"]] == list(STAGES[0])
    assert all(part["complete"] and part["rows"] for part in found["parts"])


def test_every_part_has_a_stage():
    assert sorted(part for parts in STAGES for part in parts) == sorted(set(PARTS) - {"compiling"})


def test_the_page_of_parts_that_failed(setting):
    """Rows without values do not prevent figures of others."""
    for part, rows in (("speed", [{"model": "8b", "weights": "F16", "what": "decode", "batch": 1, "failed": "x"}]),
                       ("matrices", [{"weights": "q4", "matrix": "toy", "failed": "x"}])):
        setting.part, setting.rows = part, rows
        setting.write("")
    write(setting.out)
    assert "## matrices" in (setting.out / "README.md").read_text()
    assert json.loads(setting.path.read_text())["rows"] == rows


@pytest.mark.slow
def test_every_part_is_there():
    from importlib import import_module

    for place in PARTS.values():
        module, _, function = place.partition(".")
        assert callable(getattr(import_module(f"experiments.gpu_suite.{module}"), function))


# Output like that of `ncu`: its messages, the program's output, column names, units, kernels.
PROFILER = """#!{python}
import json, os, sys
asked = sys.argv[1:]
metrics = asked[asked.index("--metrics") + 1].split(",")
module, case = asked[asked.index("-m") + 1], asked[asked.index("--case") + 1]
assert module == "experiments.gpu_suite.counters" and asked[asked.index("--page") + 1] == "raw" and "--csv" in asked
if case.startswith("q3h"):
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access GPU performance counters")
    sys.exit(1)
with open(asked[asked.index("--names") + 1], "w") as names:
    json.dump(["gemv_q4_int8_1", "_ZN5mine", "NVIDIA H100 80GB HBM3"], names)
print("==PROF== Connected to process 7")
print("the program's own line")
quoted = lambda cells: print(",".join(f'"{{cell}}"' for cell in cells))
quoted(["ID", "Process ID", "Kernel Name", *metrics])
quoted(["", "", "", *("unit" for _ in metrics)])
quoted(["0", "7", "_ZN5other", *("9" for _ in metrics)])
quoted(["1", "7", "_ZN5mine", *("8" for _ in metrics)])
quoted(["2", "7", "_ZN5mine(unsigned int*)", *(f"{{1 + at}},000" for at in range(len(metrics)))])
print("==PROF== Disconnected")
"""


@pytest.fixture
def profiler(tmp_path, monkeypatch):
    """A fake `ncu` program that prints fixed counters."""
    path = tmp_path / "bin" / "ncu"
    path.parent.mkdir()
    path.write_text(PROFILER.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))


def test_counters_of_the_profiler_beside_the_model(profiler, tmp_path, monkeypatch):
    names = ("instructions", "sectors of a read", "sectors of a write", "conflicts", "us", "MB")
    asked = []
    monkeypatch.setattr(counters, "expected", lambda *about: asked.append(about) or dict.fromkeys(names, 5.0))
    setting = Setting(False, True, tmp_path, "counters")
    setting.run(counters.counters)
    facts = kept(setting.path)
    assert facts["error"] == "" and [row.get("case") for row in facts["rows"]] == list(counters.CASES)
    first, refused, *_ = facts["rows"]
    assert "ERR_NVGPUCTRPERM" in refused["failed"]
    assert list(first)[3:] == [each for name in names for each in (name, f"{name} (model)")]
    assert [first[name] for name in names] == [1000, 3000 / 2000, 5000 / 4000, 13000, 8.0, 0.009]  # of the last launch
    assert (first["kernel"], first["on"], first["us (model)"]) == ("gemv_q4_int8_1", "NVIDIA H100 80GB HBM3", 5.0)
    assert asked[0] == ("q4, 1 token", "NVIDIA H100 80GB HBM3", True)
    write(setting.out)
    assert "us (model)" in (setting.out / "README.md").read_text()


def test_no_profiler(tmp_path, monkeypatch):
    """One line reports the missing profiler; another one a missing prediction."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for simulator, why in ((False, "ncu is not on the PATH"), (True, "the simulator has no counters")):
        setting = Setting(simulator, True, tmp_path, "counters")
        setting.run(counters.counters)
        (row,) = kept(setting.path)["rows"]
        assert why in row["what"] and setting.is_done()
    assert counters.beside({"us": 1.0}, {"failed": "no prediction"}) == {"us": 1.0, "model": "no prediction"}


def test_cases_launch_the_kernels_that_are_counted():
    for case, prefix in counters.CASES.items():
        notebook = Notebook()
        counters.run(case, notebook, True)
        assert any(work.kernel.name.startswith(prefix) for work in notebook.launches)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda, or not the wheels it compiles with")
def test_the_model_s_counters():
    """A product of 16 blocks of 8 rows: bytes of the matrix, and reads of 16 bytes a lane."""
    found = counters.expected("q4, 1 token", "NVIDIA H200", True)
    assert 128 * 512 * 4.5 / 8 < 1e6 * found["MB"] < 128 * 512 * 6 / 8
    assert found["conflicts"] == 0 and 1 < found["sectors of a read"] <= 16
