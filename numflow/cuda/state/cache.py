"""The paged KV cache of one attention layer on a device.

Token p of a sequence is in KV block table[p // block_size], at offset p % block_size. A block of the K memory has one
region for each key head, a block of the V memory one for each value head; K and V each have their own data type.
cache_code.py defines regions. If values are a prefix of keys (latent attention), there is no V memory, and values are
read from the rows of K. A cache of entries, one for `every` tokens, has rows of float32: an entry is at offset
(p % block_size) // every of the block of its window's last token p.
"""

import numpy as np

from numflow.cuda.device.device import Device, Memory, Ref, within_reach
from numflow.cuda.state.cache_code import region_bytes
from numflow.errors import RequestError
from numflow.network.windows import table_name
from numflow.ops import Cache

LEAST = 256  # smallest allocation, in bytes
TILE = 64  # keys that the attention kernels take at a time; a tile must not cross a KV block


class KVCache:
    """Memory of `cache` in blocks of `block_size` tokens. K and V each have a data type. sizes: bytes of a block.

    window: sliding window of the attention that reads the cache, 0 for none. block_rows: rows of a block; a cache of
    entries has fewer rows than tokens. host: the cache is in pinned host memory, which kernels reach over the bus.
    While steps are bound, such a cache has a `buffer` in device memory (K and V), to which the blocks that a batch
    reads are copied (cache_host.py); otherwise None.
    """

    def __init__(self, device: Device, cache: Cache, block_size: int, kv_k: str, kv_v: str, host: bool = False,
                 window: int = 0):
        self.device, self.shape, self.block_size, self.blocks = device, cache, block_size, 0
        self.types = ("f32", "f32") if cache.every else (kv_k, kv_k if cache.prefix else kv_v)
        self.window, self.block_rows = window, -(-block_size // max(cache.every, 1))
        self.host, self.buffer = host, None
        if block_size < TILE or block_size % TILE:
            raise RequestError(f"block_size should be a multiple of {TILE}, is {block_size}")
        self.sizes = tuple(cache.kv_heads * region_bytes(kind, size, self.block_rows)
                            for size, kind in zip((cache.k_dim, cache.v_dim), self.types))
        self.v_row = cache.k_dim if cache.prefix else cache.v_dim  # columns of a row whose first columns are a value
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
    def storage(self) -> tuple[Ref, Ref]:
        """Addresses of the cache's own K and V memory. `resize` may move the memory."""
        return self._memory[0].at(), self._memory[1].at()

    @property
    def k(self) -> Ref:
        """Address of K for the attention kernels."""
        return (self.buffer or self.storage)[0]

    @property
    def v(self) -> Ref:
        """Address of V for the attention kernels."""
        return (self.buffer or self.storage)[0 if self.shape.prefix else 1]

    @property
    def write_targets(self) -> list[tuple[Ref, Ref]]:
        """Addresses to which new K and V are written."""
        return [self.storage] if self.buffer is None else [self.buffer, self.storage]

    @property
    def table(self) -> str:
        """Name of the cache's block table in the batch."""
        return "cross_blocks" if self.shape.kind == "cross" else table_name(self.window)

    @property
    def lengths(self) -> str:
        """Name of the batch array with the number of keys of each sequence."""
        return "cross_lengths" if self.shape.kind == "cross" else "lengths"

    def resize(self, blocks: int) -> bool:
        """Resize to `blocks` blocks, and keep the content of the remaining ones. Returns whether the memory moved."""
        if blocks == self.blocks and self._memory[0] is not None:
            return False
        for i, size in enumerate(self.sizes):
            nbytes = max(max(blocks, 1) * size, LEAST)
            new, old = self._alloc(within_reach("the KV cache of a layer", nbytes)), self._memory[i]
            if old is not None and size and min(blocks, self.blocks):
                self.device.copy(new.at(), old.at(), min(blocks, self.blocks) * size)
            if old is not None:
                self.device.free(old)
            self._memory[i] = new
        self.blocks = blocks
        return True

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy block sources[i] to block targets[i], int64 [n] each."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for memory, size in self._stored():
                self.device.copy(memory.at(target * size), memory.at(source * size), size)

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Content of blocks int64 [n] as uint8 [n, block_bytes]: K, then V."""
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
        """The K memory, and the V memory if there is one, each with the bytes of a block."""
        return [(memory, size) for memory, size in zip(self._memory, self.sizes) if size]
