"""Compilation of many kernels by several processes. Within one process Numba compiles one function at a time.

A process gets kernels from this one, line by line, and keeps their machine code on disk, from where this process loads
it. $NUMFLOW_COMPILERS is the maximum number of processes; 1: this process compiles all kernels by itself.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from numflow import kernel_cache
from numflow.cpu.runtime import code_files
from numflow.cpu.runtime.kernel import Kernel, compile_seconds, on_compile

MOST_PROCESSES = 4  # each takes 250 MB
_FEWEST = 4         # missing kernels, below which the start of a process takes longer than it saves
_LONGEST = ("numflow.cpu.attention.", "numflow.cpu.sample.")  # modules whose kernels compile for seconds; they go first
_one = threading.Lock()  # devices are threads, with the same kernels


def compile_missing(kernels: Iterable[Kernel], processes: int,
                    done: Callable[[Kernel], None] = lambda kernel: None) -> None:
    """Compile the kernels that are not on disk, in at most `processes` processes with this one.

    A kernel that another process does not compile is left to `Kernel.prepare`. done: called with each compiled kernel.
    """
    with _one:
        missing = [kernel for kernel in dict.fromkeys(kernels)
                   if not kernel.ready and code_files.kept(kernel.module) and kernel_cache.is_shared(kernel.module)
                   and not code_files.exists(kernel.module, kernel.file)]
        others = min(processes, _most(), len(missing) // 2) - 1
        if len(missing) >= _FEWEST and others > 0:
            missing.sort(key=lambda kernel: not kernel.module.startswith(_LONGEST))
            _compile(deque(missing), others, done)


def _most() -> int:
    given = os.environ.get("NUMFLOW_COMPILERS", "")
    return int(given) if given.isdecimal() else MOST_PROCESSES


def _compile(missing: deque[Kernel], others: int, done: Callable[[Kernel], None]) -> None:
    begin, before = time.perf_counter(), compile_seconds["compiled"]
    made: deque[tuple[Kernel, float]] = deque()  # kernels of other processes, and their seconds
    compilers = [compiler for compiler in (_start() for _ in range(others)) if compiler is not None]
    feeders = [threading.Thread(target=_feed, args=(compiler, missing, made), daemon=True) for compiler in compilers]
    try:
        for feeder in feeders:
            feeder.start()
        while missing or any(feeder.is_alive() for feeder in feeders):
            try:
                kernel = missing.popleft()
                kernel.prepare()
                done(kernel)
            except IndexError:  # the last ones are with other processes
                time.sleep(0.02)
            while made:
                kernel, seconds = made.popleft()
                for listener in on_compile:
                    listener(kernel.name, seconds, False)
                done(kernel)
    finally:
        for compiler, feeder in zip(compilers, feeders, strict=True):
            compiler.kill()
            if feeder.ident is not None:
                feeder.join()  # at the end of the process's output
            compiler.communicate()
        compile_seconds["compiled"] = before + time.perf_counter() - begin


def _start() -> subprocess.Popen | None:
    """A process that runs `serve` with the modules of this one; None if it cannot be started."""
    if "python" not in Path(sys.executable or "").name.lower():
        return None  # an application with Python inside: it would start once more
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    try:
        return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, text=True, encoding="utf-8")
    except OSError:
        return None


def _feed(compiler: subprocess.Popen, missing: deque[Kernel], made: deque[tuple[Kernel, float]]) -> None:
    """Have a process compile kernels, one after the other, until none is missing or the process ends."""
    assert compiler.stdin is not None and compiler.stdout is not None
    while missing:
        try:
            kernel = missing.popleft()
            compiler.stdin.write(json.dumps(kernel.origin) + "\n")
            compiler.stdin.flush()
            made.append((kernel, float(compiler.stdout.readline())))
        except (IndexError, OSError, ValueError):  # nothing is missing any more; the process has ended or was killed
            return


def serve() -> None:
    """Compile the kernels that lines of standard input name (`Kernel.origin`); write the seconds of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        begin = time.perf_counter()
        Kernel.of(json.loads(line)).prepare()
        print(time.perf_counter() - begin, file=answers, flush=True)
