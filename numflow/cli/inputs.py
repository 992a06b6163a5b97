"""Input texts of a command: arguments, files and standard input. All given input is used, none is dropped."""

import errno
import os
import stat
import sys
import time
from pathlib import Path

from numflow.errors import RequestError

STDIN = "-"
PATIENCE = 5.0  # seconds to wait for data on a pipe, which may be inherited from a service and never be written to


def read_text(file: Path | str) -> str:
    """Content of a UTF-8 text file, or of standard input for "-".

    Raises:
        RequestError: the file cannot be read, or is not UTF-8.
    """
    name = "standard input" if str(file) == STDIN else str(file)
    try:
        return _decoded(_standard_input() if str(file) == STDIN else Path(file).read_bytes(), name)
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 text (byte {error.start})") from None


def read_prompt(prompt: str | None, file: Path | None, command: str) -> str:
    """The prompt of a command: the argument, the text of a file or of standard input, or the argument above the text.

    Raises:
        RequestError: there is no prompt, or the file cannot be read.
    """
    if prompt == STDIN:
        prompt, file = None, file or Path(STDIN)
    if prompt is None and file is None:
        if at_terminal():
            raise RequestError(f'no prompt: {command} "..." (or -f FILE, or text on standard input)')
        file = Path(STDIN)
    text = (read_text(file) if file is not None else piped_text()).removesuffix("\n")
    if prompt is None:
        return text
    return f"{prompt}\n\n{text}" if text.strip() else prompt


def read_lines(texts: list[str], file: Path | None) -> list[str]:
    """The arguments, followed by the non-empty lines of a file or else of standard input.

    Raises:
        RequestError: there is no text, or the file cannot be read.
    """
    if not texts and file is None:
        if at_terminal():
            raise RequestError("no text: give it as an argument, with -f FILE, or on standard input")
        file = Path(STDIN)
    more = piped_text() if file is None else read_text(file)
    found = [*texts, *(line for line in more.splitlines() if line.strip())]
    if not found:
        raise RequestError("no text: the input is empty")
    return found


def at_terminal() -> bool:
    """Whether standard input is a terminal or closed, so that no text is piped in."""
    return sys.stdin is None or sys.stdin.isatty()


def piped_text() -> str:
    """Text of a file or pipe at standard input; "" without either, or if no data comes in PATIENCE seconds.

    A service or a scheduler may leave a pipe open for ever, so the wait is bounded. For `-` it is not bounded.

    Raises:
        RequestError: the text is not UTF-8.
    """
    if sys.stdin is None or not _has_input():
        return ""
    try:
        content = _standard_input()
    except OSError as error:
        if error.errno in (None, errno.EBADF):  # opened for writing only by some launchers, or replaced by an object
            return ""
        raise RequestError(f"standard input: {error.strerror}") from None
    return _decoded(content, "standard input")


def _has_input() -> bool:
    """Whether standard input is a file, or a pipe that has data or ends within PATIENCE seconds."""
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return not sys.stdin.closed  # an object in memory
    if stat.S_ISREG(kind):
        return True
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return False  # a terminal, /dev/null
    if _readable(descriptor, PATIENCE):
        return True
    print(f"no data on standard input in {PATIENCE:.0f} s: going on without it (-f - waits for it)",
          file=sys.stderr, flush=True)
    return False


def _readable(descriptor: int, seconds: float | None) -> bool:
    """Whether a read would not block. Wait for that for up to `seconds`; None: without limit."""
    if sys.platform == "win32":  # where select takes sockets only
        import ctypes
        import msvcrt

        handle, ready, end = msvcrt.get_osfhandle(descriptor), ctypes.c_ulong(), time.monotonic() + (seconds or 0)
        peek = ctypes.windll.kernel32.PeekNamedPipe
        while peek(handle, None, 0, None, ctypes.byref(ready), None) and not ready.value:
            if seconds is not None and time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True
    import select

    return bool(select.select([descriptor], [], [], seconds)[0])


def _standard_input() -> bytes:
    """All bytes up to the end of standard input."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, "is closed")
    parts = []
    while True:
        part = sys.stdin.buffer.read()
        if part is None:  # a non-blocking pipe that has no data yet
            _readable(sys.stdin.fileno(), None)
        elif part:
            parts.append(part)
        else:
            return b"".join(parts)
