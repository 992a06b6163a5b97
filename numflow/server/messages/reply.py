"""A model's text cut into answer, thinking and tool calls as it comes; streamed and whole replies use the same code."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from numflow.decoding.stops import held_back
from numflow.server.messages.tool_formats import FORMATS, ToolCall, ToolFormat

THINK, END_THINK = "<think>", "</think>"


def special_marks(tokenizer: Any, texts: Iterable[str]) -> dict[int, str]:
    """Marks among these that are special tokens, which decoding leaves out: id -> text."""
    wanted = set(texts)
    return {id: text for id in tokenizer.special_ids if (text := tokenizer.token_text(id)) in wanted}


def opens_thinking(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a prompt ends within thinking, as some chat templates end it."""
    end = tokenizer.decode(list(ids[-8:]), skip_special=False).rstrip()
    return end.endswith(THINK) and not end.endswith(END_THINK)


@dataclass(frozen=True)
class ReplyPart:
    """Text of one kind ("content" or "reasoning"), or a call."""

    kind: str
    text: str = ""
    call: "ReplyCall | None" = None


@dataclass(frozen=True)
class ReplyCall:
    """A call with its place among the reply's calls and an id of its own."""

    index: int
    id: str
    call: ToolCall

    def message(self) -> dict:
        """As it stands in a message."""
        return {"id": self.id, "type": "function",
                "function": {"name": self.call.name, "arguments": self.call.arguments}}


@dataclass
class Reply:
    """Everything of a reply so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ReplyCall] = field(default_factory=list)

    def add(self, part: ReplyPart) -> None:
        """Take one more part."""
        if part.call is not None:
            self.calls.append(part.call)
        elif part.kind == "reasoning":
            self.reasoning += part.text
        else:
            self.content += part.text


class Splitter:
    """Takes text, gives Parts; holds back what may be the beginning of a mark, and calls until they are complete.

    tools:    format of the calls to look for, None: none. names: functions that exist.
    forced:   the whole text is one call, a JSON object.
    thinking: look for <think> ... </think>. inside: the prompt ended with <think>.
    single:   only the first call counts; others are left out.
    """

    def __init__(self, tools: ToolFormat | None = None, names: frozenset[str] = frozenset(), forced: bool = False,
                 thinking: bool = True, inside: bool = False, single: bool = False):
        self.reply = Reply()
        self._begin, self._end = (tools.begin, tools.end) if tools is not None else ("", "")
        self._whole_text = tools is not None and not tools.begin  # which may be calls and nothing else
        self._calls_of = (FORMATS["tag_json"] if forced or tools is None else tools).read
        self._names, self._forced, self._single = names, forced, single
        self._thinking = thinking and not inside
        self._mode = "reasoning" if thinking and inside else "content"
        self._held, self._fresh = "", True  # fresh: nothing but space has come since the text or a call or thinking
        self._trim = False  # line ends that come next are dropped

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking."""
        return self._mode == "reasoning"

    def feed(self, text: str, end: bool = False) -> list[ReplyPart]:
        """Parts of the reply that more text cannot change. end: no more text comes."""
        self._held += text
        parts: list[ReplyPart] = []
        while True:
            if self._trim:
                self._held = self._held.lstrip("\n")
                self._trim = not self._held
            step = {"content": self._content, "reasoning": self._reasoning, "call": self._call}[self._mode](end)
            if step is None:
                return parts
            for part in step:
                self.reply.add(part)
            parts += step

    def _reasoning(self, end: bool) -> list[ReplyPart] | None:
        before, mark, after = self._held.partition(END_THINK)
        if mark:
            self._mode, self._held, self._fresh, self._trim = "content", after, True, True
            return self._text("reasoning", before)
        return self._release("reasoning", (END_THINK,), end)

    def _content(self, end: bool) -> list[ReplyPart] | None:
        if self._forced:
            return self._whole(end)
        if self._fresh:
            stripped = self._held.lstrip()
            if not stripped and (not end or self.reply.calls):
                return None
            if self._thinking and stripped.startswith(THINK):
                self._mode, self._held, self._trim = "reasoning", stripped[len(THINK):], True
                self._thinking = False  # once
                return []
            if self._thinking and THINK.startswith(stripped) and not end:
                return None
            if self._whole_text and stripped[:1] in ("{", "["):
                return self._whole(end)
        if not self._begin:
            return self._release("content", (), end)
        before, mark, after = self._held.partition(self._begin)
        if mark:
            self._mode, self._held = "call", after
            return self._text("content", "" if self._fresh and not before.strip() else before)
        if self._fresh and not end and self._begin.startswith(self._held.lstrip()):
            return None  # the space before a call is dropped
        return self._release("content", (self._begin,), end)

    def _call(self, end: bool) -> list[ReplyPart] | None:
        """Between the marks of a call."""
        body, mark, after = self._held.partition(self._end) if self._end else (self._held, "", "")
        if not mark and not end:
            return None
        calls = self._read(body)
        self._mode, self._held = "content", after
        if calls is not None:
            self._fresh = True
            return calls
        return self._text("content", self._begin + body + mark)  # no call: shown, not swallowed

    def _whole(self, end: bool) -> list[ReplyPart] | None:
        """All of the text may be a call."""
        if not end or not self._held:
            return None
        text, self._held = self._held, ""
        calls = self._read(text)
        known = self._forced or all(part.call is not None and part.call.call.name in self._names
                                    for part in calls or [])
        return calls if calls and known else self._text("content", text)

    def _read(self, body: str) -> list[ReplyPart] | None:
        """The calls that a text is; None if it is none."""
        try:
            found = self._calls_of(body)
        except (ValueError, RecursionError):
            return None
        if not found:
            return None
        begin = len(self.reply.calls)
        found = found[:1 - begin] if self._single else found
        return [ReplyPart("call", call=ReplyCall(begin + at, f"call_{secrets.token_hex(12)}", call))
                for at, call in enumerate(found)]

    def _release(self, kind: str, marks: tuple[str, ...], end: bool) -> list[ReplyPart] | None:
        """The held text, but for an end that may begin one of the marks."""
        keep = 0 if end else held_back(self._held, marks)
        text, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        return self._text(kind, text) if text else None

    def _text(self, kind: str, text: str) -> list[ReplyPart]:
        if kind == "content" and text:
            self._fresh = False
        return [ReplyPart(kind, text)] if text else []
