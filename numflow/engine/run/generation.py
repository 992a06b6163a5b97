"""Results of a generation, complete or streamed; stop strings and incomplete characters are held back."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.stops import held_back


@dataclass
class Generation:
    """Generated text.

    text:          decoded new tokens, "" without a tokenizer; the text ends before a stop string.
    ids:           new tokens, without the end token.
    finish_reason: "stop" (end token), "stop_string", "length" (max_tokens or the context is full), or "cancelled"
                   (cancelled or failed); None while the generation runs.
    stats:         prompt_tokens, new_tokens, prefill_s, decode_s, first_token_s, prefill_tok_s, decode_tok_s, and
                   cached_tokens (tokens of the prompt found in the prefix cache); with speculation drafts (number
                   of drafts that ran), accepted_drafts and acceptance_rate.
    score:         of a beam search: log-probability of the ids and the end token / length ** length_penalty.
    logprobs:      log-probability of each id, if requested. prompt_logprobs: log-probability of each token of the
                   prompt, None for the first token. prompt: text of the prompt, if echo was requested.
    stop_string:   the stop string that ended the text.
    choices:       all n results of the request, this one first.
    ignored:       settings that were left out because they have no effect -> reason.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prompt: str | None = None
    stop_string: str | None = None
    choices: list["Generation"] = field(default_factory=list, repr=False, compare=False)
    ignored: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def add(self, piece: "Piece") -> "Piece":
        """Append to the text; returns the piece."""
        self.text += piece
        return piece


class Piece(str):
    """Text released with the token `id` (None: flushed at the end); may be empty.

    index: index of the sample in the request. logprob: log-probability of the token, if requested.
    """

    id: int | None
    index: int
    logprob: TokenLogprob | None

    def __new__(cls, text: str, id: int | None = None, index: int = 0, logprob: TokenLogprob | None = None):
        piece = super().__new__(cls, text)
        piece.id, piece.index, piece.logprob = id, index, logprob
        return piece


class TextStream:
    """Incremental detokenizer: holds back a possible start of a stop string; `decoder` holds back incomplete UTF-8.

    decoder: result of tokenizer.stream(), or None without a tokenizer. stop: the stop string that was found.
    """

    def __init__(self, decoder, stops: tuple[str, ...] = ()):
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop is not None

    def push(self, id: int) -> str:
        """Add a token; returns the text that is released."""
        return self._release(self._decoder.push(id)) if self._decoder else ""

    def flush(self) -> str:
        """Release the text that is still held back, after the last token."""
        if self.stopped or not self._decoder:
            return ""
        certain = self._release(self._decoder.flush())
        held, self._held = self._held, ""
        return certain if self.stopped else certain + held

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        self._held += text
        found = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            cut, self.stop = min(found)
        else:
            cut = len(self._held) - held_back(self._held, self._stops)
        certain, self._held = self._held[:cut], "" if self.stopped else self._held[cut:]
        return certain


class Timing:
    """Times of one generation: prefill ends with the first token, the rest is decoding.

    begin, first, last: time.perf_counter() of the creation, of the first and of the latest token; None: no token yet.
    """

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens = prompt_tokens
        self.begin = time.perf_counter()
        self.first: float | None = None
        self.last: float | None = None

    def token(self) -> None:
        """Note the time of a token."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last

    def stats(self, result: Generation) -> dict[str, float]:
        """Generation.stats after the last token. A rate without tokens is 0."""
        now = time.perf_counter()
        first = self.first if self.first is not None else now
        prefill_s, decode_s = first - self.begin, now - first
        runs = max(0, len(result.ids) + (result.finish_reason == "stop") - 1)
        return {"prompt_tokens": self._prompt_tokens, "new_tokens": len(result.ids), "prefill_s": prefill_s,
                "decode_s": decode_s, "first_token_s": prefill_s,
                "prefill_tok_s": self._prompt_tokens / prefill_s if self.first is not None else 0.0,
                "decode_tok_s": runs / decode_s if runs else 0.0}
