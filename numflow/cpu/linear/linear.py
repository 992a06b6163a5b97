"""`linear`, `expert_linear` and `head_linear` for every type of weight.

linear         y [T, N] = x [T, K] @ weight[N, K].T + bias[N]
expert_linear  y [T * S, N] row (t, s) = the same with the matrix of expert ids[t, s]
head_linear    head h of y = the same with matrix h and head h of x, by the kernels of expert_linear

A kernel for every scheme and kind of activations is a stamp of linear_kernels.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from numflow.cpu.linear import outlier_calls
from numflow.cpu.linear.activations import NAMES, PIECES, TOKEN_TILE, Operand, operand_bytes
from numflow.cpu.linear.expert_routes import group_bytes, operand_rows
from numflow.cpu.linear.slots import EXPERT_LINEAR, LINEAR
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, Kernel
from numflow.cpu.weights.layout import ROWS, SCHEMES, Packed, tiles_of
from numflow.ops import Step, param


def _kernel_name(op: str, kind: str, int8: bool) -> str:
    """The name of the kernel of an op for a scheme and int8 or float32 activations; plain numbers meet float32 only."""
    return f"{op}_{kind}{'' if SCHEMES[kind].is_float else '_int8' if int8 else '_f32'}"


STAMPS = {_kernel_name(op, kind, int8): (op, (kind, int8)) for op in ("linear", "expert_linear")
          for kind, scheme in SCHEMES.items() for int8 in ((False,) if scheme.floats_only else (True, False))}
_CODE = Code("numflow.cpu.linear.linear_kernels", "numflow.cpu.linear.expert_routes_kernels",
             "numflow.cpu.linear.activations_kernels", stamps=STAMPS)
_CACHE = 512 << 10  # bytes of activations that stay in a core's second cache while a matrix passes


def linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, K], weight packed [N, K], bias f32 [N] -> y f32 [T, N].

    ctx.add: the step `add` that is done at once, so that y is its output.
    """
    x, y = step.inputs[0], step.outputs[0]
    weight = ctx.packed(step.weights["weight"])
    pieces = pieces_of(weight, ctx.activations)
    operand, add = ctx.operand(x, pieces), ctx.add
    floats = ctx.operand(x, 0) if weight.outliers is not None and pieces else Operand(operand.x, 0, ())
    addend: dict[str, Any] = {"addend": 0, "addend_stride": 0, "factor": 0.0}
    if add:
        addend, y = {**ctx.strided("addend", add.inputs[0]), "factor": float(param(add, "scale"))}, add.outputs[0]
    calls = [*operand.calls, *(replace(call, joined=bool(operand.calls)) for call in floats.calls), Call.named(
        step, kernel_of("linear", weight.kind, pieces > 0), LINEAR, header=ctx.header, rows_field=ctx.rows(y),
        x=operand.x, aux=operand.aux, **_matrix(weight, x.width), bias=_bias(ctx, step, weight), **ctx.strided("y", y),
        rows=y.width, token_block=token_block(x.width, pieces), **addend, pairs=pieces // 2)]
    if weight.outliers is not None:
        calls.append(outlier_calls.added(step, ctx, weight.outliers, floats.x, token_block(x.width, 0)))
    return calls


def expert_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T or T * S, K], ids i32 [T, S], weight packed [X * N, K], bias f32 [X * N] -> y f32 [T * S, N]."""
    (x, ids), y = step.inputs, step.outputs[0]
    weight = ctx.packed(step.weights["weight"])
    pieces = pieces_of(weight, ctx.activations)
    routes, experts = ctx.capacity["routes"], weight.groups
    # One after the other, so that all expert steps share this memory.
    groups = ctx.scratch("routes by expert", group_bytes(routes, experts))
    x_size, aux_size = operand_bytes(operand_rows(routes), x.width, pieces)
    operand, aux = ctx.scratch("operand of routes", x_size), ctx.scratch("units of routes", aux_size) if pieces else 0
    operands, sparse = {f"routes_to_{NAMES[pieces]}": operand}, weight.outliers
    if sparse is not None and pieces:
        size, _ = operand_bytes(operand_rows(routes), x.width, 0)
        operands["routes_to_f32"] = ctx.scratch("operand of routes", size)
    shared = ids.width if ctx.rows(x) == ctx.rows(ids) else 1
    first = param(step, "first")
    others = [Call.of(None, _CODE.kernel("zero_others"), ctx.header, ctx.rows(ids), *ctx.view(ids), ids.width, first,
                      experts, *ctx.view(y), y.width)]
    calls = [
        *(others if "first" in step.params else ()),
        Call.of(None, _CODE.kernel("group_routes"), ctx.header, ctx.rows(ids), *ctx.view(ids), ids.width, first,
                experts, routes, groups),
        *(Call.of(None, _CODE.kernel(kernel), *ctx.view(x), shared, x.width, to, aux, experts, routes, groups,
                  joined=to is not operand) for kernel, to in operands.items()),
        Call.named(step, kernel_of("expert_linear", weight.kind, pieces > 0), EXPERT_LINEAR, header=ctx.header,
                   rows_field=ctx.rows(y), x=operand, aux=aux, **_matrix(weight, x.width),
                   bias=_bias(ctx, step, weight), **ctx.strided("y", y), rows=y.width, token_block=0, experts=experts,
                   capacity=routes, groups=groups, pairs=pieces // 2),
    ]
    if sparse is not None:
        floats = operands["routes_to_f32"]
        calls.append(outlier_calls.added_to_experts(step, ctx, sparse, floats, experts, routes, groups))
    return calls


def head_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, H * K], weight packed [H * N, K] -> y f32 [T, H * N].

    By the kernels of experts, which find the rows of a head one after the other in the operand.
    """
    x, y, heads = step.inputs[0], step.outputs[0], param(step, "heads")
    weight, columns, rows = ctx.packed(step.weights["weight"]), x.width // heads, y.width // heads
    room = heads * -(-ctx.room(x) // TOKEN_TILE) * TOKEN_TILE
    calls: list = []
    made = {}
    for kind in operand_kinds(weight, ctx.activations):
        x_size, aux_size = operand_bytes(room, columns, kind)
        made[kind] = ctx.scratch("operand of heads", x_size), ctx.scratch("units of heads", aux_size) if kind else 0
        calls.append(Call.of(None, _CODE.kernel(f"heads_to_{NAMES[kind]}"), ctx.header, ctx.rows(x),
                             *ctx.view(x), columns, *made[kind], heads, joined=bool(calls)))
    pieces = pieces_of(weight, ctx.activations)
    operand, aux = made[pieces]
    calls.append(Call.named(step, kernel_of("expert_linear", weight.kind, pieces > 0), EXPERT_LINEAR, header=ctx.header,
                            rows_field=ctx.rows(y), x=operand, aux=aux, **_matrix(weight, columns), bias=0,
                            **ctx.strided("y", y), rows=rows, token_block=0, experts=heads, capacity=0, groups=0,
                            pairs=pieces // 2))
    if weight.outliers is not None:
        calls.append(outlier_calls.added_to_heads(step, ctx, weight.outliers, made[0][0], heads))
    return calls


def kernel_of(op: str, kind: str, int8: bool) -> Kernel:
    """The kernel of `linear` or `expert_linear` for a scheme and for int8 or float32 activations."""
    return _CODE.kernel(_kernel_name(op, kind, int8))


def pieces_of(weight: Packed, activations: str) -> int:
    """Number of int8 for each activation that meets a matrix; 0 for a matrix of floats, which meets float32."""
    return 0 if weight.floats_only else PIECES[activations]


def operand_kinds(weight: Packed, activations: str) -> tuple[int, ...]:
    """The operands a matrix meets, as `pieces_of` counts; outliers meet float32 ones."""
    pieces = pieces_of(weight, activations)
    return (pieces, 0) if pieces and weight.outliers is not None else (pieces,)


def can_add(weight: Packed) -> bool:
    """Whether a linear can do the `add` behind it: not where outliers are still to be added to its output."""
    return weight.outliers is None


def token_block(columns: int, pieces: int) -> int:
    """Rows of an operand that stay in the cache: a whole number of token tiles."""
    tile = sum(operand_bytes(TOKEN_TILE, columns, min(pieces, 1)))
    return max(1, _CACHE // tile) * TOKEN_TILE


def _matrix(weight: Packed, columns: int) -> dict[str, Any]:
    """A matrix of so many columns as values of slots."""
    code_bytes, head_bytes = weight.scheme.tile_bytes(columns)
    return {"codes": weight.codes, "heads": weight.headers, "code_bytes": code_bytes, "head_bytes": head_bytes,
            "columns": columns}


def _bias(ctx, step: Step, weight: Packed) -> np.ndarray | int:
    """The step's bias as float32 [groups, whole tiles * 16], or 0."""
    if "bias" not in step.weights:
        return 0
    rows = weight.shape[0] // weight.groups
    bias = aligned((weight.groups, tiles_of(rows) * ROWS), np.float32)
    bias[:, :rows] = np.reshape(ctx.vector(step.weights["bias"]), (weight.groups, rows))
    return bias
