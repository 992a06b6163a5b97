"""Matrix products (op `linear`), the choice of kernels and grids: y [T, N] = x [T, K] @ weight[N, K].T + bias[N].

For up to 4 tokens, a matrix-vector kernel reads every row of the matrix once (gemv.py, float_gemv.py). More tokens use
tensor cores (gemm.py). For float32 arithmetic, matrix-vector kernels take 8 tokens at a time.
"""

from collections.abc import Callable

from numflow.cuda.device.call import Call, Sizes, ceil
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.elementwise import act
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.linear import few_gemm
from numflow.cuda.linear.code_gemm import UNITS, code_operand
from numflow.cuda.linear.float_gemv import float_gemv
from numflow.cuda.linear.gemm import few, gemm_sum, is_few, partial_sums, tile_of
from numflow.cuda.linear.gemv import TOKENS, WARPS, gemv, split_of
from numflow.cuda.linear.parameters import (
    ALONE,
    AT_ONCE,
    NOTHING,
    Late,
    Residual,
    Shape,
    apart_of,
    bias_of,
    planes_of,
    units_of,
)
from numflow.cuda.linear.tensor_memory_gemm import cluster_for, gemm_for, rows_for, split_for
from numflow.cuda.linear.wgmma_gemm import TOKENS as TILE_TOKENS
from numflow.cuda.weights.layout import Kept, Matrix
from numflow.cuda.weights.operand import UNIT, Operand
from numflow.ops import Step, param

FEW = 4  # tokens that matrix-vector kernels are for: with more, instructions bind them, not memory
_SOME = TILE_TOKENS // 2  # tokens that a tile of wgmma_gemm.py is not for
RUNS = {"few": (0, FEW), "many": (FEW + 1, 1 << 32),                      # least and most tokens by name of runs
        "some": (FEW + 1, _SOME), "tiles": (_SOME + 1, 1 << 32)}          # "many" in two, where tokens may be codes


def linear(step: Step, ctx, add: Step | None = None, late: float | None = None,
           unscaled: Callable[[Sizes], bool] | None = None) -> list[Call]:
    """x f32 [T, K], weight [N, K], bias f32 [N] -> y f32 [T, N].

    add:  a fused step y = a + scale * product; its first input is a, and no other step reads the product.
    late: eps of the norm of x whose scale this product applies for few tokens (unit.py). unscaled: as in `many`.
    """
    (x,), (y,) = step.inputs, step.outputs
    weight, field = ctx.matrix(step.weights["weight"]), ctx.rows(y)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8, exact = uses_int8(weight, ctx.activations), is_exact(weight, ctx.activations)
    operand = ctx.operand(x, *demands(weight, ctx.activations)[0])
    to = ctx.view(add.outputs[0] if add else y)
    residual = Residual(*ctx.view(add.inputs[0]), factor=param(add, "scale"), present=1) if add else None
    norm = ctx.late(x, late)

    def few(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), TOKENS[-1])
        args = gemv_args(to, operand, weight, bias, None, ctx.batch.counts, field, y.width, 1, residual, norm,
                         ctx.view(x))
        chosen, blocks = gemv_kernel(weight, int8, tile, y.width, False)
        return Launch(chosen, (blocks, ceil(rows, tile), 1), args)

    calls = [*operand.calls, Call(step, few)]
    return calls if exact else [*limited(calls, "few", field), *many(step, ctx, add, unscaled=unscaled)]


def many(step: Step, ctx, add: Step | None = None, act_mul: Step | None = None,
         unscaled: Callable[[Sizes], bool] | None = None) -> list[Call]:
    """The calls of `linear` for more than a few tokens.

    act_mul:  a fused step on the results, in runs for which `gates` holds; it writes its float16 operand.
    unscaled: the sizes for which the operand comes from such a fused product, without a scale.
    """
    (x,), weight, field = step.inputs, ctx.matrix(step.weights["weight"]), ctx.rows(step.outputs[0])
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    calls = []
    for kind, runs in demands(weight, ctx.activations):
        if runs != "few":
            made = _many(step, ctx, weight, bias, field, ctx.operand(x, kind, runs), add, act_mul, unscaled)
            calls += limited(made, runs, field)
    return calls


def gates(product: Step, ctx) -> Callable[[Sizes], bool]:
    """The sizes for which the kernel of a product of gate and up computes the act_mul that follows."""
    weight, field = ctx.matrix(product.weights["weight"]), ctx.rows(product.outputs[0])
    return lambda sizes: sizes.rows[field] > FEW and is_few(weight.kind, tile_of(sizes.rows[field]),
                                                            weight.outliers > 0)


def takes_unscaled(weight: Kept) -> bool:
    """Whether the kernel of a matrix repeats products in float32 if its float16 operand of up to 16 tokens is not
    finite."""
    return is_few(weight.kind, few_gemm.TOKENS, weight.outliers > 0)


def demands(weight: Kept, activations: str) -> tuple[tuple[str, str], ...]:
    """The forms of input that a linear reads: (kind of operand, name of the runs) (Context.operand)."""
    kind = "int8" if uses_int8(weight, activations) else "rows" if weight.is_float else "f32"
    if is_exact(weight, activations):
        return ((kind, "all"),)
    few = ((kind, "few"), ("rows", "few")) if weight.outliers else ((kind, "few"),)
    many = "bf16" if weight.kind == "bf16" else "f16"
    first, *wide = more_runs(activations)
    return *few, (many, first), *((code_operand(weight, activations) or many, runs) for runs in wide)


