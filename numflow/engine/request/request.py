"""A checked generation request, made from prompt and settings."""

import re
from collections.abc import Callable, Hashable, Mapping, Sized
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from numflow.decoding.constraints import Constraints
from numflow.decoding.logprobs import TokenLogprob
from numflow.decoding.sampler import Grammar, Sampler
from numflow.decoding.settings import Sampling, checked_count, is_count
from numflow.decoding.speculative import MAX_DRAFTS
from numflow.decoding.structured import KINDS, Grammars
from numflow.engine.request.adapter import ChosenAdapter, without_adapters
from numflow.engine.request.ahead import check_writes
from numflow.engine.request.beam import Beams
from numflow.engine.request.budget import SALT_CHARACTERS, Budget
from numflow.engine.request.defaults import Defaults
from numflow.engine.request.facts import ModelFacts
from numflow.engine.request.prompt import Prompts
from numflow.engine.request.settings import Settings
from numflow.errors import RequestError, TokenizerError, option, quoted

LEAST_SHIFTED = 16  # minimum context in tokens for context_shift
SPECULATIONS = ("ngram", "draft", "off")
BREAKER_BYTES, BREAKER_LISTS = 64, 16  # maximum bytes of one DRY sequence breaker; lists of breakers in the cache


@dataclass(frozen=True)
class Request:
    """A checked generation request. Plain data.

    prompt:    ids that the encoder, or a decoder without an encoder, reads. prefix: first ids of the decoder (without
               an encoder the prompt itself); the last `forced` of them count as generated. encoder: whether there is
               one.
    stops:     stop strings. continues: whether the new text continues the text of the prompt.
    beams:     settings of a beam search; None: tokens are sampled as `sampling` says.
    samples:   number of texts to generate. n: number of texts to return, the best ones.
    grammar:   initial grammar state of the text.
    scored:    return log-probabilities of the prompt's tokens, and of this many of the most probable tokens; None: do
               not. prompt_logprobs: set after the prompt has run. echo: the prompt's text, if it is returned.
    speculate: source of draft tokens: "ngram", "draft" (a model) or "off". draft_tokens: number of draft tokens per
               step; 0: chosen for speed.
    adapter:   adapter of the request, None for the base model alone.
    slot:      the engine's slot that keeps the text; None: any.
    context:   tokens after which the older half of a text is dropped (context shift); 0: the text ends at the context.
    cache_key: the prefix cache shares keys and values only between requests with the same key.
    ignored:   settings that were left out because they have no effect -> reason.
    """

    prompt: np.ndarray
    prefix: np.ndarray
    encoder: bool
    forced: int
    stops: tuple[str, ...]
    continues: bool
    sampling: Sampling
    beams: Beams | None
    constraints: Constraints
    samples: int = 1
    n: int = 1
    grammar: Grammar | None = None
    scored: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    echo: str | None = None
    speculate: str = "off"
    draft_tokens: int = 0
    cache_key: Hashable = ""
    ignored: Mapping[str, str] = field(default_factory=dict)
    adapter: ChosenAdapter | None = None
    slot: int | None = None
    context: int = 0

    @property
    def max_length(self) -> int:
        """Maximum length of the decoder's text in tokens."""
        length = len(self.prefix) + self.constraints.max_tokens
        return min(length, self.context) if self.context else length

    def sampler(self, index: int = 0) -> Sampler:
        """Sampler of the request's sample `index` (0 .. samples - 1)."""
        grammar = None if self.grammar is None else self.grammar.copy()
        return Sampler(self.sampling, self.constraints, self.prefix, index, grammar)


