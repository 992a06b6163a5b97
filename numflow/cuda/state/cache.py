"""Paged key/value memory of one attention on a device.

Token p of a sequence lies in block table[p // block_size] at place p % block_size; a block holds a region for each head
of K, and in other memory one for each of V, in the type that each has: cache_code.py says what a region is. Where
values are a prefix of keys there is no V, and its rows are those of K. Entries, one for `every` tokens, are rows of
float32, one after the other, as many in a block as windows may end there: each at the place of its last token divided
by `every`.
"""

import numpy as np

from numflow.cuda.device.device import Device, Memory, Ref, within_reach
from numflow.cuda.state.cache_code import region_bytes
from numflow.errors import RequestError
from numflow.network.windows import table_name
from numflow.ops import Cache

LEAST = 256  # bytes of memory, where there is nothing to keep yet
TILE = 64  # keys that attention works on at a time: they must lie in one block


class KVCache:
    """Memory of `cache` for blocks of `block_size` tokens; K and V each in their own type. sizes: bytes of a block.

    window: of the attention that reads it, 0: the whole text. block_rows: rows of a block, fewer of entries.
    host: in pinned memory of the host, which kernels reach over the bus. While steps are bound, such a cache has a
    `room` on the device, to which what a batch reads is copied (cache_host.py): keys and values, or None.
    """

    def __init__(self, device: Device, cache: Cache, block_size: int, kv_k: str, kv_v: str, host: bool = False,
                 window: int = 0):
        self.device, self.shape, self.block_size, self.blocks = device, cache, block_size, 0
        self.types = ("f32", "f32") if cache.every else (kv_k, kv_k if cache.prefix else kv_v)
        self.window, self.block_rows = window, -(-block_size // max(cache.every, 1))
        self.host, self.room = host, None
        if block_size < TILE or block_size % TILE:
            raise RequestError(f"block_size should be a multiple of {TILE}, is {block_size}")
        self.sizes = tuple(cache.kv_heads * region_bytes(kind, size, self.block_rows)
                            for size, kind in zip((cache.k_dim, cache.v_dim), self.types))
        self.v_row = cache.k_dim if cache.prefix else cache.v_dim  # columns of the row that a value begins
        self._memory = [None, None]
        self._alloc = device.alloc_host if host else device.alloc

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.blocks * self.block_bytes

    @property
    def kept(self) -> tuple[Ref, Ref]:
        """Places of the kept K and V; the memory moves when the cache is resized."""
        return self._memory[0].at(), self._memory[1].at()

    @property
    def k(self) -> Ref:
        """Place of K for attention."""
        return (self.room or self.kept)[0]

    @property
    def v(self) -> Ref:
        """Place of V for attention."""
        return (self.room or self.kept)[0 if self.shape.prefix else 1]

    @property
    def places(self) -> list[tuple[Ref, Ref]]:
        """Places at which new K and V are stored."""
        return [self.kept] if self.room is None else [self.room, self.kept]

    @property
    def table(self) -> str:
        """Name of its block table in the batch."""
        return "cross_blocks" if self.shape.kind == "cross" else table_name(self.window)

    @property
    def lengths(self) -> str:
        """Name of the number of its keys in the batch."""
        return "cross_lengths" if self.shape.kind == "cross" else "lengths"

    def resize(self, blocks: int) -> bool:
        """Hold `blocks` blocks; the content of those that remain is kept. Says whether the memory has moved."""
        if blocks == self.blocks and self._memory[0] is not None:
            return False
        for i, size in enumerate(self.sizes):
            wanted = max(max(blocks, 1) * size, LEAST)
            new, old = self._alloc(within_reach("the KV cache of a layer", wanted)), self._memory[i]
            if old is not None and size and min(blocks, self.blocks):
                self.device.copy(new.at(), old.at(), min(blocks, self.blocks) * size)
            if old is not None:
                self.device.free(old)
            self._memory[i] = new
        self.blocks = blocks
        return True

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Block sources[i] -> block targets[i], int64 [n] each."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for memory, size in self._stored():
                self.device.copy(memory.at(target * size), memory.at(source * size), size)

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Content of blocks int64 [n], uint8 [n, block_bytes]: K, then V."""
        saved = np.empty((len(blocks), self.block_bytes), np.uint8)
        for row, block in zip(saved, blocks.tolist(), strict=True):
            row[:] = np.concatenate([self.device.download(memory.at(block * size), size)
                                     for memory, size in self._stored()])
        return saved

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """The inverse of `save`."""
        for row, block in zip(data, blocks.tolist(), strict=True):
            for (memory, size), part in zip(self._stored(), np.split(row, [self.sizes[0]])):
                self.device.upload(memory.at(block * size), part)

    def _stored(self) -> list[tuple[Memory, int]]:
        """Memory of K, and of V if it is stored, with the bytes of a block."""
        return [(memory, size) for memory, size in zip(self._memory, self.sizes) if size]
