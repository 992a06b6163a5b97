"""Element-wise ops: activations, sums, scales (`act`, `act_mul`, `gate_rows`, `add`, `scale`, `softcap`, `clamp`,
`copy`).

Threads share rows times vectors of 16 columns, so that a single token's row is shared too.
"""

from numflow.cpu.runtime.kernel import Call, Code
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.elementwise.act_kernels")

RELU, RELU2, GELU, GELU_TANH, GELU_QUICK, SILU, SIGMOID, TANH = range(8)
KINDS = {"relu": RELU, "relu2": RELU2, "gelu": GELU, "gelu_tanh": GELU_TANH, "gelu_quick": GELU_QUICK, "silu": SILU,
         "sigmoid": SIGMOID, "tanh": TANH}


def act(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D], the same or apart."""
    return [_bind(_CODE.kernel("act"), step, ctx, KINDS[param(step, "kind")])]


def act_mul(step: Step, ctx) -> list[Call]:
    """gate, up, y f32 [rows, D]; y may be either."""
    if param(step, "kind") == "swiglu_clamp":
        return [_bind(_CODE.kernel("swiglu_clamp"), step, ctx, 0, param(step, "alpha"), param(step, "limit"))]
    return [_bind(_CODE.kernel("act_mul"), step, ctx, KINDS[param(step, "kind")])]


def gate_rows(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; gate f32 [rows, 1]."""
    return [_bind(_CODE.kernel("gate_rows"), step, ctx)]


def add(step: Step, ctx) -> list[Call]:
    """a, b, y f32 [rows, D]; y may be either."""
    return [_bind(_CODE.kernel("add"), step, ctx, 0, param(step, "scale"))]


def scale(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("scale"), step, ctx, 0, param(step, "scale"))]


def softcap(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("softcap"), step, ctx, 0, param(step, "cap"))]


def clamp(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("clamp"), step, ctx, 0, 0.0, param(step, "limit"))]


def copy(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]."""
    return [_bind(_CODE.kernel("copy"), step, ctx)]


def _bind(fn, step, ctx, kind=0, factor=0.0, limit=0.0):
    a, y = step.inputs[0], step.outputs[0]
    b = step.inputs[1] if len(step.inputs) > 1 else a
    return Call.of(step, fn, ctx.header, ctx.rows(y), y.width, *ctx.view(y), *ctx.view(a), *ctx.view(b), kind,
                   float(factor), float(limit))
