"""Pasting and interrupts at a real terminal."""

import os
import select
import signal
import sys

import pytest

from tests.conftest import REPO

pty = pytest.importorskip("pty")
readline = pytest.importorskip("readline")
if getattr(readline, "_READLINE_LIBRARY_VERSION", "") < "8.1" or "libedit" in (readline.__doc__ or ""):
    pytest.skip("this readline knows no bracketed paste", allow_module_level=True)

READ = """
from numflow.cli.keyboard import Keyboard
keyboard = Keyboard(True)
print("ready")
try:
    while (text := keyboard.question()) is not None:
        print("GOT", ascii(text))
    print("END")
except KeyboardInterrupt:
    print("LEFT")
"""


class Typist:
    """A program at a terminal of its own: what it shows, and who types at it."""

    def __init__(self):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(REPO)
            os.environ |= {"TERM": "xterm", "PYTHONPATH": str(REPO)}
            os.execv(sys.executable, [sys.executable, "-c", READ])
        self.shown = b""

    def wait_for(self, text: bytes) -> None:
        """Read until the text is shown; what comes up to it is forgotten."""
        while text not in self.shown:
            if not select.select([self.terminal], [], [], 60)[0]:
                raise AssertionError(f"{text!r} is not shown: {self.shown!r}")
            self.shown += os.read(self.terminal, 65536)
        self.shown = self.shown.partition(text)[2]

    def type(self, keys: bytes) -> None:
        os.write(self.terminal, keys)


@pytest.fixture
def typist():
    typist = Typist()
    typist.wait_for(b"> ")
    yield typist
    os.close(typist.terminal)
    os.kill(typist.pid, signal.SIGKILL)
    os.waitpid(typist.pid, 0)


def test_a_paste_of_several_lines_is_one_text(typist):
    typist.type(b"\x1b[200~one\n/two\nthree\x1b[201~\r")
    typist.wait_for(rb"GOT 'one\n/two\nthree'")


def test_triple_quotes_and_the_end(typist):
    typist.type(b'"""one\rtwo"""\r')
    typist.wait_for(rb"GOT 'one\ntwo'")
    typist.wait_for(b"> ")
    typist.type(b"\x04")
    typist.wait_for(b"END")


def test_ctrl_c_clears_the_line_and_twice_leaves(typist):
    typist.type(b"forgotten\x03")
    typist.wait_for(b"leaves)")
    typist.wait_for(b"> ")
    typist.type(b"kept\r")
    typist.wait_for(b"GOT 'kept'")
    for word in (b"leaves)", b"LEFT"):
        typist.wait_for(b"> ")
        typist.type(b"\x03")
        typist.wait_for(word)
