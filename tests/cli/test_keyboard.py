"""Pasting and interrupts at a real terminal, with Python's own line editing."""

from pathlib import Path

import pytest

pytest.importorskip("pty")
readline = pytest.importorskip("readline")
if getattr(readline, "_READLINE_LIBRARY_VERSION", "") < "8.1" or "libedit" in (readline.__doc__ or ""):
    pytest.skip("this readline has no bracketed paste", allow_module_level=True)

from tests.cli.typist import Typist  # noqa: E402

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


@pytest.fixture
def typist():
    typist = Typist("-c", READ)
    typist.wait_for(b"> ")
    yield typist
    typist.close()


def test_a_paste_of_several_lines_is_one_text(typist):
    typist.type(b"\x1b[200~one\n/two\nthree\x1b[201~\r")
    typist.wait_for(rb"GOT 'one\n/two\nthree'")


def test_triple_quotes_and_the_end(typist):
    typist.type(b'"""one\rtwo"""\r')
    typist.wait_for(rb"GOT 'one\ntwo'")
    typist.wait_for(b"> ")
    typist.type(b"\x04")
    typist.wait_for(b"END")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it cannot be seen whether a program waits")
def test_ctrl_c_clears_the_line_and_twice_leaves(typist):
    """Python's readline loses an interrupt that arrives while it echoes a key: send it once readline waits for keys."""
    def interrupt(typed):
        typist.type(typed)
        typist.wait_for(typed)
        typist.wait_until_it_waits()
        typist.type(b"\x03")

    interrupt(b"forgotten")
    typist.wait_for(b"exits)")
    typist.wait_for(b"> ")
    typist.type(b"kept\r")
    typist.wait_for(b"GOT 'kept'")
    for word in (b"exits)", b"LEFT"):
        typist.wait_for(b"> ")
        interrupt(b"x")
        typist.wait_for(word)
