"""Beam search: the B best unfinished hypotheses of a text, and the B best finished ones by length-normalised score.

The rules are those of `generate` in transformers, so that results agree: the candidates are the best 2 B (or more, with
several end tokens) continuations of all B beams; an end token finishes a hypothesis only if it ranks among the first B.
"""

from dataclasses import dataclass

import numpy as np

from numflow.decoding.chain import processed
from numflow.decoding.constraints import NEVER, Constraints
from numflow.decoding.sampler import NOT_FINITE
from numflow.decoding.select import largest
from numflow.decoding.settings import Sampling, checked_count
from numflow.errors import NotFiniteError, RequestError, quoted


@dataclass(frozen=True)
class Beams:
    """Settings of a beam search.

    num_beams:      number of hypotheses.
    length_penalty: a finished text's score is the sum of its log-probabilities / length ** length_penalty.
    early_stopping: False: stop when the best unfinished hypothesis, scored at its current length, is no better than the
                    worst of num_beams finished texts; "never": the same, scored at the maximum length where the
                    penalty favours long texts; True: stop as soon as num_beams texts are finished.

    Raises:
        RequestError: a value out of range.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self):
        checked_count("num_beams", self.num_beams, 1)
        if not isinstance(self.length_penalty, (int, float)) or not np.isfinite(self.length_penalty):
            raise RequestError(f"length_penalty should be a number, is {quoted(self.length_penalty)}")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f'early_stopping should be True, False or "never", is {quoted(self.early_stopping)}')


@dataclass(frozen=True)
class Hypothesis:
    """New ids without an end token, and their score: a sum of log-probabilities, length-normalised once finished."""

    ids: tuple[int, ...] = ()
    score: float = 0.0
    ended: bool = False


class BeamSearch:
    """The beams of one request, as ids and scores. The caller keeps a sequence for each running hypothesis.

    running:  hypotheses to run next, best first. finished: the best finished ones, best first. done: no more steps.
    prefix:   the decoder's first ids; the last `forced` of them (a forced first token) count as generated tokens.
    sampling: penalties and bias, applied to the log-probabilities.
    """

    def __init__(self, beams: Beams, constraints: Constraints, prefix, forced: int = 0,
                 sampling: Sampling | None = None):
        self.beams, self.constraints = beams, constraints
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = constraints.max_tokens == 0
        self._prefix, self._forced = [int(id) for id in prefix], forced
        self._sampling = sampling or Sampling()

    @property
    def result(self) -> Hypothesis:
        """The best text."""
        return self.finished[0] if self.finished else Hypothesis()

    def advance(self, logits: np.ndarray) -> list[int]:
        """Take the logits [n, V] of the running hypotheses; returns the index of the parent of each new hypothesis."""
        if not np.isfinite(logits.max(axis=1)).all():  # -inf: a token that is never generated
            raise NotFiniteError(NOT_FINITE)
        new, width = len(self.running[0].ids), self.beams.num_beams
        last, length = new + 1 == self.constraints.max_tokens, new + 1 + self._forced
        scores = np.stack([self._scores(row, hypothesis) for row, hypothesis in zip(logits, self.running)])
        parents: list[int] = []
        running: list[Hypothesis] = []
        for rank, index in enumerate(self._best(scores.ravel())):
            parent, id = divmod(int(index), scores.shape[1])
            ids, score, ended = self.running[parent].ids, float(scores[parent, id]), id in self.constraints.ends
            if (ended or last) and rank < width:
                score /= length**self.beams.length_penalty
                self._finish(Hypothesis(ids if ended else (*ids, id), score, ended))
            elif not (ended or last) and len(running) < width:
                parents.append(parent)
                running.append(Hypothesis((*ids, id), score))
        if not running and not self.finished:
            raise RequestError("no token may come next: the model's files or the request rule out all of them")
        self.running = running
        self.done = not running or self._settled(length)
        return parents

    def _scores(self, logits, hypothesis) -> np.ndarray:
        """Score float64 [V] of the hypothesis continued by each token."""
        shifted = logits.astype(np.float64) - float(logits.max())
        shifted -= np.log(np.exp(shifted).sum())
        before, new = np.array([*self._prefix, *hypothesis.ids], np.int32), len(hypothesis.ids)
        return self.constraints.apply(processed(shifted, before, new, self._sampling), before, new) + hypothesis.score

    def _best(self, scores) -> np.ndarray:
        """Indices of the best allowed continuations, best first; ties: lowest index first."""
        possible = np.flatnonzero(scores > NEVER)
        count = min(len(possible), max(2, 1 + len(self.constraints.ends)) * self.beams.num_beams)
        best = largest(scores, possible, count) if count < len(possible) else possible
        return best[np.argsort(-scores[best], kind="stable")]

    def _finish(self, hypothesis) -> None:
        self.finished = sorted([*self.finished, hypothesis], key=lambda h: -h.score)[:self.beams.num_beams]

    def _settled(self, length) -> bool:
        """Whether the search ends: more steps cannot, or by early_stopping must not, change the result."""
        if len(self.finished) < self.beams.num_beams:
            return False
        if self.beams.early_stopping is True:
            return True
        if self.beams.early_stopping == "never" and self.beams.length_penalty > 0:
            length = self.constraints.max_tokens + self._forced
        return self.running[0].score / length**self.beams.length_penalty <= self.finished[-1].score
