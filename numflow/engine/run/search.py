"""Searches pick the tokens of a text: token by token, or by a beam search. The engine runs their hypotheses.

A search has
    running                  hypotheses to run next; the engine keeps a sequence for each
    done, result             whether the search has ended, and its Hypothesis
    propose(limit)           draft tokens for speculative decoding (see numflow.engine.speculate.draft)
    choices(drafts)          parameters for sampling on a device after the last token and each draft, None if impossible
    advance(rows, drafts)    takes logits float32 [n, V], one row for each running hypothesis (for a single hypothesis
                             also the rows of its drafts), or int32 [n], the tokens picked by `choices`; returns the
                             index of the parent of each new hypothesis
"""

from collections.abc import Sequence

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.request.beam import BeamSearch, Hypothesis
from numflow.engine.request.request import Request
from numflow.engine.speculate.drafters import Drafters


class TokenByToken:
    """Greedy decoding or sampling of one text, with the interface of a BeamSearch with one beam.

    new: ids so far, without an end token. ended: whether an end token was picked. done: whether the text is complete.
    index: index of the sample in the request. drafters: factory of the drafter; None: no speculative decoding.
    """

    def __init__(self, request: Request, index: int = 0, drafters: Drafters | None = None):
        self.new: list[int] = []
        self.ended, self.done = False, request.constraints.max_tokens == 0
        self._constraints, self.sampler = request.constraints, request.sampler(index)
        self._drafter = None if drafters is None else drafters.make(request, self.sampler)

    @property
    def running(self) -> list[Hypothesis]:
        """Hypotheses to run next."""
        return [self.result]

    @property
    def result(self) -> Hypothesis:
        """The hypothesis so far."""
        return Hypothesis(tuple(self.new), 0.0, self.ended or self.sampler.complete)

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter."""
        return self._drafter is not None

    @property
    def needs_streams(self) -> bool:
        """Whether the drafter needs the residual streams of the model."""
        return self._drafter is not None and self._drafter.needs_streams

    def observe(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Pass residual streams to the drafter; see Drafter.observe."""
        if self._drafter is not None:
            self._drafter.observe(start, ids, rows)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` draft tokens."""
        return self._drafter.propose(self.sampler.ids, limit) if self._drafter is not None and limit > 0 else []

    def choices(self, drafts: Sequence[int] = ()) -> list[Choice] | None:
        """Sampling parameters after the last token and after each draft; None if a device cannot sample."""
        drafter = self._drafter
        if drafter is not None and any(drafter.distribution(index) is not None for index in range(len(drafts))):
            return None
        found = [self.sampler.choice(ahead) for ahead in range(1 + len(drafts))]
        return [choice for choice in found if choice is not None] if None not in found else None

    def advance(self, rows: np.ndarray, drafts: Sequence[int] = ()) -> list[int]:
        """Take the logits float32 [1 + len(drafts), V] after the last token and after each draft, or the tokens
        int32 [1 + len(drafts)] that a device has picked there by `choices`."""
        pick = self.sampler.pick if rows.ndim == 2 else self.sampler.picked
        for count, row in enumerate(rows if rows.ndim == 2 else rows.tolist()):
            source = self._drafter.distribution(count) if self._drafter is not None and count < len(drafts) else None
            self.take(pick(row) if source is None else self.sampler.check(row, drafts[count], source))
            if self.done or count == len(drafts) or self.new[-1] != drafts[count]:
                break
        if self._drafter is not None:
            self._drafter.accepted(len(drafts), count)
        return [0]

    def take(self, id: int) -> None:
        """Append the token that the sampler has picked."""
        self.ended = id in self._constraints.ends
        if not self.ended:
            self.new.append(id)
        self.done = self.ended or self.sampler.complete or self.sampler.new == self._constraints.max_tokens

    def close(self) -> None:
        """Close the drafter; the text has ended or was cancelled."""
        if self._drafter is not None:
            self._drafter.close()


Search = TokenByToken | BeamSearch


def searches(request: Request, count: int = 1, drafters: Drafters | None = None) -> list[Search]:
    """Searches of the `count` samples of a request."""
    if request.beams is not None:
        return [BeamSearch(request.beams, request.constraints, request.prefix, request.forced, request.sampling)]
    return [TokenByToken(request, index, drafters) for index in range(count)]
