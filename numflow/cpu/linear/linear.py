"""`linear`, `expert_linear` and `head_linear` for every type of weight.

linear         y [T, N] = x [T, K] @ weight[N, K].T + bias[N]
expert_linear  row (t, s) of y [T * S, N]: the same with the matrix of expert ids[t, s]
head_linear    head h of y: the same with matrix h and head h of x, by the kernels of expert_linear

linear_kernels.py makes a kernel for every pair of a scheme and a kind of activations.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from numflow.cpu.linear import outlier_calls
from numflow.cpu.linear.activations import (
    AUTO,
    BF16,
    F32,
    INT8,
    INT16,
    NAMES,
    OPERANDS,
    TOKEN_TILE,
    Operand,
    operand_bytes,
)
from numflow.cpu.linear.slots import EXPERT_LINEAR, LINEAR
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, Kernel
from numflow.cpu.weights.layout import ROWS, SCHEMES, Packed, Planned, panel_bytes, tiles_of
from numflow.ops import Network, Step, param


def _kernel_name(op: str, kind: str, operand: int, ragged: bool = False) -> str:
    """The kernel's name for an op, a scheme and an operand; int8 and pairs of int8 share a kernel."""
    if ragged:
        return f"{op}_{kind}_ragged"
    all_float = SCHEMES[kind].is_float and operand == F32
    return f"{op}_{kind}" + ("" if all_float else f"_{NAMES[_kernel_operand(operand)]}")


def _kernel_operand(operand: int) -> int:
    """The operand kind of the kernel: a pair of int8 is two int8 rows to a kernel."""
    return INT8 if operand == INT16 else operand


def _operands(scheme) -> tuple[tuple[int, bool], ...]:
    """(operand, ragged) of each kernel of a scheme; ragged: rows end with half a unit."""
    kinds = (F32, BF16) if scheme.is_float else (F32,) if scheme.floats_only else (INT8, F32)
    return (*((operand, False) for operand in kinds), *([(F32, True)] if scheme.ends_in_halves else []))


STAMPS = {_kernel_name(op, kind, operand, ragged): (op, (kind, operand, ragged)) for op in ("linear", "expert_linear")
          for kind, scheme in SCHEMES.items() for operand, ragged in _operands(scheme)}
_CODE = Code("numflow.cpu.linear.linear_kernels", "numflow.cpu.linear.expert_routes_kernels",
             "numflow.cpu.linear.activations_kernels", stamps=STAMPS)
_CACHE = 512 << 10  # bytes of activations that stay in a core's L2 cache while a matrix is read


def linear(step: Step, ctx, maker: Step | None = None, add: Step | None = None) -> list[Call]:
    """x f32 [T, K], weight packed [N, K], bias f32 [N] -> y f32 [T, N].

    maker: the step that computes x, fused into the making of the operand.
    add:   the `add` step after this one, fused into the store; y is then the output of `add`.
    """
    x, y = step.inputs[0], step.outputs[0]
    weight = ctx.packed(step.weights["weight"])
    kind = operand_of(weight, activations_of(step, ctx.network, ctx.activations))
    operand = ctx.operand(x, kind, maker)
    floats = ctx.operand(x, F32, maker) if weight.outliers is not None and kind != F32 else Operand(operand.x, 0, ())
    addend: dict[str, Any] = {"addend": 0, "addend_stride": 0, "factor": 0.0}
    if add:
        addend, y = {**ctx.strided("addend", add.inputs[0]), "factor": float(param(add, "scale"))}, add.outputs[0]
    calls = [*operand.calls, *(replace(call, joined=bool(operand.calls)) for call in floats.calls), Call.named(
        step, kernel_of("linear", weight, kind), LINEAR, header=ctx.header, rows_field=ctx.rows(y),
        x=operand.x, aux=operand.aux, **_matrix(ctx, weight, x.width, kind), bias=_bias(ctx, step, weight),
        **ctx.strided("y", y), rows=y.width, token_block=token_block(x.width, kind), **addend,
        pairs=int(kind == INT16))]
    if weight.outliers is not None:
        calls.append(outlier_calls.added(step, ctx, weight.outliers, floats.x, token_block(x.width, F32)))
    return calls


