"""Incremental splitting of a model's text into answer, thinking and tool calls, for streamed and whole replies."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numflow.decoding.stops import held_back
from numflow.server.messages.json_pieces import JsonPieces
from numflow.server.messages.tool_formats import FORMATS, ToolCall, ToolFormat


class ThinkMarks(NamedTuple):
    """The marks before and after thinking."""

    begin: str
    end: str


# The chat template shows which pair the model uses; if it shows none, the first.
THINKING = (ThinkMarks("<think>", "</think>"), ThinkMarks("[THINK]", "[/THINK]"),
            ThinkMarks("<seed:think>", "</seed:think>"), ThinkMarks("<thinking>", "</thinking>"),
            ThinkMarks("<thought>", "</thought>"), ThinkMarks("◁think▷", "◁/think▷"))
_BETWEEN = " \t\r\n;,]"  # characters that may follow a call whose arguments were streamed


def special_marks(tokenizer: Any, texts: Iterable[str]) -> dict[int, str]:
    """The given marks that are special tokens, which decoding leaves out: id -> text."""
    wanted = set(texts)
    return {id: text for id in tokenizer.special_ids if (text := tokenizer.token_text(id)) in wanted}


def shown_marks(chat_template: str | None) -> ThinkMarks | None:
    """The thinking marks in a chat template; None if there are none."""
    return next((marks for marks in THINKING if any(mark in (chat_template or "") for mark in marks)), None)


def opens_thinking(tokenizer: Any, ids: Sequence[int], marks: ThinkMarks = THINKING[0]) -> bool:
    """Whether a prompt ends with the opening mark of thinking, as with some chat templates."""
    end = tokenizer.decode(list(ids[-8:]), skip_special=False).rstrip()
    return end.endswith(marks.begin)


@dataclass(frozen=True)
class ReplyPart:
    """A part of a reply.

    kind: "content" or "reasoning" with text; "call" is the beginning of a tool call, "arguments" a piece of the JSON
    text of its arguments, and "called" its end, with the complete call. index: index of the call.
    """

    kind: str
    text: str = ""
    call: "ReplyCall | None" = None
    index: int = 0


@dataclass(frozen=True)
class ReplyCall:
    """A call with its index among the reply's calls and its id.

    broken: the arguments were incomplete, and were closed to be valid JSON.
    """

    index: int
    id: str
    call: ToolCall
    broken: bool = False

    def message(self) -> dict:
        """The call in the shape of a chat message."""
        return {"id": self.id, "type": "function",
                "function": {"name": self.call.name, "arguments": self.call.arguments}}


@dataclass
class Reply:
    """The reply so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ReplyCall] = field(default_factory=list)

    def add(self, part: ReplyPart) -> None:
        """Append a part."""
        if part.call is not None:
            self.calls += [part.call] * (part.kind == "called")
        elif part.kind == "arguments":
            return
        elif part.kind == "reasoning":
            self.reasoning += part.text
        else:
            self.content += part.text


