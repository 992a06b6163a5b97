"""Questions of a conversation as they are typed or piped: lines, pasted blocks, and texts between triple quotes."""

import sys
from collections.abc import Callable
from contextlib import suppress

from numflow.errors import RequestError

QUOTES = '"""'


class Keyboard:
    """Reads questions. interactive: a person types them, with line editing, history and pasting of several lines.

    edit: reads a text after a prompt; None: the editing that this Python has.
    """

    def __init__(self, interactive: bool, edit: Callable[[str], str] | None = None):
        self.interactive, self._edit = interactive, edit or input
        if interactive and edit is None:
            with suppress(ImportError):  # a system without it has plain input()
                import readline

                # One paste is one text, line ends and all, until Enter is pressed. Python turns this off.
                readline.parse_and_bind("set enable-bracketed-paste on")

    def question(self) -> str | None:
        """The next question without spaces around it; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice, or once where nobody types.
            RequestError: not UTF-8, or triple quotes are not closed in a pipe.
        """
        interrupted = False
        while True:
            try:
                return self._text()
            except KeyboardInterrupt:
                if interrupted or not self.interactive:
                    raise
                interrupted = True
                print("\n(Ctrl-C again or Ctrl-D leaves)", file=sys.stderr)

    def _text(self) -> str | None:
        line = self._line("> ")
        if line is None or not line.startswith(QUOTES):
            return line
        lines: list[str] = []
        rest: str | None = line.removeprefix(QUOTES)
        while rest is not None and not rest.rstrip().endswith(QUOTES):
            lines.append(rest)
            rest = self._line("... ", strip=False)
        if rest is None:
            if self.interactive:
                return None
            raise RequestError(f"standard input ends within {QUOTES}: close the text with {QUOTES}")
        return "\n".join([*lines, rest.rstrip().removesuffix(QUOTES)]).strip()

    def _line(self, prompt: str, strip: bool = True) -> str | None:
        """The next line, or pasted lines; None at the end of the input."""
        try:
            line = self._edit(prompt if self.interactive else "")
            line.encode()  # bytes that are no UTF-8 may have come through as halves of surrogate pairs
        except EOFError:
            if self.interactive:
                print(file=sys.stderr)
            return None
        except UnicodeError:
            raise RequestError("standard input: not UTF-8 text") from None
        return line.strip() if strip else line
