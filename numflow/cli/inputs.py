"""Texts that a command reads: from files, and from standard input."""

import sys
from pathlib import Path

from numflow.errors import RequestError


def read_text(file: Path | str) -> str:
    """A UTF-8 text file, or standard input for "-".

    Raises:
        RequestError: it cannot be read, or is not UTF-8.
    """
    name = "standard input" if str(file) == "-" else str(file)
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else Path(file).read_bytes()
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def read_lines(texts: list[str], file: Path | None) -> list[str]:
    """The texts given as arguments, else the lines of a file or of standard input that are not empty.

    Raises:
        RequestError: both or nothing is given, or the file cannot be read.
    """
    if texts and file is not None:
        raise RequestError("give texts as arguments or with --file, not both")
    if not texts and file is None and sys.stdin.isatty():
        raise RequestError("no text: give it as an argument, with -f FILE, or on standard input")
    found = texts or [line for line in read_text(file or "-").splitlines() if line.strip()]
    if not found:
        raise RequestError("no text: the input is empty")
    return found
