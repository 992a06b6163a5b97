"""Memory of recurrent steps: an array for each sequence."""

import numpy as np

from numflow.network.windows import STATE


class StateMemory:
    """`array` f32 [slots, *shape]: the state of a step, of every sequence in the slot that the batch names."""

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
        """Hold `slots` slots; the content of those that remain is kept. Returns whether somebody must know."""
        new = np.zeros((slots, *self.shape.shape), np.float32)
        kept = min(slots, len(self.array))
        new[:kept] = self.array[:kept]
        self.array = new
        return False

    def copy(self, sources, targets):
        """Copy slots."""
        self.array[targets] = self.array[sources]

    def save(self, slots):
        """Content of slots, uint8 [n, block_bytes]."""
        return self.array[slots].reshape(len(slots), self.shape.size).view(np.uint8)

    def load(self, slots, data):
        """Put back what `save` returned."""
        self.array[slots] = np.ascontiguousarray(data).view(np.float32).reshape(-1, *self.shape.shape)


def sequences(batch, *memories):
    """(rows, states) of each sequence with rows in the batch: a slice, and of each memory the sequence's array, to be
    read and written in place; zeros where the text begins."""
    slots = range(len(batch.starts) - 1) if batch.slots is None else batch.slots
    for slot, start, end in zip(slots, batch.starts[:-1], batch.starts[1:], strict=True):
        if start == end:
            continue
        states = [memory.array[slot] for memory in memories]
        if batch.positions[start] == 0:
            for state in states:
                state[...] = 0
        yield slice(start, end), states
