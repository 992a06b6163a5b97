"""Structured output by llguidance: text that follows a JSON schema, a regular expression or a grammar.

Before each token the matcher computes the allowed tokens; all others get score -inf. There is no fallback: a grammar
that cannot be enforced is an error, and so is a token that the grammar does not allow.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

import numpy as np

from numflow.distribution import install
from numflow.errors import DeviceError, RequestError

KINDS = ("json_schema", "regex", "grammar")
# White space between the parts of JSON. The amount is limited: some models never stop writing white space.
WHITE_SPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
DIGITS = 20  # maximum digits in a row of a JSON number: some models never stop, and 64-bit numbers have no more
CACHED = 8  # compiled grammars in the cache, for further prompts of a request


def source(kind: str, content: str | Mapping[str, Any]) -> str:
    """Text of a schema, an expression or a grammar.

    Raises:
        RequestError: the schema is no JSON.
    """
    try:
        return content if isinstance(content, str) else json.dumps(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{kind}: {_one_line(error)}") from None


class Grammars:
    """Compiler of grammars for one tokenizer (of numflow.tokenizer.load_tokenizer) and a vocabulary of `size` ids.

    Raises:
        DeviceError: llguidance is not installed.
    """

    def __init__(self, tokenizer, size: int):
        library = _library()
        # An id outside the model's vocabulary stands for "the text may end here"; requests name the real end tokens.
        self.size, self.end = size, max(size, tokenizer.vocab_size)
        self._library = library
        vocabulary = _Vocabulary(tokenizer, self.end)
        self.tokens = vocabulary.tokens
        self._tokenizer = library.LLTokenizer(
            library.TokenizerWrapper(vocabulary), n_vocab=self.end + 1, eos_token=self.end)
        first = np.frombuffer(b"".join(token[:1] or b"\xff" for token in self.tokens), np.uint8)
        self.digit, self._letter, self._closing = (
            np.isin(first, list(some)) for some in (b"0123456789", b"z", b",]}"))  # masks of tokens by their first byte
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # in LRU order
        self._lock = Lock()

    def compile(self, kind: str, content: str | Mapping[str, Any], ends: Iterable[int],
                whitespace: bool = False) -> "Matcher":
        """Matcher at the start of a text.

        kind: "json_schema" (a dict or JSON text), "regex", or "grammar" (Lark as llguidance writes it, or GBNF).
        ends: end tokens. whitespace: whether JSON may have white space between its parts.

        Raises:
            RequestError: the grammar is invalid, or cannot be enforced.
        """
        grammar = _grammar(self._library, kind, content, whitespace)
        with self._lock:  # one at a time: several large grammars would take all processors
            if grammar not in self._compiled:
                _validate(self._library, kind, grammar, self._tokenizer)
                self._compiled[grammar] = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
                if len(self._compiled) > CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            has_json = kind == "json_schema" or "%json" in grammar
            return Matcher(self._compiled[grammar].deep_copy(), self, frozenset(ends), 0 if has_json else None)

    def behind_number(self, allowed: np.ndarray, may_end: bool) -> bool:
        """Whether a text that ends with a digit ends with a JSON number that may end here.

        allowed: bool [n], whether each of the first n tokens is allowed. may_end: whether the text may end.
        """
        count = len(allowed)
        closes = may_end or (allowed & self._closing[:count]).any()
        return bool(closes and not (allowed & self._letter[:count]).any())


class Matcher:
    """State of a text in its grammar.

    complete: whether only an end token is allowed. digits: number of digits at the end of the text; None if the grammar
    has no JSON and digits are not counted.
    """

    def __init__(self, matcher, grammars: Grammars, ends: frozenset[int], digits: int | None):
        self._matcher, self._grammars, self._ends, self._digits = matcher, grammars, ends, digits
        self._bits = np.zeros(-(-(grammars.end + 1) // 32), np.int32)
        self._check()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def apply(self, scores: np.ndarray) -> np.ndarray:
        """Scores float [V], -inf for tokens that the grammar does not allow."""
        if self.complete:
            allowed, may_end = np.zeros(len(scores), bool), True
        else:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check()
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(bool)
            allowed, may_end = bits[:len(scores)], bool(bits[self._grammars.end])
            if (self._digits or 0) >= DIGITS and self._grammars.behind_number(allowed, may_end):
                allowed &= ~self._grammars.digit[:len(scores)]
        allowed[[id for id in self._ends if id < len(scores)]] = may_end
        return np.where(allowed, scores, -np.inf).astype(scores.dtype)

    def accept(self, id: int) -> None:
        """Advance the grammar by a token that is no end token.

        Raises:
            RequestError: the grammar does not allow it.
        """
        self._matcher.consume_token(id)
        self._check()
        if self._digits is not None:
            text = self._grammars.tokens[id]
            before = text.rstrip(b"0123456789")
            self._digits = len(text) - len(before) + (0 if before else self._digits)

    def copy(self) -> "Matcher":
        """Independent copy."""
        return Matcher(self._matcher.deep_copy(), self._grammars, self._ends, self._digits)

    def _check(self):
        if self._matcher.is_error():
            raise RequestError(f"structured output: {_one_line(self._matcher.get_error())}")


def check_grammar(kind: str, content: str | Mapping[str, Any]) -> None:
    """Refuse a grammar that `Grammars.compile` refuses for every vocabulary.

    Raises:
        DeviceError: llguidance is not installed. RequestError: the grammar is invalid.
    """
    library = _library()
    _validate(library, kind, _grammar(library, kind, content), None)


def _validate(library, kind: str, grammar: str, tokenizer) -> None:
    if problem := library.LLMatcher.validate_grammar(grammar, tokenizer):
        raise RequestError(f"{kind}: {_one_line(problem)}")


def _grammar(library, kind: str, content, whitespace: bool = False) -> str:
    """The grammar in the form that llguidance takes."""
    matcher = library.LLMatcher
    try:
        if kind == "json_schema":
            schema = json.loads(content) if isinstance(content, str) else content
            if not isinstance(schema, (Mapping, bool)):
                raise ValueError("a schema should be a JSON object")
            options = {"whitespace_pattern": WHITE_SPACE} if whitespace else {"whitespace_flexible": False}
            return matcher.grammar_from_json_schema(source(kind, schema), defaults=options)
        if not isinstance(content, str) or not content:
            raise ValueError("should be text that is not empty")
        if kind == "regex":
            return matcher.grammar_from_regex(content)
        return library.grammar_from("gbnf", content)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{kind}: {_one_line(error)}") from None


class _Vocabulary:
    """Tokenizer interface of llguidance: the bytes of every token; special tokens start with byte FF, which no text
    has."""

    def __init__(self, tokenizer, end: int):
        special = tokenizer.special_ids
        self.tokens = [
            b"\xff" + tokenizer.token_text(id).encode("utf-8", "replace") if id in special else _bytes(tokenizer, id)
            for id in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (end - len(self.tokens)) + [b"\xff<end of text>"]
        self.eos_token_id, self.bos_token_id = end, None
        self.special_token_ids = [*sorted(special), end]
        self._encode = tokenizer.encode
        plain = (id for id in reversed(range(len(self.tokens))) if id not in special and id != end)
        self._ids = {self.tokens[id]: id for id in plain}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly the text, as the tokenizer encodes it inside a longer text."""
        wanted = text.encode()
        ids = self._encode(text, add_special=False, parse_special=False)
        pieces = [self.tokens[id] for id in ids]
        found = b"".join(pieces)
        if found == wanted:
            return ids
        if found == b" " + wanted:  # the tokenizer puts a space before every text
            if pieces[0] == b" ":
                return ids[1:]
            if (first := self._ids.get(pieces[0][1:])) is not None:
                return [first, *ids[1:]]
        return self._longest_first(wanted)

    def _longest_first(self, wanted: bytes) -> list[int]:
        """Greedy encoding: the longest token at each position, up to the first position without one."""
        ids: list[int] = []
        offset = 0
        while offset < len(wanted):
            size = next((size for size in range(min(self._longest, len(wanted) - offset), 0, -1)
                         if wanted[offset:offset + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[wanted[offset:offset + size]])
            offset += size
        return ids


def _bytes(tokenizer, id: int) -> bytes:
    """Bytes of a token; b"" for an unused id."""
    return b"" if tokenizer.vocabulary.text(id) is None else tokenizer.token_bytes(id)


def _library():
    try:
        import llguidance
    except ImportError:
        raise DeviceError(f"structured output needs llguidance: {install('structured')}") from None
    return llguidance


def _one_line(message: object) -> str:
    """Message of llguidance in one line, without the backtrace that internal errors have."""
    return " ".join(str(message).partition("<backtrace>")[0].split())[:400]
