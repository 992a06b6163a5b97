"""Loading a model for a command, and telling about kernels that are being compiled."""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numflow.cli.groups import Execution


# Characters that command a terminal, and that JSON may hold as they are; they stand in its strings alone.
_UNSAFE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class CompileNotice:
    """Says on standard error that kernels are compiled, from the first one on; nothing if all are in the cache.

    compiled: number of kernels; seconds: the time they took.
    """

    def __init__(self):
        self.compiled, self.seconds, self._open_line = 0, 0.0, False

    def __call__(self, name: str, seconds: float, loaded: bool) -> None:
        """A kernel is ready (the listener of numflow.cpu.runtime.kernel)."""
        if loaded:
            return
        self.compiled += 1
        self.seconds += seconds
        line = "compiling kernels for this machine (kept for the next start)"
        if sys.stderr.isatty():
            row = f"{line}: {self.compiled}, {name}"[:shutil.get_terminal_size().columns - 1]  # more cannot be cleared
            print(f"\r\x1b[K{row}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        elif self.compiled == 1:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away: something else is to be printed."""
        if self._open_line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._open_line = False


@contextmanager
def compile_notice(listens: bool) -> Iterator[CompileNotice]:
    """A notice that listens while the block runs, where kernels may have to be compiled."""
    notice = CompileNotice()
    if not listens:
        yield notice
        return
    from numflow.cpu.runtime.kernel import on_compile

    on_compile.append(notice)
    try:
        yield notice
    finally:
        on_compile.remove(notice)
        notice.clear()


@contextmanager
def loaded(model: str | None, how: "Execution", **more: Any) -> Iterator[tuple[Any, CompileNotice]]:
    """(Model, notice) for a block, closed after it; the default model if none is named.

    more: further arguments of numflow.load.
    """
    import numflow

    name = asked_name(model, how.offline)
    with compile_notice(how.compiles) as notice, numflow.load(name, **how.arguments(), **more) as ready:
        yield ready, notice


def asked_name(model: str | None, offline: bool = False, purpose: str = "generate") -> str:
    """A model's name as it was asked for; else that of the default model, which is fetched if need be.

    Without a network it is the model that comes with numflow, and standard error says so.
    """
    from numflow import registry

    if model:
        return model
    name, why = registry.reachable(purpose, offline)
    if why:
        entry = registry.known()[name]
        print(f"{why}\nusing {name} ({entry.about}), which comes with numflow", file=sys.stderr, flush=True)
    return name


def print_json(value: Mapping[str, Any] | list) -> None:
    """One JSON value on standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print(_UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
