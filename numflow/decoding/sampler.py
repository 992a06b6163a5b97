"""Sampler of one request: the sampling chain with its state from token to token."""

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from numflow.decoding.chain import candidates, filtered, processed
from numflow.decoding.choice import Choice, plain_filters, unconstrained
from numflow.decoding.constraints import Constraints
from numflow.decoding.fsd import fsd
from numflow.decoding.logprobs import TokenLogprob, token_logprobs
from numflow.decoding.mirostat import Mirostat
from numflow.decoding.select import Candidates, draw, greedy, uniform, uniforms
from numflow.decoding.settings import Sampling
from numflow.decoding.speculative import Distribution, verify
from numflow.errors import NotFiniteError, RequestError

DRAW, COIN, CHECK = 0, 1, 2  # streams of random numbers of a position: token, choice of FSD, two for speculation
NOT_FINITE = "the model's logits are not finite numbers; its weights or its specification are wrong"


class Grammar(Protocol):
    """Interface of a grammar for structured output; see numflow.decoding.structured."""

    @property
    def complete(self) -> bool:
        """Whether only an end token is allowed."""

    def apply(self, scores: np.ndarray) -> np.ndarray:
        """Scores [V], -inf where the grammar allows no token."""

    def accept(self, id: int) -> None:
        """Advance the grammar by a token."""

    def copy(self) -> "Grammar":
        """Independent copy."""


