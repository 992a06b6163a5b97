"""Panels: a tile of 16 rows whose codes and headers are decoded once, for many tokens.

With register tiles of 4 tokens, a prompt would decode every weight once for each 4 tokens. That takes a tenth to a
fifth of the time with 4-bit codes, and most of it with tables. A thread keeps the panel of one tile in its L2 cache:
    codes    [unit][8 column groups][16 rows][4 columns]  u8, as `column_group` returns them
    headers  [unit][1 or 2 halves][2][16 rows]            f32: the scale, and the zero or base if the scheme has one
A panel of float weights, for operands of bfloat16, has pairs only: [column pair][16 rows][2 columns] bf16.
Products and their order are the same as for the packed tile, so every bit is the same.
"""

from collections.abc import Callable

from numflow.cpu.simd.bfloat16 import pairs_of_rows
from numflow.cpu.simd.llvm_barriers import Hold
from numflow.cpu.simd.value import Value, save
from numflow.cpu.weights.decode import base, column_group, open_headers, scale, zero
from numflow.cpu.weights.layout import PANELS, ROWS, UNIT, Scheme


def unpack_pairs(panel: Value, codes: Value, columns: Value, scheme: Scheme, repeat: Callable[..., list[Value]],
                 fetch: Callable[[Value, int], None]) -> None:
    """Write the panel of pairs of a tile of float weights with an even number of columns."""
    nbytes = 2 * scheme.unit_bytes // UNIT

    def pair(i, vectors):
        source = codes + i * nbytes
        fetch(source, nbytes)
        save(panel + i * (4 * ROWS), pairs_of_rows(source, scheme.header))
        return vectors

    repeat(columns >> 1, [], pair)


def unpack(panel: Value, codes: Value, headers: Value, columns: Value, scheme: Scheme,
           repeat: Callable[..., list[Value]], fetch: Callable[[Value, int], None]) -> None:
    """Write the panel of the tile with these codes and headers; `fetch` prefetches codes."""
    layout, units = PANELS[scheme.name], columns >> 5
    hold, size = Hold(panel.builder, 1), scheme.strip
    opened, panel_headers = open_headers(headers, scheme, hold), panel + units * layout.unit_bytes

    def strip(i, vectors, count=size):
        strip_codes = codes + i * (size * scheme.unit_bytes)
        fetch(strip_codes, count * scheme.unit_bytes)
        for u in range(count):
            unit, cache = i * size + u, {}
            for group in range(8):
                code = column_group(strip_codes, scheme, 8 * u + group, hold=hold, cache=cache)
                save(panel + unit * layout.unit_bytes + 64 * group, code)
            for half in range(layout.halves):
                address = layout.header_address(panel_headers, unit, half)
                save(address, scale(opened, unit, half, scheme))
                if scheme.is_own:
                    save(address + 64, zero(opened, unit, half, scheme))
                elif scheme.with_base:
                    save(address + 64, base(opened, unit, half, scheme))
        return vectors

    repeat(units >> (size - 1), [], strip)
    if size == 2:
        repeat(units & 1, [], lambda i, vectors: strip((units >> 1) + i, vectors, 1))
