"""Incremental output of a JSON object while it is generated, such that the output so far can always be closed."""

import json
import math
import re
from typing import Any

DEEPEST = 64  # largest depth of nested objects and lists
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HIGH, _LOW = (rf"u[dD][{digits}][0-9a-fA-F]{{2}}" for digits in ("89abAB", "c-fC-F"))  # halves of a character
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|{_HIGH}\\{_LOW}|u[0-9a-fA-F]{{4}})')
_BEGUN = re.compile(rf"\\(?:{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|u[0-9a-fA-F]{{0,3}})?")  # an incomplete escape
_SCALAR = re.compile(r"[-+.\w]+")
_SPACE = " \t\r\n"
_CLOSE = {"{": "}", "[": "]"}


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    """The value of a JSON number; ValueError if it overflows to infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def written(value: Any) -> str:
    """A value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


class JsonPieces:
    """A JSON object that arrives in pieces, rewritten in the format of `json.dumps`. String values are output as they
    arrive; keys and other values when they are complete.

    state:  "open", "done" (the object has ended) or "bad" (it is no valid JSON).
    inside: start within an object, after one of its values.
    """

    def __init__(self, inside: bool = False):
        self.state = "open"
        self._stack = ["{"] if inside else []
        # The expected next token: "value", "first" (a value or the end of a list), "key", "member" (a key or the end
        # of an object), "colon", "after" (a comma or an end), "text" (inside a value), "name" (inside a key).
        self._next = "after" if inside else "value"
        self._pending = ""  # was read, but is output only when a value follows

    def feed(self, text: str) -> tuple[str, str]:
        """Take text; return the output, and the rest of the text: everything after the end of the object, or from the
        invalid JSON on. While the object is open, the rest is an incomplete token, to be fed again with more text."""
        written, offset = "", 0
        while self.state == "open" and offset < len(text):
            step = self._string if self._next in ("text", "name") else self._step
            found = step(text, offset)
            if found is None:
                break
            offset, output = found
            written += output
        rest = text[offset:]
        if self.state == "bad":
            rest, self._pending = self._pending + rest, ""
        return written, rest

    def close(self) -> str:
        """The text that closes the object, if no more text follows."""
        self.state = "done"
        return '"' * (self._next == "text") + "".join(map(_CLOSE.__getitem__, reversed(self._stack)))

    def _bad(self, at: int) -> tuple[int, str]:
        self.state = "bad"
        return at, ""

    def _tell(self, text: str) -> str:
        text, self._pending = self._pending + text, ""
        return text

    def _string(self, text: str, at: int) -> tuple[int, str] | None:
        """Read a piece inside a string: (new offset, output), or None if the piece is incomplete."""
        if text[at] == '"':
            key, self._next = self._next == "name", "colon" if self._next == "name" else "after"
            return at + 1, self._hold('"') if key else '"'
        begun = _BEGUN.match(text, at)
        if begun is not None and begun.end() == len(text):
            return None
        found = _PLAIN.match(text, at) or _ESCAPE.match(text, at)
        if found is None:
            return self._bad(at)
        now = found[0] if begun is None else written(DECODER.decode(f'"{found[0]}"'))[1:-1]
        return found.end(), self._hold(now) if self._next == "name" else now

    def _hold(self, text: str) -> str:
        self._pending += text
        return ""

    def _step(self, text: str, at: int) -> tuple[int, str] | None:
        """Read a piece outside of strings: (new offset, output), or None if the piece is incomplete."""
        char, wanted = text[at], self._next
        if char in _SPACE:
            return at + 1, ""
        if wanted == "colon" or (wanted == "after" and char == ","):
            if wanted == "colon" and char != ":":
                return self._bad(at)
            self._next = "value" if wanted == "colon" or self._stack[-1] == "[" else "key"
            return at + 1, self._hold(f"{char} ")
        if char in "]}":
            return self._end(char, at)
        if wanted in ("key", "member"):
            if char != '"':
                return self._bad(at)
            self._next = "name"
            return at + 1, self._hold(char)
        return self._value(text, at) if wanted in ("value", "first") else self._bad(at)

    def _end(self, char: str, at: int) -> tuple[int, str]:
        fits = self._next in ("after", "member" if char == "}" else "first") and _CLOSE[self._stack[-1]] == char
        if not fits:
            return self._bad(at)
        self._stack.pop()
        self._next = "after"
        self.state = "open" if self._stack else "done"
        return at + 1, self._tell(char)

    def _value(self, text: str, at: int) -> tuple[int, str] | None:
        char = text[at]
        if char == '"':
            self._next = "text"
            return at + 1, self._tell(char)
        if char in _CLOSE:
            if len(self._stack) == DEEPEST:
                return self._bad(at)
            self._stack.append(char)
            self._next = "member" if char == "{" else "first"
            return at + 1, self._tell(char)
        found = _SCALAR.match(text, at)
        if found is None:
            return self._bad(at)
        if found.end() == len(text):
            return None
        try:
            value = written(DECODER.decode(found[0]))
        except ValueError:
            return self._bad(at)
        self._next = "after"
        return found.end(), self._tell(value)
