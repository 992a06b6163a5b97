"""Paged key/value memory of one attention, and the op `cache_write`.

Token p of a sequence lies in block table[p // block_size] at place p % block_size. In a block
    K  [G][block_size / 16][E][16]   16 tokens side by side: a vector holds one column of 16 keys
    V  [G][block_size][Ep]           Ep = E_v rounded up to 16; the columns that are added stay zero
of float32, or float16 kept as its bits. A narrower format is a new element type here and its load in the attention.
"""

import numpy as np

from numflow.cpu.kernel import (
    BLOCKS,
    BLOCKS_STRIDE,
    CROSS_BLOCKS,
    CROSS_LENGTHS,
    CROSS_STRIDE,
    LENGTHS,
    POSITIONS,
    SEQUENCE_OF,
    Call,
    f32_ptr,
    i32_ptr,
    i64,
    kernel,
    share,
)
from numflow.cpu.memory import aligned, padded
from numflow.cpu.simd import inline
from numflow.cpu.simd_float import store_as_f16
from numflow.errors import RequestError
from numflow.ops import Cache, Step, param

CHUNK = 64  # keys that attention works on at a time: they must lie in one block
ELEMENTS = {"f32": np.float32, "f16": np.uint16}

HEADER, ROWS, CACHE, K, K_STRIDE, V, V_STRIDE, KV_HEADS, K_DIM, V_DIM, BLOCK, TABLE, TABLE_STRIDE, HALF = range(14)


class KVCache:
    """Memory of `cache` for blocks of `block_size` tokens, in elements of `kv_type` ("f32" or "f16").

    addresses: int64 [2], where K and V are now. Kernels read them at run time, so that the memory may move.
    """

    def __init__(self, cache: Cache, block_size: int, kv_type: str):
        if block_size < CHUNK or block_size % CHUNK:
            raise RequestError(f"block_size should be a multiple of {CHUNK}, is {block_size}")
        self.shape, self.block_size, self.half, self.blocks = cache, block_size, kv_type == "f16", 0
        self.v_stride = padded(cache.v_dim)
        self.addresses = np.zeros(2, np.int64)
        self._dtype = ELEMENTS[kv_type]
        self._widths = [cache.kv_heads * block_size * size for size in (cache.k_dim, self.v_stride)]
        self._arrays = [aligned((0, width), self._dtype) for width in self._widths]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(a.nbytes for a in self._arrays)

    @property
    def table_fields(self) -> tuple[int, int, int]:
        """Header fields of the block table, its stride and the number of keys of each sequence."""
        if self.shape.kind == "cross":
            return CROSS_BLOCKS, CROSS_STRIDE, CROSS_LENGTHS
        return BLOCKS, BLOCKS_STRIDE, LENGTHS

    def resize(self, blocks: int) -> None:
        """Hold `blocks` blocks; the content of those that remain is kept."""
        if blocks == self.blocks:
            return
        for i, width in enumerate(self._widths):
            new = aligned((blocks, width), self._dtype)
            kept = min(blocks, self.blocks)
            new[:kept] = self._arrays[i][:kept]
            self._arrays[i], self.addresses[i] = new, new.ctypes.data
        self.blocks = blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(rows.shape[1] for rows in self._rows())

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks, int64 [n] each; no target is a source."""
        for rows in self._rows():
            rows[targets] = rows[sources]

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """The bytes of blocks int64 [n], uint8 [n, block_bytes], whatever their elements are."""
        return np.concatenate([rows[blocks] for rows in self._rows()], axis=1)

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Put back what `save` returned, uint8 [n, block_bytes]."""
        at = 0
        for rows in self._rows():
            rows[blocks] = data[:, at:at + rows.shape[1]]
            at += rows.shape[1]

    def _rows(self) -> list[np.ndarray]:
        """The memory as bytes, uint8 [blocks, n] of each array."""
        return [array.view(np.uint8) for array in self._arrays]


def cache_write(step: Step, ctx) -> list[Call]:
    """k f32 [T, G*E], v f32 [T, G*E_v]: each token's row goes to its position."""
    cache = ctx.caches[param(step, "cache")]
    k, v = step.inputs
    return [Call.of(step, _cache_write, ctx.header, ctx.rows(k), cache.addresses, *ctx.view(k), *ctx.view(v),
                    cache.shape.kv_heads, cache.shape.k_dim, cache.shape.v_dim, cache.block_size,
                    *cache.table_fields[:2], cache.half)]


@kernel
def _cache_write(args, thread, n_threads):
    """Items: rows times heads."""
    header, heads, block_size = i64(args, HEADER), i64(args, KV_HEADS), i64(args, BLOCK)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, TABLE))), i64(header, i64(args, TABLE_STRIDE))
    k_dim, v_dim, half = i64(args, K_DIM), i64(args, V_DIM), i64(args, HALF)
    k_width, v_width, size = k_dim, (v_dim + 15) // 16 * 16, 2 if half else 4
    begin, end = share(i64(header, i64(args, ROWS)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        place = positions[t] % block_size
        at = (table[sequence_of[t] * stride + positions[t] // block_size] * heads + head) * block_size
        k = i64(i64(args, CACHE), 0) + size * (at * k_width + place // 16 * 16 * k_width + place % 16)
        v = i64(i64(args, CACHE), 1) + size * (at + place) * v_width
        _store(f32_ptr(i64(args, K) + 4 * (t * i64(args, K_STRIDE) + head * k_dim)), k, k_dim, 16, half)
        _store(f32_ptr(i64(args, V) + 4 * (t * i64(args, V_STRIDE) + head * v_dim)), v, v_dim, 1, half)


@inline
def _store(x, y, count, step, half):
    """`count` float32 to every `step`-th element at y."""
    if half:
        for i in range(count):
            store_as_f16(y + 2 * step * i, x[i])
    else:
        for i in range(count):
            f32_ptr(y)[step * i] = x[i]
