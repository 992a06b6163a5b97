"""Products of quantised weights with up to 16 tokens on tensor cores; no weight passes through shared memory.

Which column of a product is which k of `mma.sync` is free, as long as weights and activations agree. So a lane has a
unit of 32 columns to itself: the four lanes that a fragment gives a row of the matrix decode four neighbouring units of
that row, into the very registers that the instruction wants, and the lanes of a token read the same columns of its
activations. No warp waits for another until the end.

A block has 32 rows of the matrix and 16 tokens. Its warps take four units of all of them in turn; their sums meet in
shared memory, where a warp adds up those of one or two tokens, a lane those of a row, and does what is left to do: scale,
bias, residual. A matrix with hardly more tiles of rows than there are multiprocessors gets blocks of 16 warps, so no
sums pass through device memory. Scaling is that of gemm.py.
"""

import functools

from numflow.cuda.lang.arithmetic import mma_f16
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    block_z,
    grid_z,
    lane_index,
    load2,
    load4,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.gemv import unit_prefetch
from numflow.cuda.linear.parameters import Bias, Planes, Residual, Shape
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES

TOKENS, ROWS = 16, 32
WARPS, NARROW = 8, 16  # of a block; of matrices with few rows
MULTIPROCESSORS = 132  # of a large GPU: one block of 16 warps each, or two of 8
UNITS = 4              # of a warp's step: one for each lane of a row
_MOST = 16             # sums of a lane
_sums, _above, _below, _tokens = LocalArray(f32, _MOST), LocalArray(u32, 16), LocalArray(u32, 16), LocalArray(u32, 32)
_rows, _sources = LocalArray(u32, 4), LocalArray(u32, 2)
_bases, _steps, _zeros, _slopes = LocalArray(u32, 4), LocalArray(u32, 4), LocalArray(f32, 4), LocalArray(f32, 4)


