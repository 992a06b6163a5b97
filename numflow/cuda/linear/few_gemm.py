"""Products of quantised weights with up to 16 tokens on tensor cores. Weights do not pass through shared memory.

The assignment of columns to the k index of `mma.sync` is free, as long as weights and activations agree. So each lane
decodes a whole unit of 32 columns: the four lanes that have one row in an A fragment decode four adjacent units of that
row, directly into the registers of the fragment, and the lanes of a token load the same columns of its activations. No
warp waits for another until the end.

A block has 32 rows of the matrix and 16 tokens. Its warps take steps of four units of all rows in turn. At the end, the
warps add their sums in shared memory: a warp has one or two tokens, a lane one row. Then follow scale, bias and
residual. If a matrix has no more tiles of rows than the GPU has multiprocessors, blocks have 16 warps, and the columns
need not be split over several blocks. Weights are scaled as in gemm.py.

Gate and up: a block has 16 rows of each, and writes their activation as float32 and as the float16 operand of the next
matrix. A block does not know the absolute maximum of a row, so it writes float16 without a scale. Values beyond 65504
become infinite, and with them all results of that token in the next product; the kernel of that product detects this,
and repeats the token's products in float32.
"""

import functools

from numflow.cuda.elementwise.act import gated
from numflow.cuda.lang.arithmetic import bits_of, high_half, low_half, mma_f16, pack_halves
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
    shuffle_xor,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.warpgroup import TILE_WORDS
from numflow.cuda.linear.gemv import unit_prefetch
from numflow.cuda.linear.parameters import Bias, Ends, Planes, Shape
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand import half_place, half_word

TOKENS, ROWS = 16, 32
WARPS, NARROW = 8, 16  # warps of a block; for matrices with few rows
MULTIPROCESSORS = 132  # of a large GPU; each holds one block of 16 warps, or two of 8
UNITS = 4              # units of a warp's step: one for each of the four lanes of a row
_MOST = 16             # accumulators of a lane
_INFINITE = 0x7F800000  # exponent bits of a float, which are all set for infinities and NaN
_sums, _above, _below, _tokens = LocalArray(f32, _MOST), LocalArray(u32, 16), LocalArray(u32, 16), LocalArray(u32, 32)
_rows, _sources = LocalArray(u32, 4), LocalArray(u32, 2)
_bases, _steps, _zeros, _slopes = LocalArray(u32, 4), LocalArray(u32, 4), LocalArray(f32, 4), LocalArray(f32, 4)


