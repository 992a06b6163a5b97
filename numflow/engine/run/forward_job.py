"""Forward-only requests: an output of the network at every position of a text."""

import threading
from collections.abc import Mapping

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.runner.texts import Text
from numflow.engine.schedule.sequence import NO_ADAPTER, Sequence, SequenceGroup


class ForwardJob:
    """A text whose outputs are wanted; see Job for what the engine asks of it.

    result: float32 [n, width], complete when it is done. rows: positions at most that a step may give.
    """

    def __init__(self, text: Text, output: str, width: int, rows: int, causal: bool):
        self.encoder_ids = text.ids if output == "encoder_hidden" else text.encoder_ids
        self.types = text.types
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.result = np.empty((len(text.ids), width), np.float32)
        ids = [] if output == "encoder_hidden" else text.ids.tolist()
        self.group = SequenceGroup(ids, len(ids), encoder=0 if self.encoder_ids is None else len(self.encoder_ids),
                                   output=output, every_row=rows, whole=not causal, cached=False,
                                   adapter=NO_ADAPTER if text.adapter is None else text.adapter.number)
        self._adapter = text.adapter  # its number is taken as long as somebody has it
        self._filled = 0

    def run(self) -> np.ndarray | None:
        """Tokens of it run in this step; the types of all its tokens."""
        return self.types

    @property
    def finished(self) -> bool:
        """Whether all rows are there."""
        return self._filled == len(self.result)

    def propose(self) -> None:
        """No draft tokens: a forward-only request generates nothing."""

    def take(self, rows: np.ndarray, end: int | None = None) -> None:
        """The rows float32 [n, width] of the positions before `end` (None: the last one's)."""
        self._filled = len(self.result) if end is None else end
        self.result[self._filled - len(rows):self._filled] = rows

    listens = False

    def saw(self, sequence: Sequence, start: int, rows: np.ndarray) -> None:
        """Nothing is drafted."""

    def steps_ahead(self, sequence: Sequence, most: int) -> int:
        """No tokens are picked."""
        return 0

    def choice(self, sequence: Sequence, steps: int) -> Choice:
        """No tokens are picked."""
        raise TypeError("a forward-only request picks no tokens")

    def device_choices(self, sequence: Sequence, drafts) -> None:
        """None: the rows themselves are wanted, no tokens."""

    def advance(self, rows: Mapping[Sequence, tuple], scheduler) -> None:
        """Store this step's rows of the only sequence; a preempted text runs again."""
        (sequence, (found, _)), = rows.items()
        self.take(found, sequence.length)

    def tally(self) -> dict[str, int]:
        """Nothing to count."""
        return {}

    def end(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """It is over."""
        self.error = error
        self.done.set()
