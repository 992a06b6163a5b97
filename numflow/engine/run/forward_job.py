"""Forward-only requests: an output of the network at every position of a text."""

import threading
from collections.abc import Mapping

import numpy as np

from numflow.decoding.choice import Choice
from numflow.engine.request.adapter import text_adapter
from numflow.engine.runner.texts import Text
from numflow.engine.schedule.sequence import Sequence, SequenceGroup


class ForwardJob:
    """A text that is run forward only; it has the interface of Job.

    result: float32 [n, width], complete when `done` is set. rows: maximum number of output rows in a step.
    """

    def __init__(self, text: Text, output: str, width: int, rows: int, causal: bool):
        self.encoder_ids = text.ids if output == "encoder_hidden" else text.encoder_ids
        self.types = text.types
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.result = np.empty((len(text.ids), width), np.float32)
        ids = [] if output == "encoder_hidden" else text.ids.tolist()
        adapter = text_adapter(text.adapter, ids)
        self.group = SequenceGroup(ids, len(ids), encoder=0 if self.encoder_ids is None else len(self.encoder_ids),
                                   output=output, every_row=rows, whole=not causal, cached=False,
                                   adapter=adapter.number, adapter_start=adapter.start)
        self._adapter = text.adapter  # the reference keeps the adapter's number in use
        self._filled = 0

    def run(self) -> np.ndarray | None:
        """Note that tokens run in this step; returns the token types of all tokens."""
        return self.types

    @property
    def finished(self) -> bool:
        """Whether all rows are stored."""
        return self._filled == len(self.result)

    def propose(self) -> None:
        """Do nothing: there are no draft tokens."""

    def take(self, rows: np.ndarray, end: int | None = None) -> None:
        """Store the rows float32 [n, width] of the last positions before `end` (None: before the end of the text)."""
        self._filled = len(self.result) if end is None else end
        self.result[self._filled - len(rows):self._filled] = rows

    needs_streams = False

    def observe(self, sequence: Sequence, start: int, rows: np.ndarray) -> None:
        """Do nothing: there is no drafter."""

    def steps_ahead(self, sequence: Sequence, most: int) -> int:
        """0: no tokens are picked."""
        return 0

    def choice(self, sequence: Sequence, steps: int) -> Choice:
        """Raise TypeError: no tokens are picked."""
        raise TypeError("a forward-only request picks no tokens")

    def device_choices(self, sequence: Sequence, drafts) -> None:
        """None: the rows are read, not tokens."""

    def advance(self, rows: Mapping[Sequence, tuple], scheduler) -> None:
        """Store the rows of the only sequence in this step; a preempted text runs again."""
        (sequence, (found, _)), = rows.items()
        self.take(found, sequence.length)

    def tally(self) -> dict[str, int]:
        """Nothing to count."""
        return {}

    def end(self, reason: str | None = None, error: BaseException | None = None) -> None:
        """End the job and wake waiting threads."""
        self.error = error
        self.done.set()