def expert_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T or T * S, K], ids i32 [T, S], weight packed [X * N, K], bias f32 [X * N] -> y f32 [T * S, N]."""
    (x, ids), y = step.inputs, step.outputs[0]
    weight = ctx.packed(step.weights["weight"])
    kind = operand_of(weight, activations_of(step, ctx.network, ctx.activations))
    routes, experts = ctx.capacity["routes"], weight.groups
    # Calls run one after the other, so all expert steps share this memory.
    groups = ctx.scratch("routes by expert", group_bytes(routes, experts))
    x_size, aux_size = operand_bytes(operand_rows(routes), x.width, kind)
    operand, aux = ctx.scratch("operand of routes", x_size), ctx.scratch("units of routes", aux_size) if aux_size else 0
    operands, sparse = {f"routes_to_{NAMES[kind]}": operand}, weight.outliers
    if sparse is not None and kind != F32:
        size, _ = operand_bytes(operand_rows(routes), x.width, F32)
        operands["routes_to_f32"] = ctx.scratch("operand of routes", size)
    shared = ids.width if ctx.rows(x) == ctx.rows(ids) else 1
    first = param(step, "first")
    zeros = [Call.of(None, _CODE.kernel("zero_remote_routes"), ctx.header, ctx.rows(ids), *ctx.view(ids), ids.width,
                     first, experts, *ctx.view(y), y.width)]
    calls = [
        *(zeros if "first" in step.params else ()),
        Call.of(None, _CODE.kernel("group_routes"), ctx.header, ctx.rows(ids), *ctx.view(ids), ids.width, first,
                experts, routes, groups),
        *(Call.of(None, _CODE.kernel(kernel), *ctx.view(x), shared, x.width, target, aux, experts, routes, groups,
                  joined=target is not operand) for kernel, target in operands.items()),
        Call.named(step, kernel_of("expert_linear", weight, kind), EXPERT_LINEAR, header=ctx.header,
                   rows_field=ctx.rows(y), x=operand, aux=aux, **_matrix(ctx, weight, x.width, kind),
                   bias=_bias(ctx, step, weight), **ctx.strided("y", y), rows=y.width, token_block=0, experts=experts,
                   capacity=routes, groups=groups, pairs=int(kind == INT16)),
    ]
    if sparse is not None:
        floats = operands["routes_to_f32"]
        calls.append(outlier_calls.added_to_experts(step, ctx, sparse, floats, experts, routes, groups))
    return calls


def head_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, H * K], weight packed [H * N, K] -> y f32 [T, H * N].

    The kernels of expert_linear do it: the operand holds the rows of head 0, then the rows of head 1 and so on.
    """
    x, y, heads = step.inputs[0], step.outputs[0], param(step, "heads")
    weight, columns, rows = ctx.packed(step.weights["weight"]), x.width // heads, y.width // heads
    capacity = heads * -(-ctx.max_rows(x) // TOKEN_TILE) * TOKEN_TILE
    calls: list = []
    made = {}
    activations = activations_of(step, ctx.network, ctx.activations)
    for kind in operand_kinds(weight, activations):
        x_size, aux_size = operand_bytes(capacity, columns, kind)
        made[kind] = ctx.scratch("operand of heads", x_size), ctx.scratch("units of heads", aux_size) if aux_size else 0
        calls.append(Call.of(None, _CODE.kernel(f"heads_to_{NAMES[kind]}"), ctx.header, ctx.rows(x),
                             *ctx.view(x), columns, *made[kind], heads, joined=bool(calls)))
    kind = operand_of(weight, activations)
    operand, aux = made[kind]
    calls.append(Call.named(step, kernel_of("expert_linear", weight, kind), EXPERT_LINEAR, header=ctx.header,
                            rows_field=ctx.rows(y), x=operand, aux=aux, **_matrix(ctx, weight, columns, kind), bias=0,
                            **ctx.strided("y", y), rows=rows, token_block=0, experts=heads, capacity=0, groups=0,
                            pairs=int(kind == INT16)))
    if weight.outliers is not None:
        calls.append(outlier_calls.added_to_heads(step, ctx, weight.outliers, made[F32][0], heads))
    return calls


def kernel_of(op: str, weight: Packed, operand: int) -> Kernel:
    """The kernel of `linear` or `expert_linear` for a matrix and an operand."""
    return kernel_named(op, weight.kind, operand, weight.is_ragged)


def kernel_named(op: str, kind: str, operand: int, ragged: bool = False) -> Kernel:
    """The same for a scheme's name; ragged: rows of the matrix end with half a unit."""
    return _CODE.kernel(_kernel_name(op, kind, operand, ragged))


def activations_of(step: Step, network: Network, activations: str) -> str:
    """The kind of activations of a product. "auto": pairs of int8 where only rows whose logits are wanted go on, int8
    elsewhere."""
    if activations != AUTO:
        return activations
    return "int16" if network.buffers[step.inputs[0].buffer].rows == "logits" else "int8"


def operand_of(weight: Packed | Planned, activations: str) -> int:
    """The operand kind for a matrix: float32 for codes that are 8-bit floats, pairs of bfloat16 for an even width
    only."""
    for_codes, for_floats = OPERANDS[activations]
    if not weight.floats_only:
        return for_codes
    return for_floats if SCHEMES[weight.kind].is_float and weight.shape[1] % 2 == 0 else F32


def operand_kinds(weight: Packed | Planned, activations: str) -> tuple[int, ...]:
    """All operand kinds that a matrix needs; its outliers are multiplied with float32 activations."""
    kind = operand_of(weight, activations)
    return (kind, F32) if kind != F32 and weight.outliers is not None else (kind,)


def can_add(weight: Packed | Planned) -> bool:
    """Whether the `add` after a linear can be fused with it: not if outliers are added to the output afterwards."""
    return weight.outliers is None


def token_block(columns: int, kind: int) -> int:
    """Rows of an operand that fit the cache, a whole number of token tiles."""
    tile = sum(operand_bytes(TOKEN_TILE, columns, _kernel_operand(kind)))
    return max(1, _CACHE // tile) * TOKEN_TILE


def _matrix(ctx, weight: Packed, columns: int, kind: int) -> dict[str, Any]:
    """Slot values of a matrix of `columns` columns, with memory for one panel (weights/panel.py) per thread."""
    code_bytes, header_bytes = weight.scheme.tile_bytes(columns)
    panel = panel_bytes(weight.kind, columns, kind == BF16) if kind != F32 else 0
    return {"codes": weight.codes, "headers": weight.headers, "code_bytes": code_bytes, "header_bytes": header_bytes,
            "columns": columns, "panel": ctx.scratch("panel", ctx.n_threads * panel) if panel else 0,
            "panel_bytes": panel}


def group_bytes(routes: int, experts: int) -> int:
    """Bytes of the groups (expert_routes_kernels.py) of up to `routes` routes."""
    return 4 * (routes + 2 * (experts + 1))


def operand_rows(routes: int) -> int:
    """Most operand rows of `routes` routes: the last token tile of an expert may be up to 3/5 empty."""
    return 2 * routes


def _bias(ctx, step: Step, weight: Packed) -> np.ndarray | int:
    """The step's bias as float32 [groups, whole tiles * 16], or 0."""
    if "bias" not in step.weights:
        return 0
    rows = weight.shape[0] // weight.groups
    bias = aligned((weight.groups, tiles_of(rows) * ROWS), np.float32)
    bias[:, :rows] = np.reshape(ctx.vector(step.weights["bias"]), (weight.groups, rows))
    return bias
