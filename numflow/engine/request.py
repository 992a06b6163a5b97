"""A checked generation request, and how one is made of what a caller gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from numflow.decoding.constraints import Constraints
from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling
from numflow.engine.beam import Beams
from numflow.engine.defaults import Defaults
from numflow.engine.prompt import Prompts
from numflow.engine.sequence import Runner
from numflow.errors import RequestError, TokenizerError, did_you_mean


@dataclass(frozen=True)
class Settings:
    """How a caller wants text generated.

    max_tokens:      new tokens at most; None: as many as the context holds.
    temperature, top_k, top_p, min_p, seed: see Sampling.
    ignore_eos:      go on where the model ends its text.
    stop:            text (or texts) that end the generation; not part of the result.
    chat:            put the prompt into the model's chat template.
    decoder_ids:     encoder-decoders: the decoder's first tokens, instead of the model's own.
    num_beams, length_penalty, early_stopping: num_beams above 1 is a beam search; see Beams.
    no_repeat_ngram: no sequence of so many tokens comes twice; 0: off.
    min_tokens:      so many new tokens come before an end token may.

    None for length_penalty, early_stopping, no_repeat_ngram or min_tokens: as the model's own files say.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    chat: bool = False
    decoder_ids: Sequence[int] | None = None
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    no_repeat_ngram: int | None = None
    min_tokens: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """From keyword arguments.

        Raises:
            RequestError: one that does not exist.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError(f"there is no setting {name!r} for generating{did_you_mean(name, known)}")
        return cls(**given)

    @property
    def sampling(self) -> Sampling:
        """The part that concerns how tokens are drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, seed=self.seed)


@dataclass(frozen=True)
class Request:
    """What to generate, checked.

    prompt:    ids the (only or encoder) stack reads first. prefix: the decoder's first ids (the prompt itself where
               there is no encoder), of which the last `counted` are forced ones.
    stops:     texts that end the generation. continues: the new text goes on where the prompt ends.
    beams:     None: tokens are picked one by one, as `sampling` says.
    """

    prompt: np.ndarray
    prefix: np.ndarray
    counted: int
    stops: tuple[str, ...]
    continues: bool
    sampling: Sampling
    beams: Beams | None
    constraints: Constraints

    def sampler(self, index: int = 0) -> Sampler:
        """What picks the tokens of the request's sample `index`."""
        return Sampler(self.sampling, self.constraints, self.prefix, index)


class Requests:
    """Makes requests for a model.

    tokenizer: function that returns the tokenizer, or raises TokenizerError where there is none.
    ends, bos: ids that end a text, and the one that starts it, for use without a tokenizer.
    defaults:  function that reads what the model's own files say, called for the first request.
    """

    def __init__(self, runner: Runner, prompts: Prompts, tokenizer, ends: frozenset[int], bos: int | None, defaults):
        self._runner = runner
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._ends = ends
        self._bos = bos
        self._defaults = defaults

    @cached_property
    def defaults(self) -> Defaults:
        """What the model's own files say."""
        return self._defaults()

    def make(self, prompt, settings: Settings, counted: int = 0) -> Request:
        """A request for a prompt: text, ids or messages.

        counted: how many of the last decoder_ids are tokens that the model is forced to generate.

        Raises:
            RequestError, TokenizerError: as Model.generate says.
        """
        runner, sampling = self._runner, settings.sampling
        if not runner.causal:
            raise RequestError(f"{self._name} is an encoder: it cannot generate text")
        if "logits" not in runner.network.outputs:
            raise RequestError(f"{self._name} computes no logits: it has no output head")
        max_tokens = runner.context if settings.max_tokens is None else _count("max_tokens", settings.max_tokens)
        stops = self._stops(settings.stop)
        beams = self._beams(settings, stops)
        ids = self._prompts.ids(prompt, settings.chat)
        bos = self._bos_id() if len(ids) == 0 else None
        prefix = prompt = runner.check(ids if bos is None else [bos])
        if runner.has_encoder:
            given = settings.decoder_ids
            first, counted = self._prefix() if given is None else (given, counted)
            prefix = runner.check(first, "decoder_ids")
        elif settings.decoder_ids is not None:
            raise RequestError(f"{self._name} has no encoder: it takes no decoder_ids")
        constraints = self._constraints(settings, max_tokens, len(prefix))
        continues = not settings.chat and not runner.has_encoder
        return Request(prompt, prefix, counted, stops, continues, sampling, beams, constraints)

    @property
    def _name(self) -> str:
        return self._runner.network.name

    def _stops(self, stop) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop should be texts that are not empty, is {stop!r}")
        if stops:
            self._tokenizer()  # stop strings need one: say so before anything runs
        return stops

    def _beams(self, settings, stops) -> Beams | None:
        given = {key: getattr(settings, key) for key in ("length_penalty", "early_stopping")}
        own = {key: getattr(self.defaults, key) if value is None else value for key, value in given.items()}
        beams = Beams(settings.num_beams, **own)
        if beams.num_beams == 1:
            for key, value in given.items():
                if value is not None:
                    raise RequestError(f"{key}={value} has no effect with one beam; give num_beams above 1")
            return None
        if settings.temperature > 0:
            raise RequestError("a beam search does not sample: leave out temperature or num_beams")
        if stops:
            raise RequestError("a beam search does not look for stop strings: leave out stop or num_beams")
        return beams

    def first_ids(self) -> tuple[int, int | None]:
        """The decoder's start token, and the token that is forced after it.

        Raises:
            RequestError: the model names no start token.
        """
        start, forced = (self._runner.network.facts.get(key) for key in ("decoder_start_token", "forced_bos_token"))
        start = self.defaults.decoder_start if start is None else start
        if start is None:
            raise RequestError(f"{self._name} names no decoder start token; give decoder_ids")
        return start, self.defaults.forced_first if forced is None else forced

    def _prefix(self) -> tuple[list[int], int]:
        """The decoder's first tokens, and how many of them count as generated."""
        start, forced = self.first_ids()
        return ([start], 0) if forced is None else ([start, forced], 1)

    def _constraints(self, settings, max_tokens, prefix) -> Constraints:
        own, ends = self.defaults, frozenset() if settings.ignore_eos else self._end_ids()
        max_tokens = min(max_tokens, self._runner.context - prefix + 1)  # the last token is chosen, not run
        min_tokens, size = settings.min_tokens, settings.no_repeat_ngram
        if min_tokens is None:
            min_tokens = min(max(0, own.min_length - prefix), max_tokens)
        if _count("min_tokens", min_tokens) > max_tokens:
            raise RequestError(f"min_tokens={min_tokens} is more than the {max_tokens} that may come")
        size = own.no_repeat_ngram if size is None else _count("no_repeat_ngram", size)
        banned = tuple(ids for ids in own.banned if len(ids) > 1 or ids[0] not in ends)
        forced = own.forced_last if ends else None
        if forced is not None:
            self._runner.check([forced], "forced_eos_token_id of the model's files")
        return Constraints(ends, size, min_tokens, max_tokens, forced, banned)

    @cached_property
    def tokenizer(self):
        """The tokenizer, or None: ids alone can do without one."""
        try:
            return self._tokenizer()
        except TokenizerError:
            return None

    def _bos_id(self) -> int | None:
        return self.tokenizer.bos_id if self.tokenizer else self._bos

    def _end_ids(self) -> frozenset[int]:
        return self._ends | self.tokenizer.eos_ids if self.tokenizer else self._ends


def _count(name: str, value) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 0:
        raise RequestError(f"{name} should be a whole number from 0, is {value!r}")
    return int(value)
