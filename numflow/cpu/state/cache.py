"""Paged key/value cache of one attention, and the op `cache_write`.

Token p of a sequence is in block table[p // block_size] at index p % block_size. A block has
    K  [G][block_size / 16][E][16]   16 tokens interleaved: a vector holds one column of 16 keys
    V  [G][block_size][Ep]           Ep = E_v rounded up to 16; the padding columns stay zero
of float32 or float16. bfloat16 is stored in pairs (simd/bfloat16.py): of two columns of a key, and of the values of two
tokens, an even token and the next:
    K  [G][block_size / 16][E / 2][16][2]        V  [G][block_size / 2][Ep][2]
If values are a prefix of keys, there is no V: attention transposes the columns of K that it needs, 64 keys at a time.
Quantised K and V have 16 tokens interleaved, in blocks of 32 columns (kv_code.py). K and V may differ in type.
A cache of entries, one for `every` tokens, has contiguous rows of float32: the entry whose last token is p is row
p % block_size // every of its block.
"""

from typing import Any

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import (
    BLOCKS,
    BLOCKS_STRIDE,
    CROSS_BLOCKS,
    CROSS_LENGTHS,
    CROSS_STRIDE,
    LENGTHS,
    Call,
    Code,
    slots,
)
from numflow.cpu.state import kv_rows
from numflow.errors import RequestError
from numflow.ops import Cache, Step, param
from numflow.quant.kv import CODED

_CODE, _POOL = Code("numflow.cpu.state.cache_kernels"), Code("numflow.cpu.state.pool_kernels")
SLOTS = slots("header rows cache k k_stride v v_stride kv_heads k_dim v_dim block_size table table_stride "
              "k_kind v_kind k_width v_width k_size v_size")

ENTRIES = slots("header rows k k_stride cache width table table_stride tokens every size")  # tokens: of a block
POOL = slots("header rows y y_stride cache width table table_stride tokens every size bias series")

CHUNK = 64  # keys per step of attention; all in one block
GROUP = 16  # interleaved keys


class KVCache:
    """Memory of `cache` for blocks of `block_size` tokens.

    kinds:     types of K and of V (quant.kv.KV_TYPES); both the type of K if values are a prefix of keys.
    window:    window of the attention that reads the cache, 0: the whole sequence.
    table:     header fields of its block table and of the table's stride.
    widths:    columns of rows of K and V in the attention's arithmetic.
    addresses: int64 [2], current addresses of K and V. Kernels read them at run time, so the memory may move.
    """

    def __init__(self, cache: Cache, block_size: int, kv_k: str, kv_v: str, window: int = 0,
                 table: tuple[int, int] = (BLOCKS, BLOCKS_STRIDE)):
        if block_size < CHUNK or block_size % CHUNK:
            raise RequestError(f"block_size should be a multiple of {CHUNK}, is {block_size}")
        self.shape, self.block_size, self.blocks = cache, block_size, 0
        self.window, self._table = window, table
        self.kinds = ("f32", "f32") if cache.every else (kv_k, kv_k if cache.prefix else kv_v)
        self.widths = kv_rows.widths(cache, *self.kinds)
        self.addresses = np.zeros(2, np.int64)
        self._sizes = kv_rows.sizes(cache, *self.kinds)
        self._arrays = [aligned((0, self._block(size)), np.uint8) for size in self._sizes]

    def _block(self, size: int) -> int:
        """Bytes of a block whose rows have `size` bytes for each head."""
        return self.shape.kv_heads * -(-self.block_size // max(self.shape.every, 1)) * size

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(a.nbytes for a in self._arrays)

    @property
    def table_fields(self) -> dict[str, Any]:
        """Header fields of the block table, its stride and the number of keys of each sequence, by slot name."""
        is_cross = self.shape.kind == "cross"
        table, stride = (CROSS_BLOCKS, CROSS_STRIDE) if is_cross else self._table
        return {"table": table, "table_stride": stride, "lengths": CROSS_LENGTHS if is_cross else LENGTHS}

    @property
    def row_fields(self) -> dict[str, Any]:
        """Kind, width and bytes of a row of one head, for K and for V, by slot name."""
        both = {"kind": [kv_rows.KINDS[kind] for kind in self.kinds], "width": self.widths, "size": self._sizes}
        return {f"{which}_{field}": values[i] for field, values in both.items() for i, which in enumerate("kv")}

    def resize(self, blocks: int) -> bool:
        """Reserve `blocks` blocks; blocks that remain keep their content.

        Returns False: no kernel has to be bound again, since kernels read `addresses`.
        """
        if blocks == self.blocks:
            return False
        for i, size in enumerate(self._sizes):
            new = aligned((blocks, self._block(size)), np.uint8)
            count = min(blocks, self.blocks)
            new[:count] = self._arrays[i][:count]
            self._arrays[i], self.addresses[i] = new, new.ctypes.data
        self.blocks = blocks
        return False

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
        """Restore the bytes of blocks that `save` returned, uint8 [n, block_bytes]."""
        offset = 0
        for rows in self._arrays:
            rows[blocks] = data[:, offset:offset + rows.shape[1]]
            offset += rows.shape[1]


def entry_fields(cache: KVCache) -> dict[str, Any]:
    """Slots of kernels that access entries, or the rows that entries are made of."""
    fields = cache.table_fields
    return {"table": fields["table"], "table_stride": fields["table_stride"], "tokens": cache.block_size,
            "every": cache.shape.every, "size": cache.row_fields["k_size"]}


def pool(step: Step, ctx) -> list[Call]:
    """y f32 [T, E] from the cached rows [gates S * E, values S * E] of the last tokens; bias f32 [every, S * E]."""
    y, cache = step.outputs[0], ctx.caches[param(step, "cache")]
    fields = entry_fields(cache) | {"every": param(step, "every")}
    return [Call.named(step, _POOL.kernel("pool"), POOL, header=ctx.header, rows=ctx.rows(y), **ctx.strided("y", y),
                       cache=cache.addresses, width=y.width, bias=ctx.vector(step.weights["bias"]),
                       series=param(step, "series"), **fields)]


def cache_write(step: Step, ctx) -> list[Call]:
    """k f32 [T, G*E], v f32 [T, G*E_v]: store each token's row at its position."""
    cache = ctx.caches[param(step, "cache")]
    k, v = step.inputs[0], step.inputs[-1]  # if values are a prefix of keys, v is not read
    fields = cache.table_fields | cache.row_fields
    del fields["lengths"]
    if cache.shape.every:
        return [Call.named(step, _CODE.kernel("cache_write_entries"), ENTRIES, header=ctx.header, rows=ctx.rows(k),
                           **ctx.strided("k", k), cache=cache.addresses, width=k.width, **entry_fields(cache))]
    if cache.shape.prefix:
        fields["v_width"] = 0
    kernel = _CODE.kernel("cache_write_coded" if set(cache.kinds) & set(CODED) else "cache_write")
    return [Call.named(step, kernel, SLOTS, header=ctx.header, rows=ctx.rows(k), cache=cache.addresses,
                       **ctx.strided("k", k), **ctx.strided("v", v), kv_heads=cache.shape.kv_heads,
                       k_dim=cache.shape.k_dim, v_dim=cache.shape.v_dim, block_size=cache.block_size, **fields)]
