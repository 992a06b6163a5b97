"""Products with one small matrix for each head (op `head_linear`): y [T, H * N], head h of y = weight[h] @ head h of x.

Matrix-vector kernels for up to 8 tokens at a time, with all heads in one launch. Arithmetic is float32 for all
activations: the matrices are small, and their results enter the scores of attention, or their inputs are its results.
The operand is x by heads, f32 [H][rows][pitch], zero beyond the columns of a head.
"""

import functools

from numflow.cuda.device.call import Call, Sizes, ceil, per_row
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import block_x, block_y, block_z, lane_index, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.float_gemv import float_row_adder
from numflow.cuda.linear.gemv import TOKENS, WARPS, row_adder
from numflow.cuda.linear.parameters import Planes, Shape, planes_of, units_of
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.outliers import outlier_adder
from numflow.ops import Step, param

THREADS = 128
FEW = TOKENS[-1]


def head_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, H * K], weight [H * N, K] -> y f32 [T, H * N]."""
    (x,), (y,), heads = step.inputs, step.outputs, param(step, "heads")
    weight, field, columns = ctx.matrix(step.weights["weight"]), ctx.rows(y), x.width // heads
    room = ceil(ctx.room(x), FEW) * FEW
    operand = ctx.scratch("heads side by side", 4 * heads * room * weight.pitch)
    shape = Shape(ctx.batch.counts, field=field, n=y.width // heads, units=units_of(weight))
    args = (ctx.view(y), operand, room, planes_of(weight), shape, weight.pitch, weight.parts.get("outliers"),
            weight.outliers)

    def multiply(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), FEW)
        return Launch(head_gemv(weight.kind, tile, weight.outliers > 0),
                      (ceil(y.width // heads, WARPS), ceil(rows, tile), heads), args)

    return [_apart(ctx, x, operand, room, heads, columns, weight), Call(step, multiply)]


def _apart(ctx, x, operand: Ref, room: int, heads: int, columns: int, weight: Matrix) -> Call:
    """The call that writes the operand."""
    return per_row(None, _heads_apart, ctx.rows(x), ceil(heads * weight.pitch, THREADS), operand, room, weight.pitch,
                   *ctx.view(x), ctx.batch.counts, ctx.rows(x), heads, columns)


@kernel("heads_apart", THREADS)
def _heads_apart(y: f32.ptr, room: u32, pitch: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, heads: u32,
                 width: u32):
    row, at = u32(block_x()), u32(block_y() * 128 + thread_index())
    if row < counts[rows] and at < heads * pitch:
        head, column = u32(at // pitch), u32(at % pitch)
        y[(head * room + row) * pitch + column] = x[row * x_stride + head * width + column] if column < width \
            else f32(0)


@functools.cache
def head_gemv(kind: str, tokens: int, apart: bool = False) -> Kernel:
    """Grid (N / 4, rows / tokens, heads). One warp for each row of a head's matrix. apart: with outliers."""
    plain = kind in ("f32", "f16", "bf16")
    sums = LocalArray(f32, tokens)
    add_row = float_row_adder(kind, tokens) if plain else row_adder(kind, False, tokens, 1)
    add_apart = outlier_adder(tokens)

    @kernel(f"head_gemv_{kind}_{tokens}{'_apart' * apart}", THREADS, blocks=0 if plain else 4)
    def _head_gemv(y: Rows, x: f32.ptr, room: u32, planes: Planes, shape: Shape, pitch: u32, slots: u32.ptr,
                   width: u32):
        lane, row = u32(lane_index()), u32(block_x() * 4 + (thread_index() >> u32(5)))
        first, count = u32(block_y() * tokens), u32(shape.counts[shape.field])
        if row >= shape.n or first >= count:
            return
        place, own = u32(block_z() * shape.n + row), x + block_z() * room * pitch
        acc, word = sums(), u32(0)
        for t in range(tokens):
            acc[t] = f32(0)
        if apart:
            word = slots[place * width + lane] if lane < width else u32(0)
        add_row(acc, own, own, pitch, *planes, place, lane, shape.units, first, count - first)
        if apart:
            add_apart(acc, word, own, pitch, slots, place * width, lane, 32, width, first, count - first)
        for t in range(tokens):
            total = warp_sum(acc[t])
            if lane == 0 and first + t < count:
                y.data[(first + t) * y.stride + block_z() * shape.n + row] = total

    return _head_gemv
