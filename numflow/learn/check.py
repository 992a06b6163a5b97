"""Checks of a student's file, in a child process with a time limit, so that no code can stop the checker."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from numflow.learn.catalogue import LabFile

SECONDS = 60.0
KEPT = 2000  # bytes of the code's output that are kept


def check(lab: LabFile, folder: Path, seconds: float = SECONDS, model: str | None = None) -> dict[str, Any]:
    """Check the student's file in a folder. The verdict has passed, message, case, place, cause, printed and more."""
    return _run("check", lab, folder, seconds, model)


def bench(lab: LabFile, folder: Path, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the functions of a file that passes its check: bars (label, value) and their unit."""
    return _run("bench", lab, folder, seconds, None)


def bench_solution(lab: LabFile, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the functions of the lab's solution."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / lab.file_name).write_text(lab.solution(), encoding="utf-8")
        return bench(lab, Path(place), seconds)


def _run(wanted: str, lab: LabFile, folder: Path, seconds: float, model: str | None) -> dict[str, Any]:
    file, begin = folder.absolute() / lab.file_name, time.monotonic()
    facts: dict[str, Any] = {"lab": lab.number, "name": lab.name, "title": lab.title, "file": str(file)}
    if not file.is_file():
        return facts | {"passed": False, "message": f"no {lab.file_name} in {folder}"}
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.json"
        job = {"wanted": wanted, "lab": str(lab.path.absolute()), "file": str(file), "result": str(result),
               "model": model}
        code, printed = _child(json.dumps(job), seconds)
        found = _read(result)
    facts |= found if found is not None else {"passed": False, "message": _end(code, seconds)}
    return facts | {"printed": printed, "seconds": round(time.monotonic() - begin, 2)}


def _child(job: str, seconds: float) -> tuple[int | None, str]:
    """Run a job in a child process: its exit code (None: the time limit was exceeded) and the start of its output."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                                "PYTHONIOENCODING": "utf-8:backslashreplace"}
    child = subprocess.Popen([sys.executable, "-P", "-m", "numflow.learn.child"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
                             start_new_session=True)
    printed: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(child.stdout, printed), daemon=True)
    reader.start()
    code: int | None
    try:
        child.stdin.write(f"{job}\n".encode())  # type: ignore[union-attr]
        child.stdin.close()  # type: ignore[union-attr]
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    except BrokenPipeError:  # the child has ended already; its exit code says more
        code = child.wait(seconds)
    finally:
        _kill(child)
    reader.join(5)
    return code, b"".join(printed)[:KEPT].decode(errors="replace")


def _drain(pipe: Any, chunks: list[bytes]) -> None:
    """Read a pipe to its end, and keep the first bytes."""
    size = 0
    with pipe:
        while piece := pipe.read1(1 << 16):
            if size < KEPT:
                chunks.append(piece)
                size += len(piece)


def _kill(child: subprocess.Popen) -> None:
    """End a process and the processes that it has started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            child.kill()
    else:
        child.kill()
    child.wait()


def _read(result: Path) -> dict[str, Any] | None:
    """The result that the child has written; None if there is no valid result."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("passed"), bool) else None


def _end(code: int | None, seconds: float) -> str:
    """The message for a child without a result."""
    if code is None:
        return f"no end after {seconds:g} seconds: an endless loop, or far too slow"
    if code < 0:
        return f"the code crashed Python: {signal.Signals(-code).name}"
    return f"the code ended Python with exit code {code}"
