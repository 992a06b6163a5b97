"""The command line. Commands parse, call the library and print; nothing else is decided here."""

import sys


def main() -> None:
    """Run `numflow` with the arguments of this process and end it with its exit code."""
    try:
        from numflow.cli.app import app

        app(prog_name="numflow")
    except KeyboardInterrupt:  # while still importing
        print("interrupted", file=sys.stderr)
        sys.exit(130)
