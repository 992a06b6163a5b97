"""The batch of a run in device memory.

One copy from pinned memory brings it: counts i32 [4] (call.py), then the arrays of `ARRAYS` one after the other, each
with room for as many tokens, rows or sequences as there may be. Kernels of a recorded run find the next batch at the
same addresses. The rotary frequencies of sequences where they depend on the length come with it (network.by_length), as
bits, how tokens are drawn (sample.py), and zeros from which rows count the steps that they run in one go.
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
# Array: what it has room for. Tables have a row of `table` block ids for each sequence.
ARRAYS = {"tokens": "tokens", "positions": "tokens", "types": "tokens", "sequence_of": "tokens",
          "logit_rows": "logits", "starts": "starts", "frequencies": "rows", "lengths": "sequences", "blocks": "tables",
          "cross_blocks": "tables", "cross_lengths": "sequences", "slots": "sequences", "adapters": "tokens",
          "wanted_adapters": "logits", "choices": "choices", "draws": "draws", "steps": "logits"}


class BatchMemory:
    """Room for a batch on a device: `capacity` of tokens, logits, sequences, and table (block ids of a sequence).

    frequencies: numbers of a sequence's rotary frequencies. windows: of the network, each with a block table.
    """

    def __init__(self, device: Device, capacity: dict[str, int], frequencies: int = 0, windows: Sequence[int] = ()):
        self.device, self.capacity = device, capacity
        room = {**capacity, "starts": capacity["sequences"] + 1,
                "tables": capacity["sequences"] * capacity["table"], "rows": capacity["sequences"] * frequencies,
                "choices": capacity["logits"] * WORDS, "draws": capacity["logits"] * MOST_STEPS}
        rooms = {name: room[what] for name, what in ARRAYS.items()}
        rooms |= {table_name(window): room["tables"] for window in windows}
        self._begin, at = {}, COUNTS
        for name, numbers in rooms.items():
            self._begin[name] = at
            at += -(-max(numbers, 1) // 4) * 4
        self._memory, self._pinned = device.alloc(4 * at), device.alloc_host(4 * at)
        self._host, self._sent = device.host_array(self._pinned).view(np.int32), None
        self._host[:] = 0
        self._arrays = {name: self._host[begin:begin + rooms[name]] for name, begin in self._begin.items()}
        self._ids = device.alloc_host(4 * capacity["logits"] * MOST_STEPS)
        self._chosen = device.host_array(self._ids).view(np.int32)
        self._send()

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
        return self._arrays[name][:count]

    @property
    def ids(self) -> Ref:
        """Place of the tokens that a device picks: memory of the host."""
        return self._ids.at()

    def chosen(self, count: int) -> np.ndarray:
        """The tokens picked for the first rows, once the device is done."""
        return self._chosen[:count].copy()

    def chosen_by_step(self, steps: int, count: int) -> np.ndarray:
        """The same of steps in one go, int32 [steps, count]."""
        return self._chosen.reshape(-1, MOST_STEPS)[:count, :steps].T.copy()

    @property
    def following(self) -> Following:
        """Place of what a row's next token changes."""
        return Following(self.ids, *map(self.ref, ("draws", "steps", "logit_rows", "tokens", "positions", "sequence_of",
                                                   "lengths")))

    @property
    def stride(self) -> int:
        """Ids from one row of a block table to the next."""
        return self.capacity["table"]

    def free(self) -> None:
        """Give the memory back."""
        for memory in (self._memory, self._pinned, self._ids):
            self.device.free(memory)

    def load(self, arrays: dict[str, np.ndarray], counts: tuple[int, ...]) -> None:
        """Bring a batch to the device."""
        self.device.until(self._sent)
        pack_into(f"{len(counts)}i", self._host, 0, *counts)
        for name, array in arrays.items():
            if not array.size:
                continue
            if array.ndim == 1:
                self._arrays[name][:array.size] = array
            else:
                self._arrays[name].reshape(-1, self.stride)[:len(array), :array.shape[1]] = array
        self._send()

    def _send(self) -> None:
        self.device.copy(self._memory.at(), self._pinned.at(), self._pinned.nbytes)
        self._sent = self.device.mark(self._sent)
