"""Paged key/value cache of one attention (op `cache_write`)."""

import numpy as np

from numflow.network.windows import first_key
from numflow.quant.kv import stored


class KVCache:
    """K f32 [n_blocks, block_size, G, E] and V f32 [n_blocks, block_size, G, E_v].

    Token p of a sequence is in block `table[p // block_size]` at index `p % block_size`. Rows are rounded to their type
    (kv_k, kv_v; quant/kv.py). If values are a prefix of keys, V has no columns. A cache of entries, one for `every`
    tokens, is float32, and a block has a row per entry.
    """

    def __init__(self, cache, block_size, kv_k="f32", kv_v="f32", window=0):
        self.shape, self.kv_k, self.kv_v, self.window = cache, kv_k, kv_v, window
        self.prefix, self.value_dim = cache.prefix, cache.value_dim
        self.block_size = block_size
        self.every = max(cache.every, 1)
        block_rows = -(-block_size // self.every)
        if cache.every:
            self.kv_k = self.kv_v = "f32"
        self.k = np.zeros((0, block_rows, cache.kv_heads, cache.k_dim), np.float32)
        self.v = np.zeros((0, block_rows, cache.kv_heads, cache.v_dim), np.float32)

    def resize(self, blocks):
        """Reserve `blocks` blocks; blocks that remain keep their content. Returns whether steps must be bound again."""
        self.k, self.v = (_resized(a, blocks) for a in (self.k, self.v))
        return False

    @property
    def blocks(self):
        """Blocks that are reserved."""
        return len(self.k)

    @property
    def nbytes(self):
        """Bytes reserved."""
        return self.k.nbytes + self.v.nbytes

    @property
    def block_bytes(self):
        """Bytes of one block, K and V."""
        return sum(4 * int(np.prod(a.shape[1:])) for a in (self.k, self.v))

    def copy(self, sources, targets):
        """Copy blocks."""
        for a in (self.k, self.v):
            a[targets] = a[sources]

    def save(self, blocks):
        """Content of blocks, uint8 [n, block_bytes]."""
        rows = [a[blocks].reshape(len(blocks), int(np.prod(a.shape[1:]))) for a in (self.k, self.v)]
        return np.concatenate(rows, 1).view(np.uint8)

    def load(self, blocks, data):
        """Restore the content that `save` returned."""
        values = np.ascontiguousarray(data).view(np.float32)
        k, v = np.split(values, [int(np.prod(self.k.shape[1:]))], axis=1)
        self.k[blocks] = k.reshape(len(blocks), *self.k.shape[1:])
        self.v[blocks] = v.reshape(len(blocks), *self.v.shape[1:])

    def table(self, batch):
        """Block ids [B, M] of each sequence in this cache."""
        if self.shape.kind == "cross":
            return batch.cross_blocks
        return batch.blocks if batch.windows is None else batch.windows.get(self.window, batch.blocks)

    def lengths(self, batch):
        """Number of cached tokens of each sequence [B], those of the batch included."""
        if self.shape.kind == "cross":
            return batch.cross_lengths
        return [batch.positions[end - 1] + 1 if end > start else 0
                for start, end in zip(batch.starts[:-1], batch.starts[1:], strict=True)]

    def read(self, blocks, length, position=0):
        """K [length, G, E] and V [length, G, E_v] of a sequence with these blocks.

        Blocks before the window of a query at `position` are not read; their rows are zeros.
        """
        skipped = first_key(self.window, position) // self.block_size
        used = blocks[skipped: -(-length // self.block_size)]
        k, v = (np.concatenate([np.zeros((skipped * self.block_size, *a.shape[2:]), a.dtype),
                                a[used].reshape(len(used) * self.block_size, *a.shape[2:])])[:length]
                for a in (self.k, self.v))
        return k, k[..., :self.prefix] if self.prefix else v

    def entries(self, blocks, length):
        """Entries [n, E] of the complete windows of a sequence of `length` tokens."""
        last = np.arange(1, length // self.every + 1) * self.every - 1
        return self.k[blocks[last // self.block_size], last % self.block_size // self.every, 0]


def cache_write(k, v=None, *, batch, cache):
    """Store k [T, G * E] and v [T, G * E_v] of each token at its position; no v if values are a prefix of keys. A cache
    of entries stores the rows of tokens that end a window."""
    table = cache.table(batch)
    for b, (start, end) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        rows = np.arange(start, end)
        rows = rows[(batch.positions[rows] + 1) % cache.every == 0]
        position = batch.positions[rows]
        block, index = table[b, position // cache.block_size], position % cache.block_size // cache.every
        cache.k[block, index] = stored(k[rows].reshape(-1, *cache.k.shape[2:]), cache.kv_k)
        if v is not None:
            cache.v[block, index] = stored(v[rows].reshape(-1, *cache.v.shape[2:]), cache.kv_v)


def _resized(old, blocks):
    new = np.zeros((blocks, *old.shape[1:]), old.dtype)
    count = min(blocks, len(old))
    new[:count] = old[:count]
    return new
