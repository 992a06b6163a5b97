"""Matrix products (op `linear`): y [T, N] = x [T, K] @ weight[N, K].T + bias[N]."""

from numflow.cuda.call import Call, ceil
from numflow.cuda.device import Launch, Ref
from numflow.cuda.kernel import Kernel
from numflow.cuda.layout import Matrix
from numflow.cuda.linear_float import float_gemv
from numflow.cuda.linear_gemv import TOKENS, WARPS, gemv, split_of
from numflow.cuda.operand import UNIT, Operand
from numflow.cuda.pack import PARTS
from numflow.ops import Step


def linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, K], weight [N, K], bias f32 [N] -> y f32 [T, N]."""
    (x,), (y,) = step.inputs, step.outputs
    weight, field = ctx.matrix(step.weights["weight"]), ctx.rows(y)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8 = uses_int8(weight, ctx.activations)
    operand = ctx.operand(x, "int8" if int8 else "rows" if weight.is_float else "f32")

    def plan(sizes):
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), TOKENS[-1])
        args = gemv_args(*ctx.view(y), operand, weight, bias, None, ctx.batch.counts, field, y.width, 1)
        chosen, blocks = gemv_kernel(weight, int8, tile, y.width, False)
        return Launch(chosen, (blocks, ceil(rows, tile), 1), args)
    return [*operand.calls, Call(step, plan)]


def uses_int8(weight: Matrix, activations: str) -> bool:
    """Whether a matrix meets int8 activations: plain numbers never do."""
    return activations == "int8" and not weight.is_float


def gemv_kernel(weight: Matrix, int8: bool, tokens: int, n: int, routed: bool) -> tuple[Kernel, int]:
    """The kernel of a matrix with n rows for this many tokens at a time, and the blocks it needs for the rows."""
    if weight.is_float:
        return float_gemv(weight.kind, tokens, routed), ceil(n, WARPS)
    split = split_of(n, weight.pitch // UNIT)
    return gemv(weight.kind, int8, tokens, split, routed), ceil(n * split, WARPS)


def gemv_args(y: Ref, y_stride: int, operand: Operand, weight: Matrix, bias: Ref | None, ids: Ref | None, counts: Ref,
              field: int, n: int, routes: int) -> tuple:
    """Arguments of `gemv_kernel`. ids, routes: which matrix each row of y wants, and rows of y for one of x."""
    tail = (bias, int(bias is not None), ids, counts, field, n)
    if weight.is_float:
        return y, y_stride, operand.x, operand.pitch, weight.parts["codes"], *tail, weight.pitch, routes
    planes = (weight.parts.get(name) for name in PARTS)
    return y, y_stride, operand.x, operand.aux, *planes, *tail, weight.pitch // UNIT, routes
