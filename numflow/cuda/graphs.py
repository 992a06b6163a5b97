"""Decode steps as recorded graphs: one driver call for all kernels of a token.

A graph is made for a bucket of sizes, powers of two, and serves every batch that fits: kernels read on the device how
many rows there are. The first run of a bucket launches its kernels one by one, which compiles and loads them; the
second records. Graphs hold addresses, so they are forgotten whenever memory moves.
"""

from collections.abc import Hashable
from typing import Any

from numflow.cuda.device.call import N_LOGIT_ROWS, N_SEQUENCES, N_TOKENS, Call, Sizes
from numflow.cuda.device.device import Device

MOST_ROWS = 256    # tokens of a batch that is worth a graph
FEWEST_KEYS = 128  # buckets of keys begin here: as many as attention leaves in one part


class Graphs:
    """The graphs of a program, by bucket and by what runs."""

    def __init__(self, device: Device):
        self._device = device
        self._graphs: dict[Hashable, Any] = {}

    def run(self, what: Hashable, calls: list[Call], sizes: Sizes) -> None:
        """Run the calls at these (rounded) sizes: eagerly, recorded or replayed."""
        key = what, sizes
        if key not in self._graphs:
            self._graphs[key] = None
            for call in calls:
                for work in call.launches(sizes):
                    self._device.launch(work)
            return
        if self._graphs[key] is None:
            self._graphs[key] = self._device.record([work for call in calls for work in call.launches(sizes)])
        self._device.replay(self._graphs[key])

    def clear(self) -> None:
        """Forget all of them."""
        for graph in self._graphs.values():
            if graph is not None:
                self._device.drop(graph)
        self._graphs = {}


def is_decode(sizes: Sizes) -> bool:
    """Whether every sequence has one token."""
    return sizes.rows[N_TOKENS] == sizes.rows[N_SEQUENCES] <= MOST_ROWS


def rounded(sizes: Sizes, routes: int) -> Sizes:
    """The bucket of these sizes."""
    tokens = _power(sizes.rows[N_TOKENS])
    logits = min(_power(sizes.rows[N_LOGIT_ROWS]), tokens) if sizes.rows[N_LOGIT_ROWS] else 0
    return Sizes((tokens, logits, tokens * routes, tokens), max(_power(sizes.keys), FEWEST_KEYS))


def _power(n: int) -> int:
    """The power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
