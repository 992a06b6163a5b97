"""Devices as processes of a script: no main guard is needed, and nothing remains after a kill."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.engine.tiny import write_checkpoint
from tests.waiting import until

pytestmark = pytest.mark.slow
LOAD = """import numflow
model = numflow.load({folder!r}, devices={devices!r}, transport="processes", threads=1)
"""


def _script(folder, devices: str, rest: str) -> subprocess.Popen:
    """A running script without `if __name__ == "__main__"`."""
    path = folder / "script.py"
    path.write_text(LOAD.format(folder=str(write_checkpoint(folder)), devices=devices) + rest)
    return subprocess.Popen([sys.executable, path], cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_do_not_run_the_script_again(tmp_path):
    script = _script(tmp_path, "0;1", "print('ids', model.generate([1, 2], max_tokens=4).ids)\nmodel.close()\n")
    out, err = script.communicate(timeout=300)
    assert (script.returncode, err) == (0, "")
    assert out.count("ids") == 1


def test_nothing_is_left_when_the_script_and_a_device_are_killed(tmp_path):
    """The other device waits for the dead one in the middle of a run: it ends too."""
    script = _script(tmp_path, "0&1", "print(*(worker.process.pid for worker in model.program._workers), flush=True)\n"
                                      "while True:\n    model.generate([1, 2], max_tokens=40, ignore_eos=True)\n")
    first, second = map(int, script.stdout.readline().split())
    time.sleep(1)
    os.kill(first, signal.SIGSTOP)
    time.sleep(0.5)  # the second waits for it now
    script.kill()
    os.kill(first, signal.SIGKILL)
    script.wait()  # not its pipes: whoever is left holds them open
    try:
        until(lambda: not _runs(second), "the end of the second device")
    finally:
        with suppress(ProcessLookupError):
            os.kill(second, signal.SIGKILL)
        script.communicate()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
