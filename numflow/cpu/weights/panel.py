"""Panels: a tile of 16 rows whose codes and headers are taken apart once, for many tokens.

Where a register tile has 4 tokens, a prompt would take every weight apart for each 4 of them, which is a tenth to a
fifth of the time with 4 bits and most of it with tables. A thread keeps the panel of one tile in its second cache:
    codes  [unit][8 column groups][16 rows][4 columns]  u8, as `column_group` gives them
    heads  [unit][1 half or 2][2][16 rows]              f32: the scale, and the zero or base if the scheme has one
A panel of plain numbers, for operands of bfloat16, has pairs alone: [column pair][16 rows][2 columns] bf16.
Products and their order are those of the packed tile, so that every bit is the same.
"""

from collections.abc import Callable

from numflow.cpu.simd.bfloat16 import pairs_of_rows
from numflow.cpu.simd.llvm_barriers import Hold
from numflow.cpu.simd.value import Value, save
from numflow.cpu.weights.decode import base, column_group, open_heads, scale, zero
from numflow.cpu.weights.layout import PANELS, ROWS, UNIT, Scheme


def unpack_pairs(panel: Value, codes: Value, columns: Value, scheme: Scheme, repeat: Callable[..., list[Value]],
                 fetch: Callable[[Value, int], None]) -> None:
    """Write the panel of pairs of the tile with these plain numbers, of an even number of columns."""
    nbytes = 2 * scheme.unit_bytes // UNIT

    def pair(i, vectors):
        at = codes + i * nbytes
        fetch(at, nbytes)
        save(panel + i * (4 * ROWS), pairs_of_rows(at, scheme.header))
        return vectors

    repeat(columns >> 1, [], pair)


def unpack(panel: Value, codes: Value, heads: Value, columns: Value, scheme: Scheme,
           repeat: Callable[..., list[Value]], fetch: Callable[[Value, int], None]) -> None:
    """Write the panel of the tile with these codes and headers; `fetch` begins to fetch codes ahead of their use."""
    to, units = PANELS[scheme.name], columns >> 5
    hold, size = Hold(panel.builder, 1), scheme.strip
    opened, panel_heads = open_heads(heads, scheme, hold), panel + units * to.unit_bytes

    def strip(i, vectors, count=size):
        at = codes + i * (size * scheme.unit_bytes)
        fetch(at, count * scheme.unit_bytes)
        for u in range(count):
            unit, known = i * size + u, {}
            for group in range(8):
                code = column_group(at, scheme, 8 * u + group, hold=hold, known=known)
                save(panel + unit * to.unit_bytes + 64 * group, code)
            for half in range(to.halves):
                place = to.head(panel_heads, unit, half)
                save(place, scale(opened, unit, half, scheme))
                if scheme.is_own:
                    save(place + 64, zero(opened, unit, half, scheme))
                elif scheme.with_base:
                    save(place + 64, base(opened, unit, half, scheme))
        return vectors

    repeat(units >> (size - 1), [], strip)
    if size == 2:
        repeat(units & 1, [], lambda i, vectors: strip((units >> 1) + i, vectors, 1))
