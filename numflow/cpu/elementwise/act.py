"""Element-wise ops: activations, sums, products, scales (`act`, `act_mul`, `gate_rows`, `mul`, `add`, `scale`,
`scale_by_position`, `softcap`, `clamp`, `softplus`, `signed_sqrt`, `copy`), and ops on whole rows (`sparsify`,
`match_rms`, `mix`, `balance`).

Threads share rows times vectors of 16 columns, so that a single token's row is shared too.
"""

import numpy as np

from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.elementwise.act_kernels")
MIX = slots("header rows width y y_stride base base_stride x x_stride gates gates_stride parts sources plus")

RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH, EXP = range(9)
KINDS = {"relu": RELU, "relu2": RELU2, "gelu": GELU, "gelu_tanh": GELU_TANH, "gelu_quick": GELU_QUICK, "silu": SILU,
         "sigmoid": SIGMOID, "tanh": TANH, "exp": EXP}

SCALE_VECTORS = (("weight", 1.0), ("shift", 0.0))  # of `scale`: weight role, and the value of a missing vector


def act(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; y may be x."""
    if param(step, "kind") == "xielu":
        x, y = step.inputs[0], step.outputs[0]
        coefficients = (float(param(step, name)) for name in ("positive", "negative", "beta", "eps"))
        return [Call.of(step, _CODE.kernel("xielu"), ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x),
                        *coefficients)]
    return [_bind(_CODE.kernel("act"), step, ctx, KINDS[param(step, "kind")])]


def act_mul(step: Step, ctx) -> list[Call]:
    """gate, up, y f32 [rows, D]; y may be either."""
    if (kind := param(step, "kind")) in ("swiglu_clamp", "silu_clamp"):
        shift, alpha = (1, param(step, "alpha")) if kind == "swiglu_clamp" else (0, 1.0)
        return [_bind(_CODE.kernel("swiglu_clamp"), step, ctx, shift, alpha, param(step, "limit"))]
    return [_bind(_CODE.kernel("act_mul"), step, ctx, KINDS[kind])]


def gate_rows(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; gate f32 [rows, H], one per column group, of H equal groups."""
    return [_bind(_CODE.kernel("gate_rows"), step, ctx, step.inputs[1].width, param(step, "plain"))]


def permute(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D], which must not overlap; order f32 [D]."""
    x, y = step.inputs[0], step.outputs[0]
    order = ctx.vector(step.weights["order"]).astype(np.int32)
    return [Call.of(step, _CODE.kernel("permute"), ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x),
                    order, 0)]


def mul(step: Step, ctx) -> list[Call]:
    """a, b, y f32 [rows, D]; y may be either."""
    return [_bind(_CODE.kernel("mul"), step, ctx)]


def add(step: Step, ctx) -> list[Call]:
    """a, b, y f32 [rows, D]; y may be either."""
    return [_bind(_CODE.kernel("add"), step, ctx, 0, param(step, "scale"))]


def scale(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; optional weight and shift f32 [D]."""
    x, y = step.inputs[0], step.outputs[0]
    if "shift" in step.weights:
        weight, shift = (whole_vector(step, ctx, role, y.width, default) for role, default in SCALE_VECTORS)
        return [Call.of(step, _CODE.kernel("shift_columns"), ctx.header, ctx.rows(y), y.width, *ctx.view(y),
                        *ctx.view(x), weight, 0, shift, float(param(step, "scale")))]
    if "weight" in step.weights:
        weight = whole_vector(step, ctx, "weight", y.width, 1.0)
        return [Call.of(step, _CODE.kernel("scale_columns"), ctx.header, ctx.rows(y), y.width, *ctx.view(y),
                        *ctx.view(x), weight, 0, 0, float(param(step, "scale")))]
    return [_bind(_CODE.kernel("scale"), step, ctx, 0, param(step, "scale"))]


def scale_by_position(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, D]; the factor of a row follows from its position."""
    x, y = step.inputs[0], step.outputs[0]
    return [Call.of(step, _CODE.kernel("scale_by_position"), ctx.header, ctx.rows(y), y.width, *ctx.view(y),
                    *ctx.view(x), param(step, "length"), param(step, "offset"), float(param(step, "scale")),
                    int(param(step, "smooth")))]


def sparsify(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("sparsify"), step, ctx, 0, param(step, "deviations"))]


def match_rms(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, G * D]; like f32 [rows, D]."""
    (x, like), (y,) = step.inputs, step.outputs
    return [Call.of(step, _CODE.kernel("match_rms"), ctx.header, ctx.rows(y), like.width, *ctx.view(y), *ctx.view(x),
                    *ctx.view(like), y.width // like.width, float(param(step, "least")))]


def mix(step: Step, ctx) -> list[Call]:
    """base, y f32 [rows, I * D]; y may be base; x f32 [rows, J * D]; gates f32 [rows, I * J]."""
    (base, x, gates), (y,), parts = step.inputs, step.outputs, param(step, "parts")
    return [Call.named(step, _CODE.kernel("mix"), MIX, header=ctx.header, rows=ctx.rows(y), width=y.width // parts,
                       **ctx.strided("y", y), **ctx.strided("base", base), **ctx.strided("x", x),
                       **ctx.strided("gates", gates), parts=parts, sources=gates.width // parts,
                       plus=float(param(step, "plus")))]


def balance(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, S * S]."""
    return [_bind(_CODE.kernel("balance"), step, ctx, param(step, "times"), param(step, "eps"))]


def softcap(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("softcap"), step, ctx, 0, param(step, "cap"))]


def clamp(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("clamp"), step, ctx, 0, 0.0, param(step, "limit"))]


def softplus(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; bias f32 [D], zeros if absent."""
    x, y = step.inputs[0], step.outputs[0]
    bias = whole_vector(step, ctx, "bias", x.width, 0.0)
    return [Call.of(step, _CODE.kernel("softplus"), ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(x), bias,
                    0, 0, float(param(step, "least")), float(param(step, "most")))]


def signed_sqrt(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("signed_sqrt"), step, ctx, 0, param(step, "least"))]


def copy(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("copy"), step, ctx)]


def _bind(fn, step, ctx, kind=0, factor=0.0, limit=0.0):
    a, y = step.inputs[0], step.outputs[0]
    b = step.inputs[1] if len(step.inputs) > 1 else a
    return Call.of(step, fn, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(a), *ctx.view(b), kind,
                   float(factor), float(limit))
