"""Mixture of experts (ops `moe_route`, `expert_scale`, `expert_linear`, `expert_combine`).

A route is a pair of a token and one of its experts. Small batches use the matrix-vector kernels of `linear`: one pass
over the expert's matrix for each route. In larger batches, the routes are sorted by expert (group.py), and tensor cores
multiply tiles of routes of one expert each, in one launch for all experts (a grouped GEMM).
"""

from functools import partial

from numflow.cuda.device.call import N_ROUTES, N_TOKENS, Call, Sizes, ceil, per_row
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.parameters import IntRows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.code_gemm import UNITS, code_operand
from numflow.cuda.linear.gemm import few, is_few
from numflow.cuda.linear.linear import FEW, gemv_args, gemv_kernel, uses_int8
from numflow.cuda.linear.parameters import NOTHING, Shape, bias_of, planes_of
from numflow.cuda.linear.tensor_memory_gemm import gemm_for, rows_for
from numflow.cuda.linear.wgmma_gemm import TOKENS as TILE_TOKENS
from numflow.cuda.moe.group import absent, groups, matrices_of_routes
from numflow.cuda.moe.route import MOST_EXPERTS, MOST_GROUPS, Routing, route_kernel
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.operand import UNIT, Operand
from numflow.errors import NetworkError
from numflow.ops import Step, param

THREADS = 128


def moe_route(step: Step, ctx) -> list[Call]:
    """logits f32 [T, X], experts f32 [T, S], bias, scales f32 [X] -> ids i32 [T, S], gates f32 [T, S]."""
    (logits, *given), (ids, gates) = step.inputs, step.outputs
    if logits.width > MOST_EXPERTS or param(step, "groups") > MOST_GROUPS:
        raise NetworkError(f"{step}: device 'cuda' routes to at most {MOST_EXPERTS} experts in {MOST_GROUPS} groups")
    bias, scales = (ctx.vector(step.weights[role]) if role in step.weights else None for role in ("bias", "scales"))
    route = route_kernel(param(step, "score"), bias is not None, param(step, "top_groups") < param(step, "groups"),
                          scales is not None, bool(given))
    rule = Routing(param(step, "groups"), param(step, "top_groups"), param(step, "group_best"),
                   int(param(step, "normalize")), param(step, "least_sum"), param(step, "scale"),
                   2 * param(step, "jitter"))
    return [per_row(step, route, N_TOKENS, 1, IntRows(*ctx.view(ids)), ctx.view(gates), ctx.view(logits),
                    ctx.view(given[0] if given else logits), bias, ctx.batch.counts, logits.width, ids.width, scales,
                    rule)]


def expert_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T or T * S, K], ids i32 [T, S], weight [X * N, K], bias f32 [X * N] -> y f32 [T * S, N]."""
    weight, routes_per_token = ctx.matrix(step.weights["weight"]), step.inputs[1].width
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    if weight.kind == "f32" or ctx.activations == "f32":
        return _few(step, ctx, weight, bias, "all")
    # With no more routes than experts, hardly any matrix is read twice.
    limit = min(FEW, max(weight.groups // routes_per_token, 1))
    few, many = ("few", "many") if limit == FEW else (f"up to {limit}", f"above {limit}")
    return [*(call.only(lambda sizes: sizes.rows[N_TOKENS] <= limit) for call in _few(step, ctx, weight, bias, few)),
            *(call.only(lambda sizes: sizes.rows[N_TOKENS] > limit) for call in _many(step, ctx, weight, bias, many))]


def _few(step: Step, ctx, weight: Matrix, bias: Ref | None, runs: str) -> list[Call]:
    """Matrix-vector kernels: each route makes one pass over its expert's matrix."""
    (x, ids), (y,) = step.inputs, step.outputs
    int8, routes = uses_int8(weight, ctx.activations), _routes_of(step, ctx)
    operand = ctx.operand(x, "int8" if int8 else "rows" if weight.is_float else "f32", runs)
    matrices, calls = matrices_of_routes(ctx, ids, param(step, "first"), weight.groups, runs)
    gemv, blocks = gemv_kernel(weight, int8, 1, y.width, True)
    args = gemv_args(ctx.view(y), operand, weight, bias, matrices, ctx.batch.counts, N_ROUTES, y.width, routes,
                     floats=ctx.view(x))

    def multiply(sizes: Sizes) -> Launch:
        return Launch(gemv, (blocks, sizes.rows[N_ROUTES], 1), args)

    return [*operand.calls, *calls, Call(step, multiply)]


