"""The batch of a run in device memory.

A single copy from pinned memory transfers it: counts i32 [4] (call.py), then the arrays of `ARRAYS`, each allocated for
the largest number of tokens, rows or sequences. The addresses stay the same, so that the kernels of a CUDA graph read
the next batch there. The arrays include the rotary frequencies of each sequence if they depend on its length
(network.by_length), as float bits; the sampling settings (sample.py); and for each row a counter of decode steps,
initially zero.
"""

from collections.abc import Sequence
from struct import pack_into

import numpy as np

from numflow.cuda.device.device import Device, Ref
from numflow.cuda.lang.parameters import Following, Places, Texts
from numflow.decoding.choice import WORDS
from numflow.executor.contract import MOST_STEPS
from numflow.network.windows import table_name

COUNTS = 16  # i32, of which the first 4 are used
# Array: the capacity that it is allocated for. Tables have a row of `table` block ids for each sequence.
ARRAYS = {"tokens": "tokens", "positions": "tokens", "types": "tokens", "sequence_of": "tokens",
          "logit_rows": "logits", "starts": "starts", "frequencies": "rows", "lengths": "sequences", "blocks": "tables",
          "cross_blocks": "tables", "cross_lengths": "sequences", "slots": "sequences", "adapters": "tokens",
          "wanted_adapters": "logits", "choices": "choices", "draws": "draws", "steps": "logits"}


class BatchMemory:
    """Memory for a batch on a device. capacity: of tokens, logits, sequences, and table (block ids of a sequence).

    frequencies: rotary frequencies of a sequence, if they depend on its length. windows: sliding windows of the
    network; each has a block table.
    """

    def __init__(self, device: Device, capacity: dict[str, int], frequencies: int = 0, windows: Sequence[int] = ()):
        self.device, self.capacity = device, capacity
        limits = {**capacity, "starts": capacity["sequences"] + 1,
                "tables": capacity["sequences"] * capacity["table"], "rows": capacity["sequences"] * frequencies,
                "choices": capacity["logits"] * WORDS, "draws": capacity["logits"] * MOST_STEPS}
        sizes = {name: limits[kind] for name, kind in ARRAYS.items()}
        sizes |= {table_name(window): limits["tables"] for window in windows}
        self._begin, offset = {}, COUNTS
        for name, size in sizes.items():
            self._begin[name] = offset
            offset += -(-max(size, 1) // 4) * 4
        self._memory, self._pinned = device.alloc(4 * offset), device.alloc_host(4 * offset)
        self._host, self._sent = device.host_array(self._pinned).view(np.int32), None
        self._host[:] = 0
        self._arrays = {name: self._host[begin:begin + sizes[name]] for name, begin in self._begin.items()}
        self._ids = device.alloc_host(4 * capacity["logits"] * MOST_STEPS)
        self._chosen = device.host_array(self._ids).view(np.int32)
        self._send()

    @property
    def counts(self) -> Ref:
        """Address of the row counts (call.py), which kernels read."""
        return self._memory.at()

    def ref(self, name: str) -> Ref:
        """Address of an array of ARRAYS."""
        return self._memory.at(4 * self._begin[name])

    def places(self, table: str, field: int) -> Places:
        """Locations, in a KV cache with this block table, of the rows that counts[field] counts."""
        return Places(positions=self.ref("positions"), sequence_of=self.ref("sequence_of"), table=self.ref(table),
                      table_stride=self.stride, counts=self.counts, field=field)

    @property
    def texts(self) -> Texts:
        """The sequences, for recurrent steps."""
        return Texts(self.ref("starts"), self.ref("positions"), self.ref("slots"), self.counts)

    def host(self, name: str, count: int) -> np.ndarray:
        """The first `count` elements of an array, as last sent to the device."""
        return self._arrays[name][:count]

    @property
    def ids(self) -> Ref:
        """Address of the sampled tokens, in pinned host memory."""
        return self._ids.at()

    def chosen(self, count: int) -> np.ndarray:
        """The tokens sampled for the first `count` rows. The caller synchronises with the device first."""
        self._is_sending = False
        return self._chosen[:count].copy()

    def chosen_by_step(self, steps: int, count: int) -> np.ndarray:
        """The tokens of several decode steps, int32 [steps, count]."""
        return self._chosen.reshape(-1, MOST_STEPS)[:count, :steps].T.copy()

    @property
    def following(self) -> Following:
        """Addresses of all arrays that change when a row gets its next token."""
        return Following(self.ids, *map(self.ref, ("draws", "steps", "logit_rows", "tokens", "positions", "sequence_of",
                                                   "lengths")))

    @property
    def stride(self) -> int:
        """Block ids from one row of a block table to the next."""
        return self.capacity["table"]

    def free(self) -> None:
        """Free the memory."""
        for memory in (self._memory, self._pinned, self._ids):
            self.device.free(memory)

    def load(self, arrays: dict[str, np.ndarray], counts: tuple[int, ...]) -> None:
        """Send a batch to the device, without the limits, which no kernel reads."""
        if self._is_sending:
            self.device.until(self._sent)
        pack_into(f"{len(counts)}i", self._host, 0, *counts)
        for name, array in arrays.items():
            if not array.size or name == "limits":
                continue
            if array.ndim == 1:
                self._arrays[name][:array.size] = array
            else:
                self._arrays[name].reshape(-1, self.stride)[:len(array), :array.shape[1]] = array
        self._send()

    def _send(self) -> None:
        self.device.copy(self._memory.at(), self._pinned.at(), self._pinned.nbytes)
        self._sent, self._is_sending = self.device.mark(self._sent), True
