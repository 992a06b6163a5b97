"""Paged key/value memory of one attention on a device, and the op `cache_write`.

Token p of a sequence lies in block table[p // block_size] at place p % block_size; a block holds
    K  [G][block_size][E]      V  [G][block_size][E_v]
in elements of `kv_type`: f32, or f16 as its bits.
"""

import functools

import numpy as np

from numflow.cuda.arithmetic import float_to_half
from numflow.cuda.call import Call, ceil, per_row
from numflow.cuda.device import Device, Ref
from numflow.cuda.intrinsics import as_floats, as_u16, block_x, block_y, thread_index
from numflow.cuda.kernel import Kernel, kernel
from numflow.cuda.scalar import f32, i32, u8, u32
from numflow.ops import Cache, Step, param

THREADS = 128
ELEMENTS = {"f32": 4, "f16": 2}  # bytes


class KVCache:
    """Memory of `cache` for blocks of `block_size` tokens; K and V each in their own type.

    host: in pinned memory of the host, which kernels reach over the bus.
    """

    def __init__(self, device: Device, cache: Cache, block_size: int, kv_k: str, kv_v: str, host: bool = False):
        self.device, self.shape, self.block_size, self.blocks = device, cache, block_size, 0
        self.types = kv_k, kv_v
        self._sizes = tuple(cache.kv_heads * block_size * size * ELEMENTS[kind]
                            for size, kind in zip((cache.k_dim, cache.v_dim), self.types))
        self._memory = [None, None]
        self._alloc = device.alloc_host if host else device.alloc

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, K and V."""
        return sum(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.blocks * self.block_bytes

    @property
    def k(self) -> Ref:
        """Where K is now; the memory moves when the cache is resized."""
        return self._memory[0].at()

    @property
    def v(self) -> Ref:
        """Where V is now."""
        return self._memory[1].at()

    @property
    def table(self) -> str:
        """Name of its block table in the batch."""
        return "cross_blocks" if self.shape.kind == "cross" else "blocks"

    @property
    def lengths(self) -> str:
        """Name of the number of its keys in the batch."""
        return "cross_lengths" if self.shape.kind == "cross" else "lengths"

    def resize(self, blocks: int) -> bool:
        """Hold `blocks` blocks; the content of those that remain is kept. Says whether the memory has moved."""
        if blocks == self.blocks and self._memory[0] is not None:
            return False
        for i, size in enumerate(self._sizes):
            new, old = self._alloc(max(blocks, 1) * size), self._memory[i]
            if old is not None and min(blocks, self.blocks):
                self.device.copy(new.at(), old.at(), min(blocks, self.blocks) * size)
            if old is not None:
                self.device.free(old)
            self._memory[i] = new
        self.blocks = blocks
        return True

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Block sources[i] -> block targets[i]."""
        for source, target in zip(sources, targets):
            for memory, size in zip(self._memory, self._sizes):
                self.device.copy(memory.at(target * size), memory.at(source * size), size)

    def save(self, block: int) -> np.ndarray:
        """uint8 [block_bytes]: K, then V."""
        return np.concatenate([self.device.download(memory.at(block * size), size)
                               for memory, size in zip(self._memory, self._sizes)])

    def load(self, block: int, data: np.ndarray) -> None:
        """The inverse of `save`."""
        for memory, size, part in zip(self._memory, self._sizes, np.split(data, [self._sizes[0]])):
            self.device.upload(memory.at(block * size), part)


def cache_write(step: Step, ctx) -> list[Call]:
    """k f32 [T, G * E], v f32 [T, G * E_v]: each token's row goes to its position."""
    cache, batch = ctx.caches[param(step, "cache")], ctx.batch
    calls = []
    for view, to, kind, size in zip(step.inputs, (cache.k, cache.v), cache.types,
                                    (cache.shape.k_dim, cache.shape.v_dim)):
        calls.append(per_row(step, write_kernel(kind), ctx.rows(view), ceil(view.width, THREADS), to, *ctx.view(view),
                             batch.ref("positions"), batch.ref("sequence_of"), batch.ref(cache.table), batch.stride,
                             batch.counts, ctx.rows(view), view.width, size, cache.shape.kv_heads, cache.block_size))
    return calls


@functools.cache
def write_kernel(kind: str) -> Kernel:
    """One thread for each number."""
    half = kind == "f16"

    @kernel(f"cache_write_{kind}", THREADS)
    def _cache_write(cache: u8.ptr, x: f32.ptr, x_stride: u32, positions: i32.ptr, sequence_of: i32.ptr,
                     table: i32.ptr, table_stride: u32, counts: i32.ptr, rows: u32, width: u32, size: u32, heads: u32,
                     block_size: u32):
        t, column = block_y(), u32(block_x() * 128 + thread_index())
        if t >= counts[rows] or column >= width:
            return
        position = u32(positions[t])
        block = table[sequence_of[t] * table_stride + position // block_size]
        head, inside = u32(column // size), u32(column % size)
        at = ((block * heads + head) * block_size + position % block_size) * size + inside
        if half:
            as_u16(cache)[at] = float_to_half(x[t * x_stride + column])
        else:
            as_floats(cache)[at] = x[t * x_stride + column]

    return _cache_write
