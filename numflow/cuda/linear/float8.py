"""Tiles of 8-bit float matrices for tensor cores (wgmma_gemm.py, code_gemm.py, tensor_memory_gemm.py): unchanged codes,
and scales.

A tile has 64 columns, which are two units of 32 (weights/layout.py); each plane has 16 columns of each unit.
"""

import functools

from numflow.cuda.lang.arithmetic import fabs
from numflow.cuda.lang.intrinsics import copy_async
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.warpgroup import SUMS, TILE, tile_place
from numflow.cuda.weights.decode import header
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES, Kept, Scheme
from numflow.quant.stored import SCALED

COLUMNS = 64          # of a tile
_SMALLEST = 1e-20     # smallest scale that accumulators are multiples of


def meets_float8(weight: Kept) -> bool:
    """Whether tensor cores can multiply the codes of a matrix: 8-bit floats, with scales for whole tiles."""
    scheme = SCHEMES.get(weight.kind)
    return (scheme is not None and scheme.table in ("e4m3", "e5m2") and scheme.bits == 8
            and scheme.header == SCALED and scheme.shared % COLUMNS == 0 and not weight.outliers)


def codes_copier(threads: int) -> DeviceFunction:
    """The function by which `threads` threads copy a tile of as many rows."""

    @device
    def copy_codes(tile, at, low, high, first, above, n, unit, units, thread):
        """Copy 64 columns of rows first .. first + threads - 1 of a matrix of n rows that begins at row `above`. If the
        row ends after half a tile, its last unit is repeated, where tokens are 0."""
        for i in range(2):
            place = u32(thread + threads * i) >> u32(1)
            row = u32(first + place) if first + place < n else u32(n - 1)
            half = u32(2 * unit + (thread & u32(1)))
            source = u32(((above + row) * units + (half if half < units else u32(units - 1))) * 4)
            copy_async(tile, u32(at + tile_place(place, 2 * (thread & u32(1)))), low, source)
            copy_async(tile, u32(at + tile_place(place, 2 * (thread & u32(1)) + 1)), high, source)

    return copy_codes


def scales_of(scheme: Scheme, m_tiles: int = 2, pitch: int = TILE,
              sums_of: int = SUMS) -> tuple[DeviceFunction, DeviceFunction]:
    """change(sums, scale, ...): make the sums, multiples of `scale`, multiples of a tile's scales, and update `scale`;
    apply(sums, scale, ...): multiply the sums by `scale`.

    A thread has sums of two rows, 8 apart, in each of m_tiles tiles, which are `pitch` rows apart. sums_of: sums in a
    tile.
    """
    row_of, header_of = row_header(scheme), header(scheme)
    by_row = not scheme.shared

    @device
    def scale_at(head, tops, per_row, above, row, n, i, unit, units):
        at = u32(row + 8 * (i & 1) + pitch * (i >> 1))
        at = u32(above + (at if at < n else u32(n - 1)))
        base, step, z, dz = u32(0), u32(0), f32(0), f32(0)
        if by_row:
            base, step, z, dz = row_of(per_row, at)
        own, _, _, _ = header_of(head, tops, u32(at * units + 2 * unit), base, step, z, dz)
        return own

    @device
    def multiply(sums, i, factor):
        for j in range(sums_of // 2):
            sums[sums_of * (i >> 1) + 4 * (j >> 1) + 2 * (i & 1) + (j & 1)] *= factor

    @device
    def change(sums, scale, head, tops, per_row, above, row, n, unit, units):
        for i in range(2 * m_tiles):
            own = scale_at(head, tops, per_row, above, row, n, i, unit, units)
            if not fabs(own) >= f32(_SMALLEST):
                own = f32(_SMALLEST) if own == own else own
            multiply(sums, i, scale[i] / own)
            scale[i] = own

    @device
    def apply(sums, scale, head, tops, per_row, above, row, n):
        for i in range(2 * m_tiles):
            if by_row:
                scale[i] = scale_at(head, tops, per_row, above, row, n, i, u32(0), u32(0))
            multiply(sums, i, scale[i])

    return change, apply


@functools.cache
def row_scale(scheme: Scheme) -> DeviceFunction:
    """scale_of(head, tops, per_row, above, row, n, unit, units) -> the scale of a tile of one row, or of the row."""
    row_of, header_of = row_header(scheme), header(scheme)
    by_row = not scheme.shared

    @device
    def scale_of(head, tops, per_row, above, row, n, unit, units):
        at = u32(above + (row if row < n else u32(n - 1)))
        base, step, z, dz = u32(0), u32(0), f32(0), f32(0)
        if by_row:
            base, step, z, dz = row_of(per_row, at)
        scale, _, _, _ = header_of(head, tops, u32(at * units + 2 * unit), base, step, z, dz)
        return scale

    return scale_of
