"""Loading a model for a command, and telling about kernels that are being compiled."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numflow.errors import RequestError

if TYPE_CHECKING:
    from numflow.cli.groups import Execution


class CompileNotice:
    """Says on standard error that kernels are compiled, from the first one on; nothing if all are in the cache.

    compiled: number of kernels; seconds: the time they took.
    """

    def __init__(self):
        self.compiled, self.seconds, self._open_line = 0, 0.0, False

    def __call__(self, name: str, seconds: float, loaded: bool) -> None:
        """A kernel is ready (the listener of numflow.cpu.kernel)."""
        if loaded:
            return
        self.compiled += 1
        self.seconds += seconds
        line = "compiling kernels for this machine (kept for the next start)"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}: {self.compiled}, {name}", end="", file=sys.stderr, flush=True)
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
    from numflow.cpu.kernel import on_compile

    on_compile.append(notice)
    try:
        yield notice
    finally:
        on_compile.remove(notice)
        notice.clear()


@contextmanager
def loaded(model: str | None, how: "Execution", purpose: str = "generate",
           **more: Any) -> Iterator[tuple[Any, CompileNotice]]:
    """(Model, notice) for a block, closed after it; the default model of this purpose if none is named.

    more: further arguments of numflow.load.
    """
    import numflow
    from numflow import registry

    with (compile_notice(how.compiles) as notice,
          numflow.load(model or registry.default_model(purpose), **how.arguments(), **more) as ready):
        yield ready, notice


def read_text(file: Path | str) -> str:
    """A UTF-8 text file, or standard input for "-".

    Raises:
        RequestError: it cannot be read, or is not UTF-8.
    """
    name = "standard input" if str(file) == "-" else str(file)
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def read_lines(texts: list[str], file: Path | None) -> list[str]:
    """The texts given as arguments, else the lines of a file or of standard input that are not empty.

    Raises:
        RequestError: both or nothing is given, or the file cannot be read.
    """
    if texts and file is not None:
        raise RequestError("give texts as arguments or with --file, not both")
    if not texts and file is None and sys.stdin.isatty():
        raise RequestError("no text: give it as an argument, with -f FILE, or on standard input")
    found = texts or [line for line in read_text(file or "-").splitlines() if line.strip()]
    if not found:
        raise RequestError("no text: the input is empty")
    return found


def print_json(value: Mapping[str, Any] | list) -> None:
    """One JSON value on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))
