"""Matrix products (op `linear`): y [T, N] = x [T, K] @ weight[N, K].T + bias[N].

Up to 8 tokens every row of the matrix is read once by a matrix-vector kernel (linear_gemv, linear_float); more tokens
go through tensor cores (linear_gemm), unless arithmetic is to be float32, which is again 8 tokens at a time.
"""

from numflow.cuda.call import Call, Sizes, ceil
from numflow.cuda.device import Launch, Ref
from numflow.cuda.kernel import Kernel
from numflow.cuda.layout import Matrix
from numflow.cuda.linear_float import float_gemv
from numflow.cuda.linear_gemm import BLOCKS, ROWS, gemm, gemm_sum, tile_of
from numflow.cuda.linear_gemm import split_of as parts_of
from numflow.cuda.linear_gemv import TOKENS, WARPS, gemv, split_of
from numflow.cuda.operand import UNIT, Operand
from numflow.cuda.pack import PARTS
from numflow.ops import Step

FEW = TOKENS[-1]  # tokens that matrix-vector kernels are for


def linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, K], weight [N, K], bias f32 [N] -> y f32 [T, N]."""
    (x,), (y,) = step.inputs, step.outputs
    weight, field = ctx.matrix(step.weights["weight"]), ctx.rows(y)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8 = uses_int8(weight, ctx.activations)
    exact = weight.kind == "f32" or ctx.activations == "f32"
    operand = ctx.operand(x, "int8" if int8 else "rows" if weight.is_float else "f32", "all" if exact else "few")

    def few(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), FEW)
        args = gemv_args(*ctx.view(y), operand, weight, bias, None, ctx.batch.counts, field, y.width, 1)
        chosen, blocks = gemv_kernel(weight, int8, tile, y.width, False)
        return Launch(chosen, (blocks, ceil(rows, tile), 1), args)

    if exact:
        return [*operand.calls, Call(step, few)]
    many = _many(step, ctx, weight, bias, field)
    return [*(call.only(lambda sizes: sizes.rows[field] <= FEW) for call in [*operand.calls, Call(step, few)]),
            *(call.only(lambda sizes: sizes.rows[field] > FEW) for call in many)]


def _many(step: Step, ctx, weight: Matrix, bias: Ref | None, field: int) -> list[Call]:
    """The calls on tensor cores."""
    (x,), (y,), units = step.inputs, step.outputs, weight.pitch // UNIT
    operand = ctx.operand(x, "bf16" if weight.kind == "bf16" else "f16", "many")
    partial = ctx.scratch("parts of sums", 4 * 128 * ROWS * BLOCKS)  # as many tiles as there may be parts of
    args = (*ctx.view(y), partial, operand.x, operand.aux, *gemm_planes(weight), bias, int(bias is not None),
            ctx.batch.counts, field, y.width, units, None, None, 1)

    def parts(sizes: Sizes) -> int:
        return parts_of(y.width, sizes.rows[field], units)

    def multiply(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = tile_of(rows)
        return Launch(gemm(weight.kind, tile), (ceil(y.width, ROWS), ceil(rows, tile), parts(sizes)), args)

    def add(sizes: Sizes) -> Launch:
        return Launch(gemm_sum, (ceil(y.width, 128), sizes.rows[field], 1), (
            *ctx.view(y), partial, parts(sizes), bias, int(bias is not None), ctx.batch.counts, field, y.width))

    return [*operand.calls, Call(step, multiply), Call(step, add).only(lambda sizes: parts(sizes) > 1)]


def gemm_planes(weight: Matrix) -> list[Ref | None]:
    """The parts of a matrix as `gemm` wants them."""
    return [weight.parts.get(name) for name in ("codes" if weight.is_float else PARTS[0], *PARTS[1:])]


def uses_int8(weight: Matrix, activations: str) -> bool:
    """Whether a matrix meets int8 activations: plain numbers never do."""
    return activations == "int8" and not weight.is_float


def gemv_kernel(weight: Matrix, int8: bool, tokens: int, n: int, routed: bool) -> tuple[Kernel, int]:
    """The kernel of a matrix with n rows for this many tokens at a time, and the blocks it needs for the rows."""
    if weight.is_float:
        return float_gemv(weight.kind, tokens, routed), ceil(n, WARPS)
    split = split_of(n, weight.pitch // UNIT) if int8 else 1
    return gemv(weight.kind, int8, tokens, split, routed), ceil(n * split, WARPS)


def gemv_args(y: Ref, y_stride: int, operand: Operand, weight: Matrix, bias: Ref | None, ids: Ref | None, counts: Ref,
              field: int, n: int, routes: int) -> tuple:
    """Arguments of `gemv_kernel`. ids, routes: which matrix each row of y wants, and rows of y for one of x."""
    tail = (bias, int(bias is not None), ids, counts, field, n)
    if weight.is_float:
        return y, y_stride, operand.x, operand.pitch, weight.parts["codes"], *tail, weight.pitch, routes
    planes = (weight.parts.get(name) for name in PARTS)
    return y, y_stride, operand.x, operand.aux, *planes, *tail, weight.pitch // UNIT, routes
