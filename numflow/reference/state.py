"""Memory of recurrent steps: an array per sequence."""

import numpy as np

from numflow.network.windows import STATE


class StateMemory:
    """`array` f32 [slots, *shape]: the states of a step; the batch has the slot of each sequence."""

    window = STATE

    def __init__(self, state):
        self.shape = state
        self.array = np.zeros((0, *state.shape), np.float32)

    @property
    def blocks(self):
        """Slots that are reserved."""
        return len(self.array)

    @property
    def nbytes(self):
        """Bytes reserved."""
        return self.array.nbytes

    @property
    def block_bytes(self):
        """Bytes of one slot."""
        return 4 * self.shape.size

    def resize(self, slots):
        """Reserve `slots` slots; slots that remain keep their content. Returns whether steps must be bound again."""
        new = np.zeros((slots, *self.shape.shape), np.float32)
        count = min(slots, len(self.array))
        new[:count] = self.array[:count]
        self.array = new
        return False

    def copy(self, sources, targets):
        """Copy slots."""
        self.array[targets] = self.array[sources]

    def save(self, slots):
        """Content of slots, uint8 [n, block_bytes]."""
        return self.array[slots].reshape(len(slots), self.shape.size).view(np.uint8)

    def load(self, slots, data):
        """Restore the content that `save` returned."""
        self.array[slots] = np.ascontiguousarray(data).view(np.float32).reshape(-1, *self.shape.shape)


def sequences(batch, *memories):
    """(rows, states) of each sequence with rows in the batch: a slice, and the sequence's array of each memory, to be
    updated in place; zeros at position 0."""
    slots = range(len(batch.starts) - 1) if batch.slots is None else batch.slots
    for slot, start, end in zip(slots, batch.starts[:-1], batch.starts[1:], strict=True):
        if start == end:
            continue
        states = [memory.array[slot] for memory in memories]
        if batch.positions[start] == 0:
            for state in states:
                state[...] = 0
        yield slice(start, end), states
