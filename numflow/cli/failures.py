"""Error reporting of a command: one line on standard error and an exit code; with NUMFLOW_DEBUG=1 a traceback."""

import errno
import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from numflow.cli.tables import printable
from numflow.engine.options import OPTIONS, in_shell
from numflow.errors import NumflowError, no_memory

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
STDOUT = "standard output"
NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, with exceptions turned into one line on standard error and an exit code."""
    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except NumflowError as error:
            _fail(f"error: {_one_line(error.spelled(_speller(command)))}")
        except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
            drop_output()
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)
        except Exception as error:
            if no_memory(error):
                _fail("error: out of memory; a smaller model, a shorter prompt or fewer new tokens need less")
            if isinstance(error, OSError) and error.filename == STDOUT:
                drop_output()
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                _fail(f"error: {printable(error.filename)}: {error.strerror}")
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                _fail(f"error: {error.strerror}")
            _fail(f"error: unexpected {type(error).__name__}: {_one_line(error)} (a bug in numflow: please report it "
                  f"with the traceback that NUMFLOW_DEBUG=1 shows)")
    return run


def _fail(line: str, code: int = FAILED) -> None:
    """Print the line and exit. Call only while an exception is handled."""
    if os.environ.get("NUMFLOW_DEBUG", "") not in ("", "0"):
        raise
    print(line, file=sys.stderr, flush=True)
    raise typer.Exit(code) from None


def _one_line(error: object) -> str:
    return printable(" ".join(str(error).split()))


def _speller(command: Callable[..., None]) -> Callable[[str, str], str]:
    """A function that spells an option as `command` takes it: as a flag, or with --set."""
    names = inspect.signature(command).parameters

    def spell(name: str, value: str) -> str:
        if name in names or "set_" not in names or name in OPTIONS:
            return in_shell(name, value)
        return f"--set {name}={value}" if value else f"--set {name}"

    return spell


class Output(io.TextIOWrapper):
    """Standard output whose OSErrors have the file name "standard output"."""

    @classmethod
    def instead_of(cls, stream: io.TextIOWrapper) -> "Output":
        """An Output with the buffer and settings of `stream`, which must not be used afterwards."""
        lines, through, encoding = stream.line_buffering, stream.write_through, stream.encoding
        return cls(stream.detach(), encoding, "replace", None, lines, through)

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = STDOUT
        raise


def drop_output() -> None:
    """Redirect standard output to the null device, so that flushing at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def whole(run: Callable[[], None]) -> int:
    """Call `run`, flush standard output (--help writes without a flush), and return the exit code."""
    code = 0
    try:
        try:
            run()
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except OSError as error:
        drop_output()
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        return FAILED
    return code
