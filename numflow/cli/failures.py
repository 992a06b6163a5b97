"""How a command fails: one line on standard error and an exit code, a traceback only with NUMFLOW_DEBUG=1."""

import functools
import os
import sys
from collections.abc import Callable

import typer

from numflow.errors import NumflowError

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


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
            _fail(f"error: {_one_line(error)}")
        except BrokenPipeError:  # the reader has gone, as `head` does; there is nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)
        except MemoryError:
            _fail("error: out of memory; a smaller model, a shorter prompt or fewer new tokens need less")
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None and error.strerror:
                _fail(f"error: {error.filename}: {error.strerror}")
            _fail(f"error: unexpected {type(error).__name__}: {_one_line(error)} (a bug in numflow: please report it "
                  f"with the traceback that NUMFLOW_DEBUG=1 shows)")
    return run


def _fail(line: str, code: int = FAILED) -> None:
    """Print the line and leave; to be called while an exception is handled."""
    if os.environ.get("NUMFLOW_DEBUG", "") not in ("", "0"):
        raise
    print(line, file=sys.stderr, flush=True)
    raise typer.Exit(code) from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
