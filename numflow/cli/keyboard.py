"""Reader of a conversation's questions, typed or piped: lines, pasted blocks, and texts between triple quotes."""

import sys
from collections.abc import Callable
from contextlib import suppress

from numflow.errors import RequestError

QUOTES = '"""'


class Keyboard:
    """Reader of questions. interactive: a person types them, with line editing, history and multi-line pastes.

    edit: shows a prompt and reads a text; None: input(), with readline if Python has it.
    """

    def __init__(self, interactive: bool, edit: Callable[[str], str] | None = None):
        self.interactive, self._edit = interactive, edit or input
        if interactive and edit is None:
            with suppress(ImportError):  # a system without readline has plain input()
                import readline

                # A paste of several lines is one text, until Enter is pressed. Python turns this mode off.
                readline.parse_and_bind("set enable-bracketed-paste on")

    def question(self) -> str | None:
        """Read the next question, without surrounding white space; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice, or once with piped input.
            RequestError: the input is not UTF-8, or triple quotes are not closed in a pipe.
        """
        interrupted = False
        while True:
            try:
                return self._text()
            except KeyboardInterrupt:
                if interrupted or not self.interactive:
                    raise
                interrupted = True
                print("\n(Ctrl-C again or Ctrl-D exits)", file=sys.stderr)

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
        """Read the next line, or pasted lines; None at the end of the input."""
        try:
            line = self._edit(prompt if self.interactive else "")
            line.encode()  # raises for lone surrogates, which stand for bytes that are not UTF-8
        except EOFError:
            if self.interactive:
                print(file=sys.stderr)
            return None
        except UnicodeError:
            raise RequestError("standard input: not UTF-8 text") from None
        return line.strip() if strip else line