def _many(step: Step, ctx, weight: Matrix, bias: Ref | None, runs: str) -> list[Call]:
    """Grouped GEMM on tensor cores: tiles of routes of one expert each."""
    (x, ids), (y,), first = step.inputs, step.outputs, param(step, "first")
    grouping = groups(ctx, ids, first, weight.groups, runs)
    shape = Shape(ctx.batch.counts, field=N_ROUTES, n=y.width, units=weight.pitch // UNIT)
    kind = "bf16" if weight.kind == "bf16" else "f16"

    def multiply(operand: Operand, sizes: Sizes) -> Launch:
        tile, apart, codes = grouping.tile(sizes), weight.outliers > 0, operand.kind if operand.kind in UNITS else ""
        args = (ctx.view(y), None, operand.x, operand.aux, planes_of(weight), bias_of(bias), shape, grouping.tiles,
                grouping.order, int(_routes_of(step, ctx) > 1))
        grid = ceil(y.width, rows_for(ctx.device, weight.kind, tile, apart, codes)), grouping.most_tiles(sizes), 1
        if is_few(weight.kind, tile, apart):
            return Launch(few(weight.kind, y.width, True), grid, (*args, NOTHING))
        return Launch(gemm_for(ctx.device, weight.kind, tile, True, apart, codes), grid,
                      (*args, weight.parts.get("outliers"), weight.outliers))

    def of_kind(kind: str, runs: str) -> list[Call]:
        operand = ctx.operand(x, kind, runs)
        return [*operand.calls, Call(step, partial(multiply, operand))]

    calls = [*grouping.calls]
    if codes := code_operand(weight, ctx.activations):
        for operand_kind, wide in (kind, False), (codes, True):
            calls += (call.only(lambda sizes, wide=wide: (grouping.tile(sizes) == TILE_TOKENS) == wide)
                      for call in of_kind(operand_kind, f"{runs}, by tiles"))
    else:
        calls += of_kind(kind, runs)
    if "first" in step.params:  # expert parallelism: routes to experts of other devices are zero
        calls.append(per_row(None, absent, N_ROUTES, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(ids),
                             ctx.batch.counts, ids.width, first, weight.groups, y.width))
    return calls


def _routes_of(step: Step, ctx) -> int:
    """Number of rows of y for each row of x."""
    x, ids = step.inputs
    return ids.width if ctx.rows(x) == ctx.rows(ids) else 1


def expert_scale(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], gates f32 [T, S] -> y f32 [T * S, D]."""
    (x, gates), (y,) = step.inputs, step.outputs
    return [per_row(step, _scale, N_ROUTES, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x), *ctx.view(gates),
                    ctx.batch.counts, y.width, gates.width)]


def expert_combine(step: Step, ctx) -> list[Call]:
    """x f32 [T * S, D], gates f32 [T, S] -> y f32 [T, D]."""
    (x, gates), (y,) = step.inputs, step.outputs
    return [per_row(step, _combine, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x), *ctx.view(gates),
                    ctx.batch.counts, y.width, gates.width, int(param(step, "weighted")))]


@kernel("expert_scale", THREADS)
def _scale(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, gates: f32.ptr, gates_stride: u32, counts: i32.ptr,
           width: u32, routes: u32):
    route, column = block_x(), block_y() * 128 + thread_index()
    if route >= counts[N_ROUTES] or column >= width:
        return
    t = u32(route // routes)
    y[route * y_stride + column] = gates[t * gates_stride + route % routes] * x[t * x_stride + column]


@kernel("expert_combine", THREADS)
def _combine(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, gates: f32.ptr, gates_stride: u32, counts: i32.ptr,
             width: u32, routes: u32, weighted: u32):
    t, column = block_x(), block_y() * 128 + thread_index()
    if t >= counts[N_TOKENS] or column >= width:
        return
    total, s = f32(0), u32(0)
    while s < routes:
        gate = gates[t * gates_stride + s] if weighted != 0 else f32(1)
        total += gate * x[(t * routes + s) * x_stride + column]
        s = u32(s + 1)
    y[t * y_stride + column] = total