class Requests:
    """Factory of the requests of a model.

    tokenizer: function that returns the tokenizer, or raises TokenizerError if there is none.
    ends, bos: end token ids and the start token id, for use without a tokenizer.
    defaults:  function that reads the defaults in the model's files; called for the first request.
    longest:   function that returns the maximum tokens of each of n texts that run together in the current memory.
    has_draft: whether there is a draft model.
    adapter:   function that finds an adapter by name, or raises RequestError.
    """

    def __init__(self, facts: ModelFacts, prompts: Prompts, tokenizer, ends: frozenset[int], bos: int | None, defaults,
                 longest: Callable[[int], int]):
        self.facts = facts
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._ends = ends
        self._bos = bos
        self._defaults = defaults
        self._grammars: Grammars | None = None
        self._breakers = lru_cache(BREAKER_LISTS)(self._tokens_containing)
        self._longest = longest
        self.has_draft = False
        self.adapter: Callable[[str], ChosenAdapter] = without_adapters

    def find_adapter(self, adapter: str | None) -> ChosenAdapter | None:
        """The adapter of a name; None for None.

        Raises:
            RequestError: there is no adapter of this name.
        """
        return None if adapter is None else self.adapter(adapter)

    @cached_property
    def defaults(self) -> Defaults:
        """Defaults in the model's files."""
        return self._defaults()

    def make(self, prompt, settings: Settings, forced: int = 0, budget: Budget | None = None) -> Request:
        """A request for a prompt: text, ids or messages.

        forced: number of the last decoder_ids that count as generated tokens.
        budget: limits on the settings; None: no limits.

        Raises:
            RequestError, TokenizerError: as Model.generate says.
        """
        facts = self.facts
        check_writes(facts)
        if budget is not None:
            budget.check(settings)
        max_tokens = None if settings.max_tokens is None else checked_count("max_tokens", settings.max_tokens)
        stops = self._stops(settings.stop)
        beams = self._beams(settings, stops)
        text, ids = prompt, self._prompts.ids(prompt, settings.chat)
        bos = self.bos_id if len(ids) == 0 else None
        prefix = prompt = facts.check(ids if bos is None else [bos])
        if facts.encoder:
            given = settings.decoder_ids
            first, forced = self._prefix() if given is None else (given, forced)
            prefix = facts.check(first, "decoder_ids")
        elif settings.decoder_ids is not None:
            raise RequestError(f"{facts.name} has no encoder: it takes no decoder_ids")
        samples, n = self._samples(settings, beams)
        if max_tokens is None:
            max_tokens = self._default_max_tokens(len(prefix), beams.num_beams if beams else samples)
        shifts = self._shifts(settings, beams)
        constraints = self._constraints(settings, max_tokens, len(prefix), shifts)
        grammar = self._grammar(settings, constraints)
        speculate, draft_tokens = self._speculation(settings, beams)
        without_effect = {} if speculate != "off" or settings.draft_tokens is None else {
            "draft_tokens": f"draft_tokens={settings.draft_tokens} has no effect without speculate"}
        return Request(prompt, prefix, facts.encoder, forced, stops, not settings.chat and not facts.encoder,
                       self._sampling(settings, samples > n), beams, constraints, samples, n, grammar,
                       scored=self._scored(settings), echo=self._echo(settings, text, prompt), speculate=speculate,
                       draft_tokens=draft_tokens, cache_key=_salt(settings.cache_salt),
                       ignored={**settings.ignored, **without_effect},
                       adapter=self.find_adapter(settings.adapter),
                       slot=None if settings.id_slot is None else checked_count("id_slot", settings.id_slot),
                       context=facts.context if shifts else 0)

    def _stops(self, stop) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(_listed("stop", stop, "texts"))
        if not all(isinstance(text, str) and text for text in stops):
            raise RequestError(f"stop should be texts that are not empty, is {quoted(stop)}")
        if stops:
            self._tokenizer()  # stop strings need a tokenizer: fail before anything runs
        return stops

    def _beams(self, settings, stops) -> Beams | None:
        given = {key: getattr(settings, key) for key in ("length_penalty", "early_stopping")}
        values = {key: getattr(self.defaults, key) if value is None else value for key, value in given.items()}
        beams = Beams(settings.num_beams, **values)
        if beams.num_beams == 1:
            return None
        if not settings.greedy:
            name = "fsd" if settings.fsd else "temperature"
            raise RequestError(f"a beam search does not sample: leave out {name} or num_beams")
        if stops:
            raise RequestError("a beam search does not look for stop strings: leave out stop or num_beams")
        alone = ("logprobs", "eos_bypassing_max", "best_of", *KINDS)
        for name in [name for name in alone if getattr(settings, name) not in (None, 0)]:
            raise RequestError(f"a beam search does not go with {name}: leave out {name} or num_beams")
        return beams

    def _sampling(self, settings, ranked: bool) -> Sampling:
        """Sampling settings. ranked: whether the texts are ranked by their log-probabilities."""
        changes: dict = {"logprobs": 0} if ranked and settings.logprobs is None else {}
        texts = settings.dry_sequence_breakers
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"dry_sequence_breakers should be texts that are not empty, is {quoted(texts)}")
        if long := next((text for text in texts if len(text.encode("utf-8", "replace")) > BREAKER_BYTES), None):
            raise RequestError(f"dry_sequence_breakers has a text of more than {BREAKER_BYTES} bytes: {quoted(long)}")
        if settings.dry_multiplier:
            search = self.tokenizer and texts
            changes["dry_breakers"] = self._breakers(frozenset(texts)) if search else frozenset()
        return settings.sampling(**changes)

    def _tokens_containing(self, texts: frozenset[str]) -> frozenset[int]:
        """Tokens that contain one of the texts; searches the whole vocabulary."""
        tokenizer = self.tokenizer
        wanted = re.compile(b"|".join(re.escape(text.encode("utf-8", "replace")) for text in sorted(texts)))
        known = (id for id in range(tokenizer.vocab_size) if tokenizer.vocabulary.text(id) is not None)
        return frozenset(id for id in known if wanted.search(tokenizer.token_bytes(id)))

    def _grammar(self, settings, constraints) -> Grammar | None:
        given = [(kind, getattr(settings, kind)) for kind in KINDS if getattr(settings, kind) is not None]
        if not isinstance(settings.json_whitespace, bool):
            raise RequestError(f"json_whitespace should be true or false, is {settings.json_whitespace!r:.80}")
        if not given:
            return None
        if len(given) > 1:
            raise RequestError(f"{given[0][0]} contradicts {given[1][0]}: leave out one of them")
        (kind, content), = given
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer(), self.facts.vocabulary)
        return self._grammars.compile(kind, content, constraints.ends, settings.json_whitespace)

    def _samples(self, settings, beams) -> tuple[int, int]:
        """Number of texts to generate, and number of them to return."""
        n = settings.n
        samples = n if settings.best_of is None else settings.best_of
        for name, value, least in (("n", n, 1), ("best_of", samples, n)):
            checked_count(name, value, least)
        if beams is not None:
            if n > beams.num_beams:
                raise RequestError(f"n={n} is more than the {beams.num_beams} beams")
            return 1, n
        return (n if settings.deterministic else samples), n  # deterministic texts are all the same

    def _scored(self, settings) -> int | None:
        top = settings.prompt_logprobs
        if top is None and settings.echo:
            top = settings.logprobs
        if top is None:
            return None
        if self.facts.encoder:
            raise RequestError("prompt_logprobs: an encoder-decoder gives its prompt no probabilities")
        return checked_count("prompt_logprobs", top)

    def _echo(self, settings, prompt, ids) -> str | None:
        if not isinstance(settings.echo, bool):
            raise RequestError(f"echo should be true or false, is {quoted(settings.echo)}")
        if not settings.echo:
            return None
        if settings.chat or self.facts.encoder:
            raise RequestError("echo is for prompts that the text continues, without chat and encoder")
        return prompt if isinstance(prompt, str) else self._tokenizer().decode(ids.tolist())

    def _speculation(self, settings, beams) -> tuple[str, int]:
        """Source of draft tokens, and number of draft tokens per step."""
        how, count = settings.speculate, settings.draft_tokens
        if how is None:
            how = "draft" if self.has_draft and beams is None else "off"
        if how not in SPECULATIONS:
            raise RequestError(f"{option('speculate')} should be one of {', '.join(SPECULATIONS)}, is {quoted(how)}")
        if how == "draft" and not self.has_draft:
            raise RequestError(f"{option('speculate', 'draft')} needs a draft model: name one with {option('draft')}")
        if how != "off" and beams is not None:
            raise RequestError(f"a beam search does not speculate: leave out speculate={quoted(how)} or num_beams")
        return how, 0 if count is None else checked_count("draft_tokens", count, 1, MAX_DRAFTS)

    def first_ids(self) -> tuple[int, int | None]:
        """Start token of the decoder, and the token forced after it.

        Raises:
            RequestError: the model names no start token.
        """
        start, forced = self.facts.decoder_start, self.facts.forced_first
        start = self.defaults.decoder_start if start is None else start
        if start is None:
            raise RequestError(f"{self.facts.name} names no decoder start token; give decoder_ids")
        return start, self.defaults.forced_first if forced is None else forced

    def _prefix(self) -> tuple[list[int], int]:
        """First tokens of the decoder, and how many of them count as generated."""
        start, forced = self.first_ids()
        return ([start], 0) if forced is None else ([start, forced], 1)

    def _default_max_tokens(self, prefix: int, texts: int) -> int:
        """Maximum new tokens of a request without max_tokens: as many as context and KV memory hold."""
        tokens = self._longest(texts)
        tokens -= prefix if tokens < self.facts.context else 0
        return tokens if tokens > 0 else self.facts.context  # the request cannot run at all and is refused later

    def _shifts(self, settings, beams) -> bool:
        """Whether a text that has filled the context continues (context shift)."""
        if not isinstance(settings.context_shift, bool):
            raise RequestError(f"context_shift should be true or false, is {quoted(settings.context_shift)}")
        if not settings.context_shift:
            return False
        if not self.facts.decoder or beams is not None or self.facts.context < LEAST_SHIFTED:
            raise RequestError("context_shift is for decoders that write token by token, with a context of "
                               f"{LEAST_SHIFTED} tokens at least")
        if settings.speculate == "draft" or (settings.speculate is None and self.has_draft):
            raise RequestError(f"context_shift does not go with a draft model: add {option('speculate', 'ngram')} or "
                               f"{option('speculate', 'off')}")
        if (adapter := self.find_adapter(settings.adapter)) is not None and adapter.invocation:
            raise RequestError("context_shift does not go with an adapter that starts at invocation tokens")
        return True

    def _constraints(self, settings, max_tokens, prefix, shifts=False) -> Constraints:
        defaults, ends = self.defaults, frozenset() if settings.ignore_eos else self._end_ids()
        stops = _ids("stop_token_ids", settings.stop_token_ids, self.facts)
        if not shifts or settings.max_tokens is None:
            max_tokens = min(max_tokens, self.facts.context - prefix + 1)  # the last token is sampled and does not run
        min_tokens, size = settings.min_tokens, settings.no_repeat_ngram
        if min_tokens is None:
            min_tokens = min(max(0, defaults.min_length - prefix), max_tokens)
        if checked_count("min_tokens", min_tokens) > max_tokens:
            raise RequestError(f"min_tokens={min_tokens} is more than the {max_tokens} that may come")
        size = defaults.no_repeat_ngram if size is None else checked_count("no_repeat_ngram", size)
        banned = tuple(ids for ids in defaults.banned if len(ids) > 1 or ids[0] not in ends)
        banned += _banned(settings.banned_tokens, self.facts)
        forced = defaults.forced_last if ends else None
        if forced is not None:
            self.facts.check([forced], "forced_eos_token_id of the model's files")
        return Constraints(ends | frozenset(stops), size, min_tokens, max_tokens, forced, banned)

    @cached_property
    def tokenizer(self):
        """The tokenizer, or None: prompts of ids need none."""
        try:
            return self._tokenizer()
        except TokenizerError:
            return None

    @property
    def bos_id(self) -> int | None:
        """Start token of a text."""
        return self.tokenizer.bos_id if self.tokenizer else self._bos

    def _end_ids(self) -> frozenset[int]:
        return self._ends | self.tokenizer.eos_ids if self.tokenizer else self._ends


