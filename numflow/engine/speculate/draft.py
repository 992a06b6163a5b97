"""Interface of drafters, and speculative decoding in the engine.

A step runs, for one sequence, the last token and k draft tokens, and reads the logits of all k + 1 rows. Row i gives
the token after the first i drafts, so one step gives several tokens as long as the picked tokens agree with the drafts:

    drafts = search.propose(limit)             # k <= limit draft tokens; may be []
    ... the engine runs the drafts after the last token: logits float32 [k + 1, V] ...
    search.advance(logits, drafts)             # picks tokens until one differs from its draft: 1 .. k + 1 new tokens
    ... the engine drops the keys and values of rejected drafts ...

The scheduler may run fewer drafts than were proposed (little memory, many requests): `advance` gets the drafts that
ran. A `Drafter` belongs to one sample of one request. `search.TokenByToken` calls it and reports the accepted drafts.
Picking row by row with the sampler's random numbers, as TokenByToken does, gives exactly the tokens without drafts. If
the drafter knows the distribution of its drafts, rejection sampling may accept more of them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from numflow.decoding.speculative import Distribution


class Drafter(Protocol):
    """Source of draft tokens for one text. needs_streams: whether `observe` gets the residual streams of the model."""

    needs_streams: bool

    def propose(self, ids: Sequence[int] | np.ndarray, limit: int) -> list[int]:
        """At most `limit` draft tokens after `ids` (prompt and new tokens); may be empty."""

    def distribution(self, index: int) -> Distribution | None:
        """Distribution that draft `index` of the latest proposal was sampled from; None: compare with the sampler."""

    def observe(self, start: int, ids: Sequence[int], rows: np.ndarray) -> None:
        """Take the residual streams (Network.outputs) of a step, float32 [n, W], if `needs_streams`. The rows belong to
        the text's `ids` from `start` on, and to drafts after them."""

    def accepted(self, proposed: int, accepted: int) -> None:
        """Note that `accepted` of `proposed` drafts that ran (maybe 0) were accepted; the drafter may adapt."""

    def close(self) -> None:
        """Free the drafter; the text has ended."""