class Splitter:
    """Splits a text into ReplyParts. Text that may be the beginning of a mark is held back. A call is held back until
    it is complete or, with `pieces`, until its arguments begin.

    tools:    format of the calls; None: no calls. names: names of the functions.
    forced:   the whole text is one call: a JSON object, or as `tools` reads it.
    thinking: look for thinking between `marks`. inside: the prompt ended with the opening mark.
    single:   keep only the first call.
    pieces:   stream the arguments of calls, if they are a JSON object in this format. Streamed text cannot be taken
              back: incomplete arguments are closed, where the call would otherwise be treated as text.
    """

    def __init__(self, tools: ToolFormat | None = None, names: frozenset[str] = frozenset(), forced: bool = False,
                 thinking: bool = True, inside: bool = False, single: bool = False,
                 pieces: bool = False, marks: ThinkMarks = THINKING[0]):
        self.reply = Reply()
        self._begin, self._end = (tools.begin, tools.end) if tools is not None else ("", "")
        self._whole_text = tools is not None and not tools.begin  # the whole text may be calls
        form = FORMATS["tag_json"] if tools is None else tools
        self._calls_of, self._head, self._wrapped = form.read, form.head if pieces else None, form.wrapped
        self._json, self._made = JsonPieces(), ReplyCall(0, "", ToolCall("", ""))  # of the call that is being streamed
        self._shown = self._begin  # text before a body, shown if the body is no call
        self._names, self._forced, self._single = names, forced, single
        self._thinking, self._marks = thinking and not inside, marks
        self._mode = "reasoning" if thinking and inside else "content"
        self._held, self._fresh = "", True  # fresh: only white space since the start, a call or thinking
        self._trim = False  # whether to drop the next line ends

    @property
    def thinks(self) -> bool:
        """Whether the following text is thinking."""
        return self._mode == "reasoning"

    def feed(self, text: str, end: bool = False) -> list[ReplyPart]:
        """Take text; return the parts of the reply that further text cannot change. end: the text is complete."""
        self._held += text
        parts: list[ReplyPart] = []
        while True:
            if self._trim:
                self._held = self._held.lstrip("\n")
                self._trim = not self._held
            step = {"content": self._content, "reasoning": self._reasoning, "call": self._call,
                    "arguments": self._arguments, "behind": self._behind, "between": self._between}[self._mode](end)
            if step is None:
                return parts
            for part in step:
                self.reply.add(part)
            parts += step

    def _reasoning(self, end: bool) -> list[ReplyPart] | None:
        before, mark, after = self._held.partition(self._marks.end)
        if mark:
            self._mode, self._held, self._fresh, self._trim = "content", after, True, True
            return self._text("reasoning", before)
        return self._release("reasoning", (self._marks.end,), end)

    def _content(self, end: bool) -> list[ReplyPart] | None:
        if self._forced:
            return self._whole(end)
        if self._fresh:
            stripped = self._held.lstrip()
            if not stripped and (not end or self.reply.calls):
                return None
            if self._thinking and stripped.startswith(self._marks.begin):
                self._mode, self._held, self._trim = "reasoning", stripped.removeprefix(self._marks.begin), True
                self._thinking = False  # once
                return []
            if self._thinking and self._marks.begin.startswith(stripped) and not end:
                return None
            if self._whole_text and stripped[:1] in ("{", "["):
                return self._whole(end)
        if not self._begin:
            return self._release("content", (), end)
        before, mark, after = self._held.partition(self._begin)
        if mark:
            self._mode, self._held, self._shown = "call", after, self._begin
            return self._text("content", "" if self._fresh and not before.strip() else before)
        if self._fresh and not end and self._begin.startswith(self._held.lstrip()):
            return None  # white space before a call is dropped
        return self._release("content", (self._begin,), end)

    def _call(self, end: bool) -> list[ReplyPart] | None:
        """Text between the marks of a call."""
        if (begun := self._begin_call()) is not None:
            return begun
        body, mark, after = self._held.partition(self._end) if self._end else (self._held, "", "")
        if not mark and not end:
            return None
        calls = self._read(body)
        self._mode, self._held = "content", after
        if calls is not None:
            self._fresh = True
            return calls
        return self._text("content", self._shown + body + mark)  # an invalid call is shown as text

    def _whole(self, end: bool) -> list[ReplyPart] | None:
        """A text that may be a call as a whole."""
        if (begun := self._begin_call()) is not None:
            return begun
        if not end or not self._held:
            return None
        text, self._held = self._held, ""
        calls = self._read(text)
        all_known = self._forced or all(part.call is None or part.call.call.name in self._names for part in calls or [])
        return calls if calls and all_known else self._text("content", text)

    def _begin_call(self) -> list[ReplyPart] | None:
        """The beginning of a call whose arguments are streamed; None if the text has none."""
        found = self._head.match(self._held) if self._head is not None else None
        if found is None or found[1] not in self._names or (self._single and self.reply.calls):
            return None
        self._held, self._mode, self._json = self._held[found.end():], "arguments", JsonPieces()
        self._made = self._new_call(len(self.reply.calls), ToolCall(found[1], ""))
        return [ReplyPart("call", call=self._made, index=self._made.index)]

    def _arguments(self, end: bool) -> list[ReplyPart] | None:
        """Text inside the arguments of a streamed call."""
        arguments, self._held = self._json.feed(self._held)
        broken = self._json.state == "bad" or (end and self._json.state == "open")
        if self._json.state == "open" and end:
            self._held = ""  # an incomplete key or number
        arguments += self._json.close() if broken else ""
        call = self._made.call
        self._made = replace(self._made, call=ToolCall(call.name, call.arguments + arguments), broken=broken)
        parts = [ReplyPart("arguments", arguments, index=self._made.index)] if arguments else []
        if self._json.state == "open":
            return parts or None
        if broken:
            self._mode, self._fresh = "content", False
        elif self._wrapped:
            self._mode, self._json = "behind", JsonPieces(inside=True)
        else:
            self._mode = "between"
        return [*parts, ReplyPart("called", call=self._made, index=self._made.index)]

    def _behind(self, end: bool) -> list[ReplyPart] | None:
        """Text after the arguments, inside the JSON object around them."""
        _, self._held = self._json.feed(self._held)
        if self._json.state == "open" and not end:
            return None
        if self._json.state == "done":
            self._mode = "between"
        else:
            self._mode, self._fresh = "content", False
            self._held = self._held if self._json.state == "bad" else ""
        return []

    def _between(self, end: bool) -> list[ReplyPart] | None:
        """Text after a streamed call."""
        rest = self._held = self._held.lstrip(_BETWEEN)
        ended = bool(self._end) and rest.startswith(self._end)
        if not ended and not end and self._end.startswith(rest):
            return None
        self._held, self._fresh, self._shown = rest.removeprefix(self._end), True, ""
        self._mode = "content" if ended or not self._begin or not rest else "call"
        return []

    def _read(self, body: str) -> list[ReplyPart] | None:
        """Parts of the calls in a body; None if it has none."""
        try:
            found = self._calls_of(body)
        except (ValueError, RecursionError):
            return None
        if not found:
            return None
        first = len(self.reply.calls)
        found = found[:1 - first] if self._single else found
        made = [self._new_call(index, call) for index, call in enumerate(found, first)]
        return [part for one in made for part in (
            ReplyPart("call", call=replace(one, call=ToolCall(one.call.name, "")), index=one.index),
            ReplyPart("arguments", one.call.arguments, index=one.index),
            ReplyPart("called", call=one, index=one.index))]

    def _new_call(self, index: int, call: ToolCall) -> ReplyCall:
        return ReplyCall(index, f"call_{secrets.token_hex(12)}", call)

    def _release(self, kind: str, marks: tuple[str, ...], end: bool) -> list[ReplyPart] | None:
        """The held text without an end that may be the beginning of a mark."""
        keep = 0 if end else held_back(self._held, marks)
        text, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        return self._text(kind, text) if text else None

    def _text(self, kind: str, text: str) -> list[ReplyPart]:
        if kind == "content" and text:
            self._fresh = False
        return [ReplyPart(kind, text)] if text else []