def more_runs(activations: str) -> tuple[str, ...]:
    """Names of the runs (RUNS) with more than a few tokens; the first has 16-bit operands."""
    return ("some", "tiles") if activations in ("fp8", "nvfp4") else ("many",)


def limited(calls: list[Call], runs: str, field: int) -> list[Call]:
    """The calls, restricted to the runs of this name (RUNS)."""
    if runs == "all":
        return calls
    least, most = RUNS[runs]
    return [call.only(lambda sizes: least <= sizes.rows[field] <= most) for call in calls]


def is_exact(weight: Kept, activations: str) -> bool:
    """Whether arithmetic is float32 for any number of tokens."""
    return weight.kind == "f32" or activations == "f32"


def _many(step: Step, ctx, weight: Matrix, bias: Ref | None, field: int, operand: Operand,
          added: Step | None, act_mul: Step | None, unscaled: Callable[[Sizes], bool] | None) -> list[Call]:
    """The calls on tensor cores. added: as `add` of linear; fused where partial sums or few tokens are written."""
    (x,), (y,), units, apart = step.inputs, step.outputs, weight.pitch // UNIT, weight.outliers > 0
    tiles, codes = ceil(units, UNITS.get(operand.kind, 1)), operand.kind if operand.kind in UNITS else ""
    partial = ctx.scratch("parts of sums", 4 * partial_sums())
    residual = Residual(*ctx.view(added.inputs[0]), factor=param(added, "scale"), present=1) if added else ALONE
    to = ctx.view((added or act_mul or step).outputs[0])
    shape = Shape(ctx.batch.counts, field=field, n=y.width, units=units)
    args = (partial, operand.x, operand.aux, planes_of(weight), bias_of(bias), shape, None, None, 0)
    ends = NOTHING._replace(**residual._asdict())
    if act_mul:
        words, scales = ctx.place(act_mul.outputs[0], "f16")
        ends = NOTHING._replace(p=param(act_mul, "limit"), q=param(act_mul, "alpha"), words=words, scales=scales)

    def parts(sizes: Sizes) -> int:
        if act_mul and at_end(sizes):
            return 1
        return split_for(ctx.device, weight.kind, apart, y.width, sizes.rows[field], tiles, codes)

    def at_end(sizes: Sizes) -> bool:  # whether the product's epilogue can compute add or act_mul
        return is_few(weight.kind, tile_of(sizes.rows[field]), apart)

    def multiply(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = tile_of(rows)
        cluster = cluster_for(ctx.device, y.width, tile, apart, codes)
        across = ceil(ceil(y.width, rows_for(ctx.device, weight.kind, tile, apart, codes)), cluster) * cluster
        grid = across, ceil(rows, tile), parts(sizes)
        if at_end(sizes):
            gate = param(act_mul, "kind") if act_mul else ""
            end = ends if not unscaled or not unscaled(sizes) else ends._replace(
                rows=ctx.view(x).data, rows_stride=ctx.view(x).stride, unscaled=1)
            return Launch(few(weight.kind, y.width, gate=gate), grid, (to, *args, end))
        return Launch(gemm_for(ctx.device, weight.kind, tile, apart=apart, codes=codes), grid,
                      (ctx.view(y), *args, weight.parts.get("outliers"), weight.outliers), cluster=cluster)

    def join(sizes: Sizes) -> Launch:
        return Launch(gemm_sum, (ceil(y.width, 128), sizes.rows[field], 1), (
            ctx.view((added or step).outputs[0]), partial, parts(sizes), bias_of(bias), residual, shape))

    calls = [*operand.calls, Call(step, multiply), Call(step, join).only(lambda sizes: parts(sizes) > 1)]
    alone = act.add(added, ctx) if added else ()
    return [*calls, *(call.only(lambda sizes: parts(sizes) == 1 and not at_end(sizes)) for call in alone)]


def uses_int8(weight: Kept, activations: str) -> bool:
    """Whether a matrix is multiplied by int8 activations: never float matrices and codes of tables."""
    return activations != "f32" and not weight.floats_only


def gemv_kernel(weight: Matrix, int8: bool, tokens: int, n: int, routed: bool) -> tuple[Kernel, int]:
    """The matrix-vector kernel for a matrix with n rows and this many tokens at a time, and the blocks for all rows."""
    if weight.is_float:
        return float_gemv(weight.kind, tokens, routed), ceil(n, WARPS)
    split = split_of(n, weight.pitch // UNIT) if int8 else 1
    return gemv(weight.kind, int8, tokens, split, routed, weight.outliers > 0), ceil(n * split, WARPS)


def gemv_args(y: Rows, operand: Operand, weight: Matrix, bias: Ref | None, ids: Ref | None, counts: Ref, field: int,
              n: int, routes: int, residual: Residual | None = None, late: Late = AT_ONCE,
              floats: tuple[Ref | None, int] = (None, 0)) -> tuple:
    """Arguments of `gemv_kernel`. ids: index of the matrix for each row of y. routes: rows of y for each row of x.

    late: Context.late of x. floats: address and stride of x in float32, for outliers.
    """
    shape, added = Shape(counts, field=field, n=n, units=units_of(weight)), residual or ALONE
    if weight.is_float:
        return y, operand.x, operand.pitch, weight.parts["codes"], bias_of(bias), ids, shape, routes, added, late
    return (y, operand.x, operand.aux, planes_of(weight), bias_of(bias), ids, shape, routes, added, late,
            apart_of(weight, floats))
