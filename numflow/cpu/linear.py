"""`linear`: y [T, N] = x [T, K] @ weight[N, K].T + bias[N], for every type of weight (kernels: linear_kernels.py)."""

import numpy as np

from numflow.cpu.activations import TOKEN_TILE, operand_bytes
from numflow.cpu.kernel import Call
from numflow.cpu.layout import ROWS, Packed, tiles_of
from numflow.cpu.linear_kernels import KERNELS
from numflow.cpu.memory import aligned
from numflow.ops import Step

_CACHE = 512 << 10  # bytes of activations that stay in a core's second cache while a matrix passes


def linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, K], weight packed [N, K], bias f32 [N] -> y f32 [T, N]."""
    x, y = step.inputs[0], step.outputs[0]
    weight = ctx.packed(step.weights["weight"])
    int8 = uses_int8(weight, ctx.activations)
    operand = ctx.operand(x, int8)
    bias = padded_bias(ctx, step, weight)
    return [*operand.calls, Call.of(
        step, KERNELS[weight.kind, int8], ctx.header, ctx.rows(y), operand.x, operand.aux, weight.codes, weight.headers,
        *weight.scheme.tile_bytes(x.width), 0 if bias is None else bias, *ctx.view(y), y.width, x.width,
        token_block(x.width, int8))]


def uses_int8(weight: Packed, activations: str) -> bool:
    """Whether a matrix meets int8 activations: plain numbers never do."""
    return activations == "int8" and not weight.is_float


def token_block(columns: int, int8: bool) -> int:
    """Tokens whose operand stays in the cache: a whole number of token tiles."""
    tile = sum(operand_bytes(TOKEN_TILE, columns, int8))
    return max(1, _CACHE // tile) * TOKEN_TILE


def padded_bias(ctx, step: Step, weight: Packed) -> np.ndarray | None:
    """The step's bias as float32 [groups, whole tiles * 16], or None."""
    if "bias" not in step.weights:
        return None
    rows = weight.shape[0] // weight.groups
    bias = aligned((weight.groups, tiles_of(rows) * ROWS), np.float32)
    bias[:, :rows] = np.reshape(ctx.vector(step.weights["bias"]), (weight.groups, rows))
    return bias
