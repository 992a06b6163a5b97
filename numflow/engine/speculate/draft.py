"""Speculative decoding as the engine sees it: who proposes tokens, and who decides which of them stay.

A step of the engine runs, for one sequence, the last known token and k proposed ones, and wants the logits of all
k + 1 rows. Row i says what comes after the first i proposals, so as long as the tokens that are picked agree with
them, one step gives several tokens:

    drafts = search.propose(limit)             # k <= limit ids that may come next; [] when there is nothing to guess
    ... the engine runs them behind the last token: logits float32 [k + 1, V] ...
    search.advance(logits, drafts)             # picks tokens until one differs from its draft: 1 .. k + 1 new ones
    ... the engine forgets the keys and values of the drafts that were not picked ...

The scheduler may run fewer drafts than were proposed (little room, many requests): `advance` gets those that ran.
A `Drafter` belongs to one sample of one request; `search.TokenByToken` asks it and tells it what became of them.
Picking row by row with the sampler's own random numbers, as TokenByToken does by itself, gives exactly the tokens that
come without drafts. A drafter that knows the probabilities its tokens were drawn with may let more of them pass.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from numflow.decoding.speculative import Distribution


class Drafter(Protocol):
    """Proposes the tokens of one text. listens: whether it is told of the streams of the model that runs the text."""

    listens: bool

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """At most `limit` tokens that may follow `ids` (prompt and new ones); may be empty."""

    def drawn_from(self, place: int) -> Distribution | None:
        """Distribution that the latest proposal at `place` was drawn from; None: compare it with the sampler's pick."""

    def saw(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Of the text's `ids`, and drafts behind them, those from `start` on have run; rows float32 [n, W] are the
        streams of the model that runs them (Network.outputs), where `listens`."""

    def accepted(self, proposed: int, accepted: int) -> None:
        """Of so many proposals that ran (0 as well), so many were right: a drafter may adapt how many it makes."""

    def close(self) -> None:
        """The text has ended."""