def _ids(name: str, ids, facts: ModelFacts) -> tuple[int, ...]:
    return tuple(facts.check(ids, name).tolist()) if len(_listed(name, ids, "token ids")) else ()


def _banned(given, facts: ModelFacts) -> tuple[tuple[int, ...], ...]:
    """Sequences of ids, checked; a single id is a sequence of one."""
    listed = _listed("banned_tokens", given, "token ids, or of lists of them")
    sequences = [[ids] if is_count(ids) else ids for ids in listed]
    if all(isinstance(ids, (list, tuple)) and ids and all(is_count(id) for id in ids) for ids in sequences):
        longest = max(map(len, sequences), default=0)
        if longest <= facts.context and max((max(ids) for ids in sequences), default=0) < facts.vocabulary:
            return tuple(tuple(map(int, ids)) for ids in sequences)
    return tuple(tuple(facts.check(ids, "banned_tokens").tolist()) for ids in sequences)  # raises


def _listed(name: str, value, of: str):
    """A value that must be a list, checked."""
    if not isinstance(value, Sized) or isinstance(value, (str, bytes, Mapping)):
        raise RequestError(f"{name} should be a list of {of}, is {quoted(value)}")
    return value


def _salt(value) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not 0 < len(value) <= SALT_CHARACTERS:
        raise RequestError(f"cache_salt should be a text of 1 .. {SALT_CHARACTERS} characters, is {quoted(value)}")
    return value
