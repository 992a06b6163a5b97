"""The command line. Commands parse, call the library and print; nothing else is decided here."""

import io
import os
import sys


def main() -> None:
    """Run `numflow` with the arguments of this process and end it with its exit code."""
    # NumPy's threads wait turning for 2^26 cycles after each product, on cores that ours need: no longer than 2^4.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        import warnings

        from numflow.cli.app import app
        from numflow.cli.failures import Output, whole

        if sys.stdout is None:  # closed by whoever started this: nobody reads it
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout = Output.instead_of(sys.stdout)
        warnings.showwarning = _in_one_line
        sys.exit(whole(lambda: app(prog_name="numflow")))
    except KeyboardInterrupt:  # while still importing
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _in_one_line(message, *_, **__) -> None:
    """A warning as people read it: nobody who runs a command asks for the line of code that warns."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
