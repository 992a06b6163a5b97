"""Budget of one request: limits on settings that make a small request expensive."""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, fields
from typing import Any

from numflow.decoding.settings import checked_count, is_count
from numflow.decoding.structured import KINDS, source
from numflow.engine.request.settings import BREAKERS
from numflow.errors import RequestError, quoted

STOP_BYTES = 1024  # of one stop string
SALT_CHARACTERS = 256  # of cache_salt


@dataclass(frozen=True)
class Budget:
    """Maximum values that one request may ask for.

    max_beams:    beams of a beam search (num_beams).
    max_choices:  texts of one prompt (n, best_of).
    max_logprobs: alternatives for each token (logprobs, top_logprobs).
    max_breakers: distinct texts that end a repetition (dry_sequence_breakers).
    max_bans:     banned tokens and sequences (banned_tokens), and tokens that end a text (stop_token_ids).
    max_bias:     tokens with a bias (logit_bias).
    max_stops:    stop strings.
    max_grammar:  bytes of a JSON schema, a regular expression or a grammar.

    Raises:
        RequestError: a value is no whole number from 1 (max_logprobs: from 0).
    """

    max_beams: int = 32
    max_choices: int = 128
    max_logprobs: int = 20
    max_breakers: int = 64
    max_bans: int = 4096
    max_bias: int = 4096
    max_stops: int = 16
    max_grammar: int = 1 << 16

    def __post_init__(self):
        for field in fields(self):
            checked_count(field.name, getattr(self, field.name), int(field.name != "max_logprobs"))

    def check(self, settings) -> None:
        """Refuse settings (numflow.engine.request.settings.Settings) beyond the budget.

        Values of a wrong type pass here; type checks elsewhere refuse them.

        Raises:
            RequestError: a setting is beyond the budget; the message names the setting and the limit.
        """
        for name, limit in (("num_beams", "max_beams"), ("n", "max_choices"), ("best_of", "max_choices"),
                            ("logprobs", "max_logprobs"), ("prompt_logprobs", "max_logprobs")):
            value = getattr(settings, name)
            if is_count(value):
                self._within(name, f"{name}={quoted(value)}", int(value), limit)
        for name, limit in (("banned_tokens", "max_bans"), ("stop_token_ids", "max_bans"), ("logit_bias", "max_bias"),
                            ("stop", "max_stops")):
            value = getattr(settings, name)
            if isinstance(value, Sized) and not isinstance(value, str):
                self._within(name, f"{name} with {len(value)} entries", len(value), limit)
        self._check_breakers(settings.dry_sequence_breakers)
        self._check_stops(settings.stop)
        for kind in KINDS:
            content = getattr(settings, kind)
            if isinstance(content, (str, Mapping)):
                size = len(source(kind, content).encode("utf-8", "replace"))
                self._within(kind, f"{kind} of {size} bytes", size, "max_grammar")

    def _check_breakers(self, texts: Any) -> None:
        if isinstance(texts, (list, tuple)) and tuple(texts) != BREAKERS:
            found = len({text for text in texts if isinstance(text, str)})
            self._within("dry_sequence_breakers", f"dry_sequence_breakers with {found} different texts", found,
                         "max_breakers")

    def _check_stops(self, stop: Any) -> None:
        for text in (stop,) if isinstance(stop, str) else stop if isinstance(stop, (list, tuple)) else ():
            if isinstance(text, str) and len(text.encode("utf-8", "replace")) > STOP_BYTES:
                raise RequestError(f"stop has a text of more than {STOP_BYTES} bytes: {quoted(text)}", param="stop")

    def _within(self, name: str, what: str, count: int, limit: str) -> None:
        most = getattr(self, limit)
        if count > most:
            raise RequestError(f"{what} is more than the {most} that one request may ask for ({limit})", param=name)
