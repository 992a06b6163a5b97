"""Ctrl-C right after the start: before a command's own modules are imported, no slow import runs."""

import os
import signal
import subprocess
import sys

import pytest

import numflow
from tests.conftest import REPO

# Interrupts the process when the named module is imported, as Ctrl-C would.
INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
            import time
            time.sleep(5)
sys.meta_path.insert(0, Finder())
sys.argv = ["numflow", "--version"]
from numflow.cli import main
main()
"""


def test_little_is_imported_before_interrupts_are_answered():
    code = ("import sys; before = set(sys.modules); import numflow.cli; "
            "print(*sorted(set(sys.modules) - before))")
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    slow = {"re", "typing", "enum", "collections", "functools", "difflib", "dataclasses", "pathlib", "signal", "typer"}
    assert "numflow.cli" in done.stdout.split() and not slow & set(done.stdout.split())


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("name", ["numflow.cli.app", "typer", "numflow.cli.failures"])
def test_an_interrupt_while_importing_is_one_line(name):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED.format(name=name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "interrupted\n")


def test_what_is_imported_late_is_there():
    assert all(getattr(numflow, name) is not None for name in numflow.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        numflow.nothing  # noqa: B018
