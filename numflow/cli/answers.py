"""Display of an answer: raw text as it is generated, or at a terminal rendered Markdown with the thinking folded."""

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

FRAME = 0.06  # seconds between two drawings of an unfinished block


class PlainAnswer:
    """Raw text of an answer, with its Markdown and thinking marks."""

    def take(self, piece: str, parts: Iterable[ReplyPart]) -> None:
        """Print a piece of the text. parts: the same piece, split into answer and thinking."""
        print(piece, end="", flush=True)

    def end(self) -> None:
        """End the answer: no more pieces follow."""
        print(flush=True)


class DrawnAnswer:
    """An answer rendered at a terminal: wrapped, Markdown and code coloured, thinking shown as one summary line."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._drawn = MarkdownStream(self._console)
        self._thinking, self._begun = "", 0.0

    def take(self, piece: str, parts: Iterable[ReplyPart]) -> None:
        """Draw a piece of the text. parts: the piece, split into answer and thinking."""
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
        """End the answer: no more pieces follow."""
        self._fold()
        self._drawn.end()

    def _fold(self) -> None:
        """Replace the thinking by a summary line."""
        if self._thinking:
            words, seconds = len(self._thinking.split()), time.monotonic() - self._begun
            self._drawn.note(Text(f"(thought for {seconds:.1f} s, {words} words: /think shows them)", style="dim"))
            self._thinking = ""


class MarkdownStream:
    """Incremental Markdown rendering. A finished block is printed once. The last, unfinished block is redrawn for
    every frame; if it is taller than the screen, its first lines are printed and not redrawn."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible",
                          redirect_stdout=False, redirect_stderr=False)
        self._text, self._printed, self._blank, self._next = "", 0, False, 0.0
        self._live.start()

    def feed(self, text: str) -> None:
        """Append text, and redraw when a frame is due."""
        self._text += text
        if time.monotonic() >= self._next:
            self._draw()
            self._next = time.monotonic() + FRAME

    def passing(self, line: Text) -> None:
        """Show a temporary line, until the next drawing."""
        if time.monotonic() >= self._next:
            self._live.update(line, refresh=True)
            self._next = time.monotonic() + FRAME

    def note(self, line: Text) -> None:
        """Print a permanent line above the block that is being drawn."""
        self._live.update(Text(""), refresh=True)
        self._live.console.print(line)

    def end(self) -> None:
        """Print the last block: the text is complete."""
        self._finish([*self._block_offsets(self._text), len(self._text)])
        self._live.update(Text(""))
        self._live.stop()

    def _draw(self) -> None:
        self._finish(self._block_offsets(self._text[:self._text.rfind("\n") + 1]))
        lines = self._lines(self._text)[self._printed:]
        scrolled = max(0, len(lines) - max(3, self._console.height - 2))
        self._print(lines[:scrolled])
        self._printed += scrolled
        self._live.update(SegmentLines(lines[scrolled:], new_lines=True), refresh=True)

    def _finish(self, offsets: list[int]) -> None:
        """Print the blocks between consecutive offsets of the text, and keep the text after the last offset."""
        for begin, end in pairwise(offsets):
            lines = self._lines(self._text[begin:end])[self._printed:]
            self._live.update(Text(""))
            self._print(lines)
            self._printed, self._blank = 0, True
        self._text = self._text[offsets[-1]:] if offsets else self._text

    def _block_offsets(self, text: str) -> list[int]:
        """Offsets at which the blocks of a text of whole lines begin. More text may still change the last block."""
        lines = text.split("\n")
        starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
        return [len("\n".join([*lines[:start], ""])) for start in starts]

    def _lines(self, text: str) -> list[list[Segment]]:
        """Rendered lines of a block, after an empty line if another block was printed before."""
        lines = self._console.render_lines(Drawing(text), pad=False)
        return [[]] * (self._blank and bool(lines)) + lines

    def _print(self, lines: list[list[Segment]]) -> None:
        if lines:
            self._console.print(SegmentLines(lines, new_lines=True), end="")


class Code(CodeBlock):
    """A code block: highlighted, indented by two columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 2))


class Title(Heading):
    """A bold heading, aligned left."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class Drawing(Markdown):
    """Markdown as models write it: HTML is plain text, and a line end breaks the line."""

    elements: ClassVar = {**Markdown.elements, "fence": Code, "code_block": Code, "heading_open": Title}

    def __init__(self, text: str):
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = _PARSER.parse(text)
        for token in (child for one in self.parsed for child in one.children or []):
            if token.type == "softbreak":
                token.type = "hardbreak"


_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