def warps_of(n: int, many: bool) -> int:
    """Warps of a block for a matrix of n rows. many: the grid has many blocks in any case."""
    return NARROW if -(-n // ROWS) <= MULTIPROCESSORS and not many else WARPS


def split_of(n: int, rows: int, units: int) -> int:
    """Number of parts into which the columns are split if the grid would have too few blocks; each part has at least
    two steps of 16 warps."""
    return max(1, min(MULTIPROCESSORS // (-(-n // ROWS) * -(-rows // TOKENS)), units // (2 * NARROW * UNITS)))


@functools.cache
def few_gemm(kind: str, grouped: bool, warps: int, scale: float, stage: DeviceFunction, gate: str = "") -> Kernel:
    """gemm.gemm for 16 tokens and quantised matrices without outliers. Grid (N / 32, rows / 16, parts).

    scale, stage: SCALE of gemm.py, and the function that decodes a unit. A residual is added only if there is one part.
    gate: activation of act_mul, whose gate and up are the two halves of the rows; with one part and no residual.
    """
    scheme = SCHEMES[kind]
    has_rows, row_of = scheme.row_words > 0, row_header(scheme) if scheme.row_words else None
    shared, ask = SharedArray(f32, warps * TOKENS * ROWS), unit_prefetch(kind)
    activation, again = gated(gate) if gate else None, _again(kind, stage)
    each = ROWS // 2 if gate else ROWS  # results of a block
    name = f"gemm_{kind}_{TOKENS}_{gate or warps}{'_grouped' * grouped}"

    @kernel(name, 32 * warps, blocks=16 // warps)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, ends: Ends):
        # Block indices: rows of the matrix and tokens. The units of this part are whole steps.
        lane, warp = u32(lane_index()), u32(thread_index() >> u32(5))
        group, own = lane >> u32(2), lane & u32(3)
        first_row, first_token = u32(block_x() * each), u32(block_y() * TOKENS)
        count, above_row, parts = u32(stream1(shape.counts, shape.field)), u32(0), u32(grid_z())
        share = u32(u32((shape.units + parts - 1) // parts + 3) & u32(0xFFFFFFFC))
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < shape.units else shape.units
        unit = u32(unit + UNITS * warp)
        # The four rows that this lane decodes; for gate and up, two of each (the rows of up follow those of gate). The
        # lane prefetches the adjacent units of one row that the first step reads, then waits for earlier kernels.
        rows, behind = _rows(), u32(0)
        if gate:
            behind = u32((shape.n >> u32(1)) - 16)
        for i in range(4):
            row = u32(first_row + group + 8 * i + (behind if i > 1 else u32(0)))
            rows[i] = row if row < shape.n else u32(shape.n - 1)
        if not grouped and unit < last:
            row = u32(first_row + group + 8 * own + (behind if own > 1 else u32(0)))
            ask(*planes, u32((row if row < shape.n else u32(shape.n - 1)) * shape.units + unit))
        after_previous()
        # Grouped: the expert and the routes of this tile.
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The row headers, and the addresses of the two tokens that this lane reads.
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
            at = at if at < count else u32(count - 1)  # tokens beyond the batch repeat the last one
            sources[j] = half_place(u32(order[2 * at + by_token]) if grouped else at, u32(0), u32(0), shape.units)
        # For each step of four units: load activations (zeros for units beyond the last), decode weights, multiply.
        while unit < last:
            here = u32(unit + own)
            there = here < last
            here = here if there else u32(last - 1)
            for j in range(2):
                for i in range(4):
                    at = 16 * j + 4 * i
                    words[at], words[at + 1], words[at + 2], words[at + 3] = load4(
                        x, u32(u32(sources[j] + here * TILE_WORDS) ^ u32(4 * i)))
            if not there:
                for i in range(32):
                    words[i] = u32(0)
            # The first 16 rows, then the other 16.
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
        # Write the sums to shared memory, 32 rows for each token, swizzled against bank conflicts. Barrier.
        memory = shared()
        for i in range(_MOST):
            token, row = u32(2 * own + i % 2 + 8 * (i // 4 % 2)), u32(group + 8 * (i // 2 % 2) + 16 * (i // 8))
            memory[512 * warp + 32 * token + (row ^ 8 * own)] = acc[i]
        sync_block()
        # Epilogue, one warp for a token and one lane for a row: add the warps' sums; repeat results that are not
        # finite; scale and bias.
        row = u32(first_row + lane + (behind if lane > 15 else u32(0)))
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
                if not grouped and ends.unscaled != 0 and bits_of(total) & _INFINITE == _INFINITE:
                    total = again(upper, *planes, row, u32(block_z() * share), last, shape.units,
                                  ends.rows + t * ends.rows_stride)
                if grouped:
                    route, token_of = load2(order, u32(2 * t))
                    t = u32(route)
                    source = u32(token_of) if by_token != 0 else t
                total = total * (scales[source] * f32(1 / scale)) + plus
                # Write the activation of gate and up, or partial sums for gemm_sum, or y.
                if gate:
                    total = activation(total, shuffle_xor(total, 16), ends.p, ends.q)
                    beside = shuffle_xor(total, 1)
                    if lane < 16:
                        y.data[t * y.stride + row] = total
                        if lane & u32(1) == u32(0):
                            ends.words[half_word(t, row, shape.n >> u32(6))] = pack_halves(total, beside)
                    if row == 0:
                        ends.scales[t] = f32(1)
                elif not grouped and parts > 1:
                    partial[(block_z() * count + t) * shape.n + row] = total
                else:
                    if not grouped and ends.present != 0:
                        total = ends.data[t * ends.stride + row] + ends.factor * total
                    y.data[t * y.stride + row] = total

    return _gemm


def _again(kind: str, stage: DeviceFunction) -> DeviceFunction:
    """again(words, planes .., row, unit, last, units, x): product of a row's units with float32 x, times SCALE."""
    scheme = SCHEMES[kind]
    has_rows, row_of = scheme.row_words > 0, row_header(scheme) if scheme.row_words else None

    @device
    def again(words, low, high, two, one, head, above, per_row, row, unit, last, units, x):
        total, base, step, z, dz = f32(0), u32(0), u32(0), f32(0), f32(0)
        if has_rows:
            base, step, z, dz = row_of(per_row, row)
        while unit < last:
            stage(words, low, high, two, one, head, above, row, unit, units, base, step, z, dz)
            for i in range(16):
                total += low_half(words[i]) * x[32 * unit + 2 * i]
                total += high_half(words[i]) * x[32 * unit + 2 * i + 1]
            unit = u32(unit + 1)
        return total

    return again
