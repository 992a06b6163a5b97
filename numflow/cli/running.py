"""Loading of a command's model, and progress of kernel compilation."""

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numflow.cli.groups import Execution


# Characters that control a terminal and that JSON does not escape. In JSON text they occur only in strings.
_UNSAFE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class CompileNotice:
    """A progress line on standard error while kernels are compiled; nothing if all kernels are in the cache.

    compiled: number of compiled kernels. seconds: their compilation time.
    """

    def __init__(self):
        self.compiled, self.seconds, self._open_line = 0, 0.0, False

    def __call__(self, name: str, seconds: float, loaded: bool) -> None:
        """Count a kernel that is ready (listener of numflow.cpu.runtime.kernel). loaded: from the cache."""
        if loaded:
            return
        self.compiled += 1
        self.seconds += seconds
        line = "compiling kernels for this machine (kept for the next start)"
        if sys.stderr.isatty():
            row = f"{line}: {self.compiled}, {name}"[:shutil.get_terminal_size().columns - 1]  # one row can be cleared
            print(f"\r\x1b[K{row}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        elif self.compiled == 1:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the progress line, before other output."""
        if self._open_line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._open_line = False


@contextmanager
def compile_notice(listens: bool) -> Iterator[CompileNotice]:
    """A CompileNotice for a block. listens: whether kernels may have to be compiled in the block."""
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
    """(Model, CompileNotice) for a block, closed after the block. None is the default model.

    more: further arguments of numflow.load.
    """
    import numflow

    name = asked_name(model, how.offline)
    with compile_notice(how.compiles) as notice, numflow.load(name, **how.arguments(), **more) as ready:
        yield ready, notice


def asked_name(model: str | None, offline: bool = False, purpose: str = "generate") -> str:
    """The given name, or the name of the default model for a purpose.

    If the default model cannot be downloaded, the name is that of the model that comes with numflow; a line on standard
    error reports this.
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
    """Print one JSON value on standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print(_UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
