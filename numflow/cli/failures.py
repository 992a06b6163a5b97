"""Failures of a command: one line on standard error and an exit code, a traceback only with NUMFLOW_DEBUG=1."""

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
    """`command` with its exceptions turned into one line each and an exit code."""
    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except NumflowError as error:
            _fail(f"error: {_one_line(error.spelled(_speller(command)))}")
        except BrokenPipeError:  # the reader has gone, as `head` does; there is nobody to tell
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
    """Print the line and leave; to be called while an exception is handled."""
    if os.environ.get("NUMFLOW_DEBUG", "") not in ("", "0"):
        raise
    print(line, file=sys.stderr, flush=True)
    raise typer.Exit(code) from None


def _one_line(error: object) -> str:
    return printable(" ".join(str(error).split()))


def _speller(command: Callable[..., None]) -> Callable[[str, str], str]:
    """Spell options as `command` takes them: by a flag, or by --set."""
    names = inspect.signature(command).parameters

    def spell(name: str, value: str) -> str:
        if name in names or "set_" not in names or name in OPTIONS:
            return in_shell(name, value)
        return f"--set {name}={value}" if value else f"--set {name}"

    return spell


class Output(io.TextIOWrapper):
    """Standard output whose errors say that it is standard output which cannot be written."""

    @classmethod
    def instead_of(cls, stream: io.TextIOWrapper) -> "Output":
        """The same stream, which is not used any more under its own name."""
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
    """Send what is and will be written to standard output nowhere, so that ending does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def whole(run: Callable[[], None]) -> int:
    """The exit code of `run` when all that it left for standard output, as --help does, has been written."""
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
