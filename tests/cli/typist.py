"""A program in a pseudo-terminal: keys are typed into it, and its screen is read."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pyte

from tests.conftest import REPO
from tests.waiting import until

LINES, COLUMNS = 24, 80


class Typist:
    """Runs Python code, or a command, at a pseudo-terminal. screen: rows of text as a person sees them."""

    def __init__(self, *command: str, **environment: str):
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.shown, self.times = b"", list[tuple[float, bytes]]()
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(REPO)
            # A terminal that does not report its cursor position.
            os.environ |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "LINES": str(LINES), "COLUMNS": str(COLUMNS),
                           "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]), **environment}
            os.execv(sys.executable, [sys.executable, *command])

    @property
    def screen(self) -> list[str]:
        """Rows of the screen that are not blank."""
        return [row.rstrip() for row in self._screen.display if row.strip()]

    @property
    def cells(self) -> list[list]:
        """The characters of each row, with their colours."""
        return [[row[at] for at in range(COLUMNS)] for row in (self._screen.buffer[line] for line in range(LINES))]

    def read(self, seconds: float) -> bool:
        """Read the output that arrives within this time; whether there was any."""
        if not select.select([self.terminal], [], [], seconds)[0]:
            return False
        try:
            new = os.read(self.terminal, 65536)
        except OSError:  # the program has ended
            return False
        self.times.append((time.monotonic(), new))
        self.shown += new
        self._stream.feed(new)
        return bool(new)

    def wait_for(self, text: bytes) -> None:
        """Read until the text is shown; forget the output up to it."""
        while text not in self.shown:
            if not self.read(60):
                raise AssertionError(f"{text!r} is not shown: {self.shown!r}")
        self.shown = self.shown.partition(text)[2]

    def wait_until(self, seen) -> None:
        """Read until the screen meets the condition."""
        while not seen(self.screen):
            if not self.read(60):
                raise AssertionError("the screen is not as it should be:\n" + "\n".join(self.screen))

    def wait_until_it_waits(self) -> None:
        """Wait until the program sleeps, as a program that waits for keys does."""
        state = Path(f"/proc/{self.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", "the program waits for keys")

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self.terminal, keys)

    def close(self) -> None:
        """End the program."""
        os.close(self.terminal)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
