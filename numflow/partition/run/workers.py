"""Workers that run the devices of a plan, as threads or as processes.

A worker executes commands in order and puts (device, result or exception) into a queue that all workers share.
"""

import contextlib
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from numflow.errors import DeviceError, NumflowError, no_memory
from numflow.ops import Batch

Answers = queue.SimpleQueue  # (device index, "ok" | "error" | "gone", value, exception or description)
_JOIN_S = 5.0
STOPPED_S = 10.0  # a process that is stopped (SIGSTOP, debugger) for longer counts as lost
_STARTING = threading.Lock()


class Resident:
    """A program in its worker, with the further command `run_all`."""

    def __init__(self, program: Any):
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run_all(self, batches: Sequence[Batch], entry: str, output: str | None, wanted: bool,
                choices: Sequence[Sequence[Any]] | None = None) -> list | None:
        """Run batches in order. Results, if wanted: outputs, or with `choices` sampled tokens."""
        if choices is None or not wanted:
            results = [self._program.run(batch, entry, output, wanted) for batch in batches]
            return results if wanted else None
        return [self._sample(batch, entry, output, some) for batch, some in zip(batches, choices, strict=True)]

    def _sample(self, batch: Batch, entry: str, output: str | None, choices: Sequence[Any]) -> np.ndarray:
        if choices:
            return self._program.sample(batch, choices, entry)
        self._program.run(batch, entry, output)
        return np.zeros(0, np.int32)


class ThreadWorker:
    """Runs a device in a thread of this process.

    make: factory of the program, called in the thread. program: the program, once made.
    lost: reason why the worker will never answer; always "" for a thread.
    """

    lost = ""

    def __init__(self, index: int, make: Callable[[], Any], answers: Answers):
        self.index, self.answers = index, answers
        self.program: Any = None
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True, name=f"numflow-device-{index}")
        self._thread.start()

    def command(self, name: str, args: tuple) -> None:
        """Call a method of the program, or read an attribute, asynchronously."""
        self._commands.put((name, args))

    def close(self) -> None:
        """Close the program and end the thread after its current command."""
        self._commands.put(None)
        self._thread.join(_JOIN_S)

    def _work(self, make: Callable[[], Any]) -> None:
        try:
            self.program = make()
            self.answers.put((self.index, "ok", None))
        except Exception as error:
            self.answers.put((self.index, "error", error))
        while (command := self._commands.get()) is not None:
            self.answers.put((self.index, *answer(self.program, *command)))
        if self.program is not None:
            self.program.close()


class ProcessWorker:
    """Runs a device in a separate, spawned process.

    make: as in ThreadWorker, picklable. Its `world` is closed when the process ends.
    """

    def __init__(self, index: int, make: Callable[[], Any], answers: Answers):
        self.index, self.answers = index, answers
        self._stopped: float | None = None  # begin of the current stop
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_process_work, args=(make, theirs), daemon=True,
                                       name=f"numflow-device-{index}")
        with _no_main():
            self.process.start()
        theirs.close()
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"numflow-answers-{index}")
        self._reader.start()

    @property
    def lost(self) -> str:
        """Reason why the process will never answer: it ended, or is stopped for STOPPED_S; else ""."""
        if not self.process.is_alive():
            return ended(self.process.exitcode)
        if not _is_stopped(self.process.pid):
            self._stopped = None
            return ""
        now = time.monotonic()
        self._stopped = now if self._stopped is None else self._stopped
        return f"has been stopped for {STOPPED_S:g} s" if now - self._stopped >= STOPPED_S else ""

    def command(self, name: str, args: tuple) -> None:
        with contextlib.suppress(OSError):  # it has died: the reader reports it
            self._pipe.send((name, args))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self.process.join(0 if _is_stopped(self.process.pid) else _JOIN_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_JOIN_S)

    def _read(self) -> None:
        try:
            while True:
                self.answers.put((self.index, *self._pipe.recv()))
        except (EOFError, OSError):
            self.process.join(_JOIN_S)
            self.answers.put((self.index, "gone", ended(self.process.exitcode)))


def ended(code: int | None) -> str:
    """Description of a process end with this exit code."""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal; False on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Context in which a spawned process does not import the caller's main script, so that scripts need no
    `if __name__ == "__main__"` guard."""
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _process_work(make: Any, pipe) -> None:
    """Main function of a device's process. Ctrl-C is ignored: the parent handles it and closes the pipe. If the
    parent dies during a run, the run is aborted."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_abort_with_parent, args=(make.world,), daemon=True).start()
    program = None
    try:
        program = make()
        pipe.send(("ok", None))
    except Exception as error:
        pipe.send(("error", portable(error)))
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while (command := pipe.recv()) is not None:
            how, value = answer(program, *command)
            pipe.send((how, portable(value) if how == "error" else value))
    if program is not None:
        program.close()
    make.world.close()


def _abort_with_parent(world: Any) -> None:
    """Abort the run when the parent dies."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        world.abort()


def answer(program: Any, name: str, args: tuple) -> tuple[str, Any]:
    """Execute a command: ("ok", result) or ("error", exception)."""
    try:
        found = getattr(program, name)
        return "ok", found(*args) if callable(found) else found
    except Exception as error:
        return "error", error


def portable(error: Exception) -> Exception:
    """A picklable form of an error: numflow errors with one argument unchanged, others as text."""
    if isinstance(error, NumflowError) and len(error.args) == 1:
        return error
    if no_memory(error):
        return MemoryError(str(error))
    return DeviceError(f"{type(error).__name__}: {error}")
