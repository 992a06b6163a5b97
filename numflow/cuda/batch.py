"""The batch of a run in device memory.

One upload brings it: counts i32 [4] (call.py), then the arrays of `ARRAYS` one after the other, each with room for as
many tokens, rows or sequences as there may be. Kernels of a recorded run find the next batch at the same addresses.
The rotary frequencies of sequences where they depend on the length come with it (network.by_length), as bits.
"""

from collections.abc import Sequence

import numpy as np

from numflow.cuda.device.device import Device, Ref
from numflow.cuda.lang.parameters import Places, Texts
from numflow.network.windows import table_name

COUNTS = 16  # i32, of which the first 4 are used
# Array: what it has room for. Tables have a row of `table` block ids for each sequence.
ARRAYS = {"tokens": "tokens", "positions": "tokens", "types": "tokens", "sequence_of": "tokens",
          "logit_rows": "logits", "starts": "starts", "frequencies": "rows", "lengths": "sequences", "blocks": "tables",
          "cross_blocks": "tables", "cross_lengths": "sequences", "slots": "sequences", "adapters": "tokens",
          "wanted_adapters": "logits"}


def longest_table(arrays: dict[str, np.ndarray]) -> int:
    """Block ids of a sequence in the widest of a batch's tables."""
    return max(array.shape[1] for array in arrays.values() if array.ndim == 2)


class BatchMemory:
    """Room for a batch on a device: `capacity` of tokens, logits, sequences, and table (block ids of a sequence).

    frequencies: numbers of a sequence's rotary frequencies. windows: of the network, each with a block table.
    """

    def __init__(self, device: Device, capacity: dict[str, int], frequencies: int = 0, windows: Sequence[int] = ()):
        self.device, self.capacity = device, capacity
        room = {**capacity, "starts": capacity["sequences"] + 1,
                "tables": capacity["sequences"] * capacity["table"], "rows": capacity["sequences"] * frequencies}
        self._begin, at = {}, COUNTS
        for name, what in (ARRAYS | {table_name(window): "tables" for window in windows}).items():
            self._begin[name] = at
            at += -(-max(room[what], 1) // 4) * 4
        self._host = np.zeros(at, np.int32)
        self._memory = device.alloc(at * 4)
        device.upload(self._memory.at(), self._host)

    @property
    def counts(self) -> Ref:
        """Place of the numbers of rows of each kind, for kernels."""
        return self._memory.at()

    def ref(self, name: str) -> Ref:
        """Begin of an array of ARRAYS."""
        return self._memory.at(4 * self._begin[name])

    def places(self, table: str, field: int) -> Places:
        """Place of the rows that a field counts in the cache of a block table."""
        return Places(positions=self.ref("positions"), sequence_of=self.ref("sequence_of"), table=self.ref(table),
                      table_stride=self.stride, counts=self.counts, field=field)

    @property
    def texts(self) -> Texts:
        """The sequences, for recurrent steps."""
        return Texts(self.ref("starts"), self.ref("positions"), self.ref("slots"), self.counts)

    def host(self, name: str, count: int) -> np.ndarray:
        """The first numbers of an array of the batch, as they were brought."""
        return self._host[self._begin[name]:self._begin[name] + count]

    @property
    def stride(self) -> int:
        """Ids from one row of a block table to the next."""
        return self.capacity["table"]

    def free(self) -> None:
        """Give the memory back."""
        self.device.free(self._memory)

    def fits(self, arrays: dict[str, np.ndarray]) -> bool:
        """Whether there is room for these arrays."""
        have = self.capacity
        return (arrays["tokens"].size <= have["tokens"] and arrays["logit_rows"].size <= have["logits"]
                and arrays["lengths"].size <= have["sequences"]
                and longest_table(arrays) <= have["table"])

    def load(self, arrays: dict[str, np.ndarray], counts: tuple[int, ...]) -> None:
        """Bring a batch to the device."""
        self._host[:len(counts)] = counts
        for name, begin in self._begin.items():
            if (array := arrays.get(name)) is None:  # the table of a window that no step of this entry has
                continue
            if array.ndim == 2:
                rows = self._host[begin:begin + len(array) * self.stride].reshape(len(array), self.stride)
                rows[:, :array.shape[1]] = array
            else:
                self._host[begin:begin + array.size] = array
        self.device.upload(self._memory.at(), self._host)