class Sampler:
    """Sampling state of one sequence.

        id = sampler.pick(logits)       # float32 [V]; appends the token to `ids`, so call it once per token

    Tokens depend only on the seed, `index` and the logits; each position has its own random numbers. A sampler holds no
    arrays of vocabulary size.

    prefix: first ids of the decoder, prompt included. index: index of the sample within a request.
    new:    number of picked tokens. ids: int32, prefix and picked tokens. seed: the seed in use, drawn if none was
            given.
    logprobs: log-probabilities of the picked tokens, if the settings ask for them.
    """

    def __init__(self, settings: Sampling, constraints: Constraints | None = None,
                 prefix: Sequence[int] | np.ndarray = (), index: int = 0, grammar: Grammar | None = None):
        self.settings, self.index, self.grammar = settings, index, grammar
        self.constraints = constraints or Constraints()
        self.seed = int.from_bytes(os.urandom(8), "little") >> 1 if settings.seed is None else int(settings.seed)
        self.new = 0
        self.logprobs: list[TokenLogprob] = []
        self._history = np.array(prefix, np.int32)
        self._length = len(self._history)
        self._filters = plain_filters(settings)
        self._eos_bypassed = 0
        self._mirostat = Mirostat(settings.mirostat, settings.mirostat_tau, settings.mirostat_eta) \
            if settings.mirostat else None

    @property
    def ids(self) -> np.ndarray:
        """All tokens so far, int32 [n]."""
        return self._history[:self._length]

    @property
    def complete(self) -> bool:
        """Whether the grammar allows only an end token."""
        return self.grammar is not None and self.grammar.complete

    def pick(self, logits: np.ndarray) -> int:
        """Pick the next token from float32 logits [V].

        Raises:
            NotFiniteError: the logits are not finite.
            RequestError: no token is allowed.
        """
        c = self.candidates(logits)
        id = int(c.ids[0]) if len(c.ids) == 1 else draw(c.ids, c.weights, self.uniform())
        if self._eos_bypassed < self.settings.eos_bypassing_max and id in self.constraints.ends:
            id = self._best_non_end(logits)
            self._eos_bypassed += 1
        self.accept(id, logits)
        return id

    def choice(self, ahead: int = 0, steps: int = 1) -> Choice | None:
        """Parameters for sampling on a device like `pick`, `ahead` tokens after the next one.

        steps: number of tokens in one run. None if the first token depends on more than the logits.
        """
        if not self._logits_decide(ahead):
            return None
        if self.settings.greedy:
            return Choice()
        first, *later = uniforms(self.seed, self.index, self.new + ahead, steps)
        return Choice(self.settings.temperature, first, self._filters or (), tuple(later))

    def steps_ahead(self, most: int) -> int:
        """Number of next tokens, up to `most`, that depend only on the logits and on random numbers known now."""
        if not self._logits_decide():
            return 0
        most = min(most, max(1, self.constraints.max_tokens - self.new))
        return most if most <= 1 or self._logits_decide(most - 1) else most - 1

    def _logits_decide(self, ahead: int = 0) -> bool:
        return self._filters is not None and self.grammar is None and unconstrained(self.constraints, self.new + ahead)

    def picked(self, id: int) -> int:
        """Accept the token that a device has picked by `choice`; below 0: the logits were not finite.

        Raises:
            NotFiniteError: the logits were not finite.
        """
        if id < 0:
            raise NotFiniteError(NOT_FINITE)
        self.accept(id)
        return id

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Distribution that `pick` samples from: ids int64 [n], ascending, and probabilities float64 [n]."""
        c = self.candidates(logits)
        return c.ids, c.probabilities

    def candidates(self, logits: np.ndarray) -> Candidates:
        """Candidates after all filters of the settings."""
        settings, scores = self.settings, self.scores(logits)
        if settings.greedy:
            return Candidates(np.array([greedy(scores)]), np.zeros(1))
        return self._filtered(candidates(scores, settings.pool_size))

    def check(self, logits: np.ndarray, draft: int, q: Distribution) -> int:
        """As `pick`, with a draft sampled from q: the draft if it is accepted, else another token. The distribution is
        the same as with `pick`, the token may differ. See numflow.decoding.speculative."""
        if self.settings.eos_bypassing_max:
            return self.pick(logits)
        p = Distribution(*self.distribution(logits))
        id = verify(p, draft, q, self.uniform(CHECK), self.uniform(CHECK + 1))
        self.accept(id, logits)
        return id

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """Logits [V] with penalties and constraints, -inf for excluded tokens."""
        if not np.isfinite(logits[np.argmax(logits)]):
            raise NotFiniteError(NOT_FINITE)
        scores = self.constraints.apply(processed(logits, self.ids, self.new, self.settings), self.ids, self.new)
        if self.grammar is not None:
            scores = self.grammar.apply(scores)
        if scores is not logits and np.max(scores) == -np.inf:
            raise RequestError("no token may come next: the model's files or the request rule out all of them")
        return scores

    def uniform(self, stream: int = DRAW) -> float:
        """Random number 0 .. 1 of a stream at the position of the next token."""
        return uniform(self.seed, self.index, self.new, stream)

    def accept(self, id: int, logits: np.ndarray | None = None) -> None:
        """Append a token. logits: the logits that the token was picked from, for its log-probability."""
        if logits is not None and self.settings.logprobs is not None:
            self.logprobs += token_logprobs(logits[None], np.array([id]), self.settings.logprobs)
        if self._mirostat is not None:
            self._mirostat.accept(id)
        if self.grammar is not None and id not in self.constraints.ends:
            self.grammar.accept(id)
        if self._length == len(self._history):
            self._history = np.concatenate([self._history, np.zeros(max(64, self._length), np.int32)])
        self._history[self._length] = id
        self._length += 1
        self.new += 1

    def copy(self) -> "Sampler":
        """Independent copy with the same seed."""
        twin = object.__new__(Sampler)
        twin.__dict__ = dict(self.__dict__)
        twin._history, twin.logprobs = self._history.copy(), list(self.logprobs)
        twin._mirostat = None if self._mirostat is None else self._mirostat.copy()
        twin.grammar = None if self.grammar is None else self.grammar.copy()
        return twin

    def _filtered(self, c: Candidates) -> Candidates:
        s = self.settings
        if self._mirostat is not None:
            return self._mirostat.narrow(filtered(c, s))
        if s.fsd and not (s.fsd == "random" and self.new < s.fsd_random and self.uniform(COIN) < 0.5):
            c = Candidates(c.ids, c.scores / s.temperature) if s.temperature else c
            return fsd(c, self.ids, s.fsd_k, s.fsd_n, s.fsd_alpha, s.fsd_beta)
        return filtered(c, s)

    def _best_non_end(self, logits: np.ndarray) -> int:
        """Most probable token that is no end token."""
        scores = self.scores(logits).copy()
        scores[[id for id in self.constraints.ends if id < len(scores)]] = -np.inf
        if np.max(scores) == -np.inf:
            raise RequestError("no token may come next but an end token, and eos_bypassing_max rules it out")
        return greedy(scores)
