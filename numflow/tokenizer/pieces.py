"""Bytes of one token in decoded text: the decoders of tokenizer.json, token by token.

A rule is a function (written form, whether the token is the first) -> bytes. Bytes, because a character may be split
over
several tokens: the bytes of all tokens are joined and decoded once (or incrementally).
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from numflow.errors import TokenizerError

Piece = Callable[[str, bool], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORDPIECE_CLEANUP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
                      (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))


@cache
def byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level(text: str, first: bool) -> bytes:
    """Byte-level BPE; a token with a character outside the table (an added token) is plain UTF-8 text."""
    table = byte_of_character()
    try:
        return bytes([table[character] for character in text])
    except KeyError:
        return text.encode("utf-8")


def metaspace(strip_first: bool) -> Piece:
    """SentencePiece: U+2581 is a space, <0x0A> a byte; strip_first drops one space at the start of the text."""

    def piece(text: str, first: bool) -> bytes:
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(byte[1], 16)])
        text = text.replace("\u2581", " ")
        return (text[1:] if first and strip_first and text.startswith(" ") else text).encode("utf-8")

    return piece


def wordpiece(prefix: str = "##", cleanup: bool = True) -> Piece:
    """WordPiece: a space before each token that does not start with `prefix`; cleanup joins punctuation."""

    def piece(text: str, first: bool) -> bytes:
        if not first:
            text = text[len(prefix) :] if text.startswith(prefix) else " " + text
        for old, new in _WORDPIECE_CLEANUP if cleanup else ():
            text = text.replace(old, new)
        return text.encode("utf-8")

    return piece


def spaced(text: str, first: bool) -> bytes:
    """Rule without a decoder: tokens separated by spaces."""
    return (text if first else " " + text).encode("utf-8")


def piece_rule(decoder: dict[str, Any] | None) -> Piece:
    """Rule for the "decoder" of a tokenizer.json.

    Raises:
        TokenizerError: the decoder cannot be applied token by token.
    """
    if decoder is None:
        return spaced
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = [step["type"] for step in steps].index("Fuse") if any(s["type"] == "Fuse" for s in steps) else len(steps)
    apply = [_step(step, whole_text=n > fused) for n, step in enumerate(steps)]

    def piece(text: str, first: bool) -> bytes:
        value: str | bytes = text
        for step in apply:
            value = step(value, first) if isinstance(value, str) else value
        return value.encode("utf-8") if isinstance(value, str) else value

    return piece


def _step(step: dict[str, Any], whole_text: bool) -> Callable[[str, bool], str | bytes]:
    kind = step["type"]
    if kind == "ByteLevel":
        return byte_level
    if kind == "WordPiece":
        return wordpiece(step["prefix"], step["cleanup"])
    if kind == "ByteFallback":
        return lambda text, first: bytes([int(b[1], 16)]) if (b := _BYTE_TOKEN.fullmatch(text)) else text
    if kind == "Fuse":
        return lambda text, first: text
    if kind == "Metaspace":
        mark, drop = step["replacement"], step.get("prepend_scheme", "always") != "never"
        return lambda text, first: text.replace(mark, "" if first and drop else " ")
    if kind == "Replace" and "String" in step["pattern"]:
        return lambda text, first: text.replace(step["pattern"]["String"], step["content"])
    if kind == "Strip" and (not step["stop"] or not whole_text):
        return lambda text, first: _strip(text, step, first or not whole_text)
    raise TokenizerError(f"tokenizer.json: decoder {kind!r} ({step}) is not supported")


def _strip(text: str, step: dict[str, Any], applies: bool) -> str:
    if not applies:
        return text
    content = step["content"]
    starting = len(text) - len(text.lstrip(content))
    text = text[min(step["start"], starting) :]
    ending = len(text) - len(text.rstrip(content))
    return text[: len(text) - min(step["stop"], ending)]
