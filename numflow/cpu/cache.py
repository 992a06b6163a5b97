"""Paged key/value memory of one attention, and the op `cache_write`.

Token p of a sequence lies in block table[p // block_size] at place p % block_size. In a block
    K  [G][block_size / 16][E][16]   16 tokens side by side: a vector holds one column of 16 keys
    V  [G][block_size][Ep]           Ep = E_v rounded up to 16; the columns that are added stay zero
of float32, or float16 kept as its bits. Types of fewer bits have rows of blocks of 32 columns (kv_code.py) in the same
places: K by 16 tokens side by side, V by token. K and V may differ in type.
"""

import numpy as np

from numflow.cpu import kv_code as code
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
from numflow.cpu.kv_code import F16
from numflow.cpu.memory import aligned, padded
from numflow.cpu.simd import inline, merged
from numflow.cpu.simd_float import load_part, store_as_f16
from numflow.errors import RequestError
from numflow.ops import Cache, Step, param
from numflow.quant.kv import BLOCK as CODED_BLOCK
from numflow.quant.kv import CODED

CHUNK = 64  # keys that attention works on at a time: they must lie in one block
GROUP = 16  # keys side by side

HEADER, ROWS, CACHE, K, K_STRIDE, V, V_STRIDE, KV_HEADS, K_DIM, V_DIM, BLOCK, TABLE, TABLE_STRIDE = range(13)
KIND, WIDTH, SIZE = 13, 15, 17  # of KVCache.row_fields: first the one for keys, then the one for values


class KVCache:
    """Memory of `cache` for blocks of `block_size` tokens.

    kinds:     types of K and of V (quant.kv.KV_TYPES).
    widths:    columns of their rows in the attention's arithmetic.
    addresses: int64 [2], where K and V are now. Kernels read them at run time, so that the memory may move.
    """

    def __init__(self, cache: Cache, block_size: int, kv_k: str, kv_v: str):
        if block_size < CHUNK or block_size % CHUNK:
            raise RequestError(f"block_size should be a multiple of {CHUNK}, is {block_size}")
        self.shape, self.block_size, self.kinds, self.blocks = cache, block_size, (kv_k, kv_v), 0
        self.widths = code.width(kv_k, cache.k_dim), code.width(kv_v, padded(cache.v_dim))
        self.addresses = np.zeros(2, np.int64)
        self._sizes = [code.row_bytes(kind, width) for kind, width in zip(self.kinds, self.widths, strict=True)]
        self._arrays = [aligned((0, self._block(size)), np.uint8) for size in self._sizes]

    def _block(self, size: int) -> int:
        """Bytes of a block whose rows have `size` bytes for each head."""
        return self.shape.kv_heads * self.block_size * size

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

    @property
    def row_fields(self) -> tuple[int, ...]:
        """Kinds, widths and bytes of a row of one head: of K and of V each."""
        return (*(code.KINDS[kind] for kind in self.kinds), *self.widths, *self._sizes)

    def resize(self, blocks: int) -> None:
        """Hold `blocks` blocks; the content of those that remain is kept."""
        if blocks == self.blocks:
            return
        for i, size in enumerate(self._sizes):
            new = aligned((blocks, self._block(size)), np.uint8)
            kept = min(blocks, self.blocks)
            new[:kept] = self._arrays[i][:kept]
            self._arrays[i], self.addresses[i] = new, new.ctypes.data
        self.blocks = blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(rows.shape[1] for rows in self._arrays)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks, int64 [n] each; no target is a source."""
        for rows in self._arrays:
            rows[targets] = rows[sources]

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """The bytes of blocks int64 [n], uint8 [n, block_bytes], whatever their elements are."""
        return np.concatenate([rows[blocks] for rows in self._arrays], axis=1)

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Put back what `save` returned, uint8 [n, block_bytes]."""
        at = 0
        for rows in self._arrays:
            rows[blocks] = data[:, at:at + rows.shape[1]]
            at += rows.shape[1]


def cache_write(step: Step, ctx) -> list[Call]:
    """k f32 [T, G*E], v f32 [T, G*E_v]: each token's row goes to its position."""
    cache = ctx.caches[param(step, "cache")]
    k, v = step.inputs
    coded = set(cache.kinds) & set(CODED)
    return [Call.of(step, _cache_write_coded if coded else _cache_write, ctx.header, ctx.rows(k), cache.addresses,
                    *ctx.view(k), *ctx.view(v), cache.shape.kv_heads, cache.shape.k_dim, cache.shape.v_dim,
                    cache.block_size, *cache.table_fields[:2], *cache.row_fields)]


@kernel
def _cache_write(args, thread, n_threads):
    _write(args, thread, n_threads, None)


@kernel
def _cache_write_coded(args, thread, n_threads):
    _write(args, thread, n_threads, True)


@merged
def _write(args, thread, n_threads, coded):
    """Items: rows times heads. `coded` is None where no type is one of few bits."""
    header, heads, block_size = i64(args, HEADER), i64(args, KV_HEADS), i64(args, BLOCK)
    positions, sequence_of = i32_ptr(i64(header, POSITIONS)), i32_ptr(i64(header, SEQUENCE_OF))
    table, stride = i32_ptr(i64(header, i64(args, TABLE))), i64(header, i64(args, TABLE_STRIDE))
    begin, end = share(i64(header, i64(args, ROWS)) * heads, thread, n_threads)
    for item in range(begin, end):
        t, head = item // heads, item % heads
        place = positions[t] % block_size
        at = (table[sequence_of[t] * stride + positions[t] // block_size] * heads + head) * block_size
        for which in range(2):
            columns, kind = i64(args, K_DIM + which), i64(args, KIND + which)
            x = i64(args, K + 2 * which) + 4 * (t * i64(args, K_STRIDE + 2 * which) + head * columns)
            beside = 1 if which else GROUP  # rows that lie side by side: keys by groups of 16
            row, lane = place // beside * beside, place % beside
            y = i64(i64(args, CACHE), which) + (at + row) * i64(args, SIZE + which)
            if coded is None or kind <= F16:
                _store(f32_ptr(x), y, columns, beside, lane, kind)
            else:
                blocks = i64(args, WIDTH + which) // CODED_BLOCK
                for b in range(blocks):
                    block = y + b * (beside * i64(args, SIZE + which) // blocks)
                    left = columns - b * CODED_BLOCK
                    first = x + 4 * b * CODED_BLOCK
                    _encode(kind, load_part(first, left), load_part(first + 64, left - 16), block + 2 * lane,
                            block + 2 * (beside + lane), block + 4 * beside + lane, beside)


@inline
def _store(x, y, count, step, lane, kind):
    """`count` float32 to every `step`-th element at y, from `lane` on."""
    if kind == F16:
        for i in range(count):
            store_as_f16(y + 2 * (step * i + lane), x[i])
    else:
        for i in range(count):
            f32_ptr(y)[step * i + lane] = x[i]


@inline
def _encode(kind, low, high, scale, minimum, planes, step):
    if kind == code.Q8:
        code.encode_q8(low, high, scale, minimum, planes, step)
    elif kind == code.Q6:
        code.encode_q6(low, high, scale, minimum, planes, step)
    elif kind == code.Q5:
        code.encode_q5(low, high, scale, minimum, planes, step)
    elif kind == code.Q4:
        code.encode_q4(low, high, scale, minimum, planes, step)
    elif kind == code.Q3H:
        code.encode_q3h(low, high, scale, minimum, planes, step)
    elif kind == code.Q3:
        code.encode_q3(low, high, scale, minimum, planes, step)
    else:
        code.encode_q2(low, high, scale, minimum, planes, step)
