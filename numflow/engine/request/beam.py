"""Beam search: keeps the best beginnings of a text, and of the finished texts the best by score per length.

The rules are those of the published `generate` of transformers, so that results agree with it: candidates are the
best 2 B (or more, with several end tokens) continuations of all B beams; end tokens count only among the first B.
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

    num_beams:      beginnings that are kept.
    length_penalty: a finished text's score is the sum of its log-probabilities / length ** length_penalty.
    early_stopping: False: stop when the best beam, were it as long as it is now, is no better than the worst of
                    num_beams finished texts; "never": the same, as if it grew to the longest text allowed (where the
                    penalty favours that); True: stop as soon as num_beams texts are finished.

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
    """New ids, without an end token, and their score: a sum of log-probabilities, per length once it is finished."""

    ids: tuple[int, ...] = ()
    score: float = 0.0
    ended: bool = False


class BeamSearch:
    """The beams of one request. Knows numbers only; who runs them keeps a sequence for each.

    running:  hypotheses to run next, best first. finished: the best finished ones, best first. done: no more to run.
    prefix:   the decoder's first ids; the last `counted` of them are part of a text's length (a forced first token).
    sampling: its penalties and bias hold for the log-probabilities.
    """

    def __init__(self, beams: Beams, constraints: Constraints, prefix, counted: int = 0,
                 sampling: Sampling | None = None):
        self.beams, self.constraints = beams, constraints
        self.running = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.done = constraints.max_tokens == 0
        self._prefix, self._counted = [int(id) for id in prefix], counted
        self._sampling = sampling or Sampling()

    @property
    def result(self) -> Hypothesis:
        """The best text."""
        return self.finished[0] if self.finished else Hypothesis()

    def advance(self, logits: np.ndarray) -> list[int]:
        """Take the logits [n, V] of the running hypotheses; returns which of them each new one continues."""
        if not np.isfinite(logits.max(axis=1)).all():  # -inf is a token that never comes
            raise NotFiniteError(NOT_FINITE)
        new, width = len(self.running[0].ids), self.beams.num_beams
        last, length = new + 1 == self.constraints.max_tokens, new + 1 + self._counted
        scores = np.stack([self._scores(row, hypothesis) for row, hypothesis in zip(logits, self.running)])
        parents: list[int] = []
        running: list[Hypothesis] = []
        for rank, at in enumerate(self._best(scores.ravel())):
            parent, id = divmod(int(at), scores.shape[1])
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
        """Log-probability float64 [V] of the hypothesis with each token after it."""
        shifted = logits.astype(np.float64) - float(logits.max())
        shifted -= np.log(np.exp(shifted).sum())
        before, new = np.array([*self._prefix, *hypothesis.ids], np.int32), len(hypothesis.ids)
        return self.constraints.apply(processed(shifted, before, new, self._sampling), before, new) + hypothesis.score

    def _best(self, scores) -> np.ndarray:
        """Indices of the best continuations that may come, best first; of equal ones the lowest."""
        possible = np.flatnonzero(scores > NEVER)
        count = min(len(possible), max(2, 1 + len(self.constraints.ends)) * self.beams.num_beams)
        best = largest(scores, possible, count) if count < len(possible) else possible
        return best[np.argsort(-scores[best], kind="stable")]

    def _finish(self, hypothesis) -> None:
        self.finished = sorted([*self.finished, hypothesis], key=lambda h: -h.score)[:self.beams.num_beams]

    def _settled(self, length) -> bool:
        """Whether going on cannot, or shall not, change the result."""
        if len(self.finished) < self.beams.num_beams:
            return False
        if self.beams.early_stopping is True:
            return True
        if self.beams.early_stopping == "never" and self.beams.length_penalty > 0:
            length = self.constraints.max_tokens + self._counted
        return self.running[0].score / length**self.beams.length_penalty <= self.finished[-1].score
