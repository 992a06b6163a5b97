"""Chunks of keys and values from a cache of any types as float32 in a thread's own memory, just before they are used.

A chunk is decoded where it stands in the first cache, and met by all rows of a tile: the cache in memory is read once,
in the few bits it has. `kind` is one of kv_rows.KINDS; addresses are of the first key (or value) of a chunk.
"""

from numflow.cpu import kv_code as code
from numflow.cpu import kv_rows as rows
from numflow.cpu.cache import GROUP
from numflow.cpu.simd import inline, load_f16, load_f32, store_f32
from numflow.quant.kv import BLOCK


@inline
def decode_keys(kind, width, keys, source, size, y, ahead):
    """`keys` keys of `width` columns and `size` bytes each -> f32 [groups of 16][width][16] at y.

    The same bytes from `ahead` on are fetched into the cache.
    """
    for group in range((keys + GROUP - 1) // GROUP):
        at = group * GROUP * size
        if kind <= rows.F16:
            _plain(kind, source + at, width * GROUP, y + 4 * group * GROUP * width)
        else:
            blocks = width // BLOCK
            for b in range(blocks):
                part = at + b * (GROUP * size // blocks)
                _keys(kind, source + part, y + 4 * GROUP * (group * width + b * BLOCK), ahead + part)


@inline
def decode_values(kind, width, keys, source, size, y, ahead):
    """`keys` values of `width` columns and `size` bytes each -> f32 [keys][width] at y."""
    if kind <= rows.F16:
        _plain(kind, source, width * keys, y)
    else:
        for b in range(keys * width // BLOCK):
            part = b * (size * BLOCK // width)
            _values(kind, source + part, y + 4 * b * BLOCK, ahead + part)


@inline
def _plain(kind, source, count, y):
    """`count` float32 or float16, a multiple of 16."""
    for i in range(0, count, 16):
        store_f32(y + 4 * i, load_f32(source + 4 * i) if kind == rows.F32 else load_f16(source + 2 * i))


@inline
def _keys(kind, block, y, ahead):
    if kind == rows.Q8:
        code.key_q8(block, y, ahead)
    elif kind == rows.Q6:
        code.key_q6(block, y, ahead)
    elif kind == rows.Q5:
        code.key_q5(block, y, ahead)
    elif kind == rows.Q4:
        code.key_q4(block, y, ahead)
    elif kind == rows.Q3H:
        code.key_q3h(block, y, ahead)
    elif kind == rows.Q3:
        code.key_q3(block, y, ahead)
    else:
        code.key_q2(block, y, ahead)


@inline
def _values(kind, block, y, ahead):
    if kind == rows.Q8:
        code.value_q8(block, y, ahead)
    elif kind == rows.Q6:
        code.value_q6(block, y, ahead)
    elif kind == rows.Q5:
        code.value_q5(block, y, ahead)
    elif kind == rows.Q4:
        code.value_q4(block, y, ahead)
    elif kind == rows.Q3H:
        code.value_q3h(block, y, ahead)
    elif kind == rows.Q3:
        code.value_q3(block, y, ahead)
    else:
        code.value_q2(block, y, ahead)
