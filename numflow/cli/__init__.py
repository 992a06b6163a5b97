"""The command line. A command parses its options, calls the library and prints the result; it decides nothing else."""

import io
import os
import sys


def main() -> None:
    """Run `numflow` with the arguments of this process and end it with its exit code."""
    # OpenBLAS's threads spin for 2^26 cycles after each matrix product, on cores that our threads need: now 2^4 cycles.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        import warnings

        from numflow.cli.app import app
        from numflow.cli.failures import Output, whole

        if sys.stdout is None:  # the parent process has closed it
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = Output.instead_of(sys.stdout)
        warnings.showwarning = _in_one_line
        sys.exit(whole(lambda: app(prog_name="numflow")))
    except KeyboardInterrupt:  # while still importing
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _in_one_line(message, *_, **__) -> None:
    """Print a warning in one line, without the line of code that raised it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
