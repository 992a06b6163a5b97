"""Searches pick the tokens of a text: one after the other, or by a beam search. The engine runs them only.

A search has
    running                  hypotheses whose next token is wanted; the engine keeps a sequence for each
    done, result             whether there is no more to run, and the Hypothesis that was found
    propose(limit)           tokens that may come next, for speculation (see numflow.engine.speculate.draft)
    choices(drafts)          how a device can pick the tokens behind the last one and the drafts, None if it cannot
    advance(rows, drafts)    takes float32 [n, V], a row of logits for each running hypothesis (or, of one, the rows of
                             its drafts too), or int32 [n], the tokens picked by `choices`; returns for each new
                             hypothesis which of the old ones it continues
"""

from collections.abc import Sequence

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.request.beam import BeamSearch, Hypothesis
from numflow.engine.request.request import Request
from numflow.engine.speculate.drafters import Drafters


class TokenByToken:
    """Picks one token after the other, greedily or at random: a BeamSearch with one beam that ends at an end token.

    new: ids so far, without an end token. ended: whether one came. done: whether there is no more to pick.
    index: which of a request's samples this is. drafters: make what proposes tokens; None: nothing does.
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
        """The hypothesis as far as generated."""
        return Hypothesis(tuple(self.new), 0.0, self.ended or self.sampler.complete)

    @property
    def drafts(self) -> bool:
        """Whether it has a drafter."""
        return self._drafter is not None

    @property
    def listens(self) -> bool:
        """Whether its drafter wants to be told of the model's streams."""
        return self._drafter is not None and self._drafter.listens

    def saw(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Tell the drafter; see Drafter.saw."""
        if self._drafter is not None:
            self._drafter.saw(start, ids, rows)

    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next."""
        return self._drafter.propose(self.sampler.ids, limit) if self._drafter is not None and limit > 0 else []

    def choices(self, drafts: Sequence[int] = ()) -> list[Choice] | None:
        """Draws behind the last token and behind each draft; None if a device cannot draw."""
        if self._drafter is not None and any(self._drafter.drawn_from(at) is not None for at in range(len(drafts))):
            return None
        found = [self.sampler.choice(ahead) for ahead in range(1 + len(drafts))]
        return [one for one in found if one is not None] if None not in found else None

    def advance(self, rows: np.ndarray, drafts: Sequence[int] = ()) -> list[int]:
        """Take the logits float32 [1 + len(drafts), V] behind the last token and behind each draft, or the tokens
        int32 [1 + len(drafts)] that a device has picked there by `choices`."""
        pick = self.sampler.pick if rows.ndim == 2 else self.sampler.picked
        for count, row in enumerate(rows if rows.ndim == 2 else rows.tolist()):
            source = self._drafter.drawn_from(count) if self._drafter is not None and count < len(drafts) else None
            self.take(pick(row) if source is None else self.sampler.check(row, drafts[count], source))
            if self.done or count == len(drafts) or self.new[-1] != drafts[count]:
                break
        if self._drafter is not None:
            self._drafter.accepted(len(drafts), count)
        return [0]

    def take(self, id: int) -> None:
        """The sampler has picked `id`."""
        self.ended = id in self._constraints.ends
        if not self.ended:
            self.new.append(id)
        self.done = self.ended or self.sampler.complete or self.sampler.new == self._constraints.max_tokens

    def close(self) -> None:
        """The text has ended, or is wanted no more."""
        if self._drafter is not None:
            self._drafter.close()


Search = TokenByToken | BeamSearch


def searches(request: Request, count: int = 1, drafters: Drafters | None = None) -> list[Search]:
    """The searches of `count` samples of a request."""
    if request.beams is not None:
        return [BeamSearch(request.beams, request.constraints, request.prefix, request.counted, request.sampling)]
    return [TokenByToken(request, index, drafters) for index in range(count)]
