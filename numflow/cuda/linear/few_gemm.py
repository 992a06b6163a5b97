"""Products of quantised weights with up to 16 tokens on tensor cores; no weight passes through shared memory.

Which column of a product is which k of `mma.sync` is free, as long as weights and activations agree. So a lane has a
unit of 32 columns to itself: the four lanes that a fragment gives a row of the matrix decode four neighbouring units of
that row, into the very registers that the instruction wants, and the lanes of a token read the same columns of its
activations. No warp waits for another until the end.

A block has 32 rows of the matrix and 16 tokens; its four warps take four units of all of them in turn, and one adds
their sums up. Arguments and scaling are those of gemm.py.
"""

import functools

from numflow.cuda.lang.arithmetic import mma_f16
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    grid_z,
    lane_index,
    load4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.parameters import Bias, Planes, Shape
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES

TOKENS, ROWS, WARPS = 16, 32, 4
BLOCKS = 528  # that 132 multiprocessors have room for
UNITS = 4     # of a warp's step: one for each lane of a row
_MOST = 16    # sums of a lane
_shared = SharedArray(f32, (WARPS - 1) * _MOST * 32)
_sums, _above, _below, _tokens = LocalArray(f32, _MOST), LocalArray(u32, 16), LocalArray(u32, 16), LocalArray(u32, 32)
_rows, _sources, _bias = LocalArray(u32, 4), LocalArray(u32, 2), LocalArray(f32, 4)
_bases, _steps, _zeros, _slopes = LocalArray(u32, 4), LocalArray(u32, 4), LocalArray(f32, 4), LocalArray(f32, 4)


def split_of(n: int, rows: int, units: int) -> int:
    """Parts that the columns are cut into, each at least two steps of four warps."""
    return max(1, min(BLOCKS // (-(-n // ROWS) * -(-rows // TOKENS)), units // (2 * WARPS * UNITS)))


@functools.cache
def few_gemm(kind: str, grouped: bool, stage: DeviceFunction, put: DeviceFunction, load_bias: DeviceFunction) -> Kernel:
    """gemm.gemm for 16 tokens and matrices of codes without outliers; grid (N / 32, rows / 16, parts).

    stage, put, load_bias: of gemm.py.
    """
    scheme = SCHEMES[kind]
    has_rows, row_of = scheme.row_words > 0, row_header(scheme) if scheme.row_words else None

    @kernel(f"gemm_{kind}_{TOKENS}{'_grouped' * grouped}", 32 * WARPS, blocks=4)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, slots: u32.ptr, outliers: u32):
        # Place in the grid: rows of the matrix, tokens; grouped, the tile's expert and routes.
        lane, warp = u32(lane_index()), u32(thread_index() >> u32(5))
        group, own = lane >> u32(2), lane & u32(3)
        first_row, first_token = u32(block_x() * ROWS), u32(block_y() * TOKENS)
        count, above_row = u32(shape.counts[shape.field]), u32(0)
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The units of this part, whole steps.
        parts = u32(grid_z())
        share = u32(u32((shape.units + parts - 1) // parts + 3) & u32(0xFFFFFFFC))
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < shape.units else shape.units
        unit = u32(unit + UNITS * warp)
        # The four rows that this lane decodes, what each has once, and the two tokens that it reads.
        acc, upper, lower, words = _sums(), _above(), _below(), _tokens()
        rows, bases, steps, zeros, slopes, sources = _rows(), _bases(), _steps(), _zeros(), _slopes(), _sources()
        for i in range(_MOST):
            acc[i] = f32(0)
        for i in range(4):
            row = u32(first_row + group + 8 * i)
            rows[i] = u32(above_row + (row if row < shape.n else u32(shape.n - 1)))
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
            unit = u32(unit + WARPS * UNITS)
        # One warp adds the sums of the others to its own.
        memory = _shared()
        if warp > 0:
            for i in range(_MOST):
                memory[(_MOST * (warp - 1) + i) * 32 + lane] = acc[i]
        sync_block()
        if warp > 0:
            return
        for other in range(WARPS - 1):
            for i in range(_MOST):
                acc[i] += memory[(_MOST * other + i) * 32 + lane]
        # Epilogue: scale, bias, y; or for several parts the sums that gemm_sum adds.
        lane_row, place, plus = u32(first_row + group), u32(first_token + 2 * own), _bias()
        load_bias(plus, bias.data + above_row if grouped and bias.present != 0 else bias.data,
                  bias.present != 0 and parts == 1, lane_row, shape.n, 2, 16)
        if not grouped and parts > 1:
            put(acc, partial + block_z() * count * shape.n, shape.n, scales, plus, shape.n, count, lane_row, place,
                order, by_token)
        else:
            put(acc, *y, scales, plus, shape.n, count, lane_row, place, order, by_token)

    return _gemm
