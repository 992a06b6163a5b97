"""Answers as a conversation shows them: as they come, or at a terminal as Markdown with the thinking folded."""

import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment, SegmentLines
from rich.syntax import Syntax
from rich.text import Text

from numflow.cli.tables import printable
from numflow.server.messages.reply import ReplyPart

FRAME = 0.06  # seconds between two drawings of what is not finished


class PlainAnswer:
    """An answer as the model writes it, every mark of it."""

    def take(self, piece: str, parts: Iterable[ReplyPart]) -> None:
        """Print a piece of the text. parts: the same as answer and thinking."""
        print(piece, end="", flush=True)

    def end(self) -> None:
        """No more pieces come."""
        print(flush=True)


class DrawnAnswer:
    """An answer at a terminal: words wrapped, Markdown and code coloured, thinking in one line that counts it."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._drawn = MarkdownStream(self._console)
        self._thinking, self._begun = "", 0.0

    def take(self, piece: str, parts: Iterable[ReplyPart]) -> None:
        """Draw a piece, which is given as parts of the answer and of the thinking."""
        for part in parts:
            text = printable(part.text, keep="\n\t")
            if part.kind != "reasoning":
                self._fold()
                self._drawn.feed(text)
            else:
                self._begun = self._begun or time.monotonic()
                self._thinking += text
                latest = " ".join(self._thinking[-200:].split())[-max(10, self._console.width - 14):]
                self._drawn.passing(Text(f"thinking: {latest}", style="dim", no_wrap=True, overflow="crop"))

    def end(self) -> None:
        """No more pieces come."""
        self._fold()
        self._drawn.end()

    def _fold(self) -> None:
        """Say in a line that there was thinking."""
        if self._thinking:
            words, seconds = len(self._thinking.split()), time.monotonic() - self._begun
            self._drawn.note(Text(f"(thought for {seconds:.1f} s, {words} words: /think shows them)", style="dim"))
            self._thinking = ""


class MarkdownStream:
    """Markdown drawn while it comes. A block is printed when it has ended; the last one is drawn again and again, and
    of one that is taller than the screen its first lines are printed too."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible",
                          redirect_stdout=False, redirect_stderr=False)
        self._text, self._printed, self._blank, self._next = "", 0, False, 0.0
        self._live.start()

    def feed(self, text: str) -> None:
        """More text."""
        self._text += text
        if time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + FRAME

    def passing(self, line: Text) -> None:
        """Show a line until something else is shown."""
        if time.monotonic() >= self._next:
            self._live.update(line, refresh=True)
            self._next = time.monotonic() + FRAME

    def note(self, line: Text) -> None:
        """Print a line above all that comes."""
        self._live.update(Text(""), refresh=True)
        self._live.console.print(line)

    def end(self) -> None:
        """The text is whole."""
        self._finish([*self._begins(self._text), len(self._text)])
        self._live.update(Text(""))
        self._live.stop()

    def _draw(self) -> None:
        self._finish(self._begins(self._text[:self._text.rfind("\n") + 1]))
        lines = self._lines(self._text)[self._printed:]
        above = max(0, len(lines) - max(3, self._console.height - 2))
        self._print(lines[:above])
        self._printed += above
        self._live.update(SegmentLines(lines[above:], new_lines=True), refresh=True)

    def _finish(self, places: list[int]) -> None:
        """Print the blocks between these places of the text."""
        for begin, end in pairwise(places):
            lines = self._lines(self._text[begin:end])[self._printed:]
            self._live.update(Text(""))
            self._print(lines)
            self._printed, self._blank = 0, True
        self._text = self._text[places[-1]:] if places else self._text

    def _begins(self, text: str) -> list[int]:
        """Places in a text of whole lines where its blocks begin; the last one is what more text may change."""
        lines = text.split("\n")
        starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
        return [len("\n".join([*lines[:start], ""])) for start in starts]

    def _lines(self, text: str) -> list[list[Segment]]:
        """Lines on the screen, with an empty one between this and what was printed before."""
        lines = self._console.render_lines(Drawing(text), pad=False)
        return [[]] * (self._blank and bool(lines)) + lines

    def _print(self, lines: list[list[Segment]]) -> None:
        if lines:
            self._console.print(SegmentLines(lines, new_lines=True), end="")


class Code(CodeBlock):
    """Code in colours, two columns to the right."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class Title(Heading):
    """A heading at the left, bold."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class Drawing(Markdown):
    """Markdown as models mean it: HTML is text, and a line end is one."""

    elements: ClassVar = {**Markdown.elements, "fence": Code, "code_block": Code, "heading_open": Title}

    def __init__(self, text: str):
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in (child for one in self.parsed for child in one.children or []):
            if token.type == "softbreak":
                token.type = "hardbreak"


_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
