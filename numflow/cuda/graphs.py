"""Decode steps as CUDA graphs: one driver call launches all kernels of a token.

A graph is recorded for a bucket of sizes, rounded up to powers of two, and serves every batch that fits: kernels read
the actual number of rows on the device. The first run of a bucket launches its kernels one by one, which compiles and
loads them; the second run records the graph. Graphs contain addresses, so they are discarded whenever memory moves.
"""

from collections.abc import Hashable
from typing import Any

from numflow.cuda.device.call import N_LOGIT_ROWS, N_SEQUENCES, N_TOKENS, Call, Sizes
from numflow.cuda.device.device import Device

MOST_ROWS = 256    # largest batch, in tokens, that is recorded
FEWEST_KEYS = 128  # smallest bucket of keys: up to this many, attention does not split the keys


class Graphs:
    """The graphs of a program, by the calls that they record and by bucket."""

    def __init__(self, device: Device):
        self._device = device
        self._graphs: dict[Hashable, Any] = {}

    def run(self, name: Hashable, calls: list[Call], sizes: Sizes) -> None:
        """Run the calls at these rounded sizes: launch them one by one, or record and replay. name: of the calls."""
        key = name, sizes
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
        """Discard all graphs."""
        for graph in self._graphs.values():
            if graph is not None:
                self._device.drop(graph)
        self._graphs = {}


def is_decode(sizes: Sizes) -> bool:
    """Whether every sequence has exactly one token."""
    return sizes.rows[N_TOKENS] == sizes.rows[N_SEQUENCES] <= MOST_ROWS


def rounded(sizes: Sizes, routes: int) -> Sizes:
    """The bucket of these sizes: each rounded up to a power of two."""
    tokens = _power(sizes.rows[N_TOKENS])
    logits = min(_power(sizes.rows[N_LOGIT_ROWS]), tokens) if sizes.rows[N_LOGIT_ROWS] else 0
    return Sizes((tokens, logits, tokens * routes, tokens), max(_power(sizes.keys), FEWEST_KEYS))


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