def warps_of(n: int, grouped: bool) -> int:
    """Warps of a block for a matrix of n rows."""
    return NARROW if -(-n // ROWS) <= MULTIPROCESSORS and not grouped else WARPS


def split_of(n: int, rows: int, units: int) -> int:
    """Parts that the columns are cut into, each at least two steps of 16 warps, where blocks would be too few."""
    return max(1, min(MULTIPROCESSORS // (-(-n // ROWS) * -(-rows // TOKENS)), units // (2 * NARROW * UNITS)))


@functools.cache
def few_gemm(kind: str, grouped: bool, warps: int, scale: float, stage: DeviceFunction) -> Kernel:
    """gemm.gemm for 16 tokens and matrices of codes without outliers; grid (N / 32, rows / 16, parts).

    scale, stage: of gemm.py, SCALE and what decodes a unit. residual: y = residual + factor * product, if there is one
    part.
    """
    scheme = SCHEMES[kind]
    has_rows, row_of = scheme.row_words > 0, row_header(scheme) if scheme.row_words else None
    shared, ask = SharedArray(f32, warps * TOKENS * ROWS), unit_prefetch(kind)

    @kernel(f"gemm_{kind}_{TOKENS}_{warps}{'_grouped' * grouped}", 32 * warps, blocks=16 // warps)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, residual: Residual):
        # Place in the grid: rows of the matrix, tokens; the units of this part, whole steps.
        lane, warp = u32(lane_index()), u32(thread_index() >> u32(5))
        group, own = lane >> u32(2), lane & u32(3)
        first_row, first_token = u32(block_x() * ROWS), u32(block_y() * TOKENS)
        count, above_row, parts = u32(stream1(shape.counts, shape.field)), u32(0), u32(grid_z())
        share = u32(u32((shape.units + parts - 1) // parts + 3) & u32(0xFFFFFFFC))
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < shape.units else shape.units
        unit = u32(unit + UNITS * warp)
        # The four rows that this lane decodes; it asks for the units of its first step, then waits for what is before.
        rows = _rows()
        for i in range(4):
            row = u32(first_row + group + 8 * i)
            rows[i] = row if row < shape.n else u32(shape.n - 1)
            if not grouped and unit + own < last:
                ask(*planes, u32(rows[i] * shape.units + unit + own))
        after_previous()
        # Grouped, the tile's expert and routes.
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # What a row has once, and the two tokens that this lane reads.
        acc, upper, lower, words = _sums(), _above(), _below(), _tokens()
        bases, steps, zeros, slopes, sources = _bases(), _steps(), _zeros(), _slopes(), _sources()
        for i in range(_MOST):
            acc[i] = f32(0)
        for i in range(4):
            rows[i] = u32(above_row + rows[i])
            bases[i], steps[i], zeros[i], slopes[i] = u32(0), u32(0), f32(0), f32(0)
            if has_rows:
                bases[i], steps[i], zeros[i], slopes[i] = row_of(planes.per_row, rows[i])
        for j in range(2):
            at = u32(first_token + group + 8 * j)
            at = at if at < count else u32(count - 1)  # tokens that are not there are the last one
            sources[j] = u32(order[2 * at + by_token]) if grouped else at
        # For each four units: load activations, of units beyond the last zeros; decode and multiply.
        while unit < last:
            here = u32(unit + own)
            there = here < last
            here = here if there else u32(last - 1)
            for j in range(2):
                for i in range(4):
                    at = 16 * j + 4 * i
                    words[at], words[at + 1], words[at + 2], words[at + 3] = load4(
                        x, u32((sources[j] * shape.units + here) * 16 + 4 * i))
            if not there:
                for i in range(32):
                    words[i] = u32(0)
            # 16 rows, then the other 16.
            for m in range(2):
                stage(upper, planes.low, planes.high, planes.two, planes.one, planes.head, planes.above, rows[2 * m],
                      here, shape.units, bases[2 * m], steps[2 * m], zeros[2 * m], slopes[2 * m])
                stage(lower, planes.low, planes.high, planes.two, planes.one, planes.head, planes.above,
                      rows[2 * m + 1], here, shape.units, bases[2 * m + 1], steps[2 * m + 1], zeros[2 * m + 1],
                      slopes[2 * m + 1])
                for k in range(8):
                    for j in range(2):
                        c = 8 * m + 4 * j
                        acc[c], acc[c + 1], acc[c + 2], acc[c + 3] = mma_f16(
                            upper[2 * k], lower[2 * k], upper[2 * k + 1], lower[2 * k + 1],
                            words[16 * j + 2 * k], words[16 * j + 2 * k + 1],
                            acc[c], acc[c + 1], acc[c + 2], acc[c + 3])
            unit = u32(unit + warps * UNITS)
        # Sums to shared memory: 32 rows of each token, eight of them in another place for each lane; barrier.
        memory = shared()
        for i in range(_MOST):
            token, row = u32(2 * own + i % 2 + 8 * (i // 4 % 2)), u32(group + 8 * (i // 2 % 2) + 16 * (i // 8))
            memory[512 * warp + 32 * token + (row ^ 8 * own)] = acc[i]
        sync_block()
        # Epilogue, a warp for a token and a lane for a row: sum, scale, bias and residual; or sums for gemm_sum.
        row = u32(first_row + lane)
        if row >= shape.n:
            return
        plus = bias.data[above_row + row] if bias.present != 0 and parts == 1 else f32(0)
        for turn in range(TOKENS // warps):
            token = u32(warp + warps * turn)
            place, t = u32(32 * token + (lane ^ 8 * (token >> u32(1) & u32(3)))), u32(first_token + token)
            if t < count:
                total, source = memory[place], t
                for other in range(1, warps):
                    total += memory[512 * other + place]
                if grouped:
                    route, token_of = load2(order, u32(2 * t))
                    t = u32(route)
                    source = u32(token_of) if by_token != 0 else t
                total = total * (scales[source] * f32(1 / scale)) + plus
                if not grouped and parts > 1:
                    partial[(block_z() * count + t) * shape.n + row] = total
                else:
                    if not grouped and residual.present != 0:
                        total = residual.data[t * residual.stride + row] + residual.factor * total
                    y.data[t * y.stride + row] = total

    return _gemm
