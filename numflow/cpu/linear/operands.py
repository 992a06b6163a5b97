"""Norms and activations fused with the making of the operand of the `linear` that follows.

Fused forms of `rms_norm`, `layer_norm`, `act_mul` and `act`. A thread computes 256 columns of a token and writes them
into the operand (activations.py) while they are in its L1 cache; the values themselves are stored only if adapters read
them. Every value has the bits that the two separate steps would give. Each thread computes the statistics of its rows
itself, which saves a barrier.
"""

from numflow.cpu.elementwise.act import KINDS
from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.linear.activations import CHUNK, NAMES, TOKEN_TILE
from numflow.cpu.linear.slots import OPERAND
from numflow.cpu.runtime.kernel import Argument, Call, Code
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.linear.operands_kernels")
# Offsets in a thread's scratch memory: f32 [16], f32 [16], f32 [TOKEN_TILE][CHUNK].
MEANS, FACTORS, VALUES = 0, 64, 128
SCRATCH_BYTES = VALUES + 4 * CHUNK * TOKEN_TILE


def can_make(step: Step) -> bool:
    """Whether a step can be fused with the making of the operand from its output."""
    if step.op in ("rms_norm", "layer_norm"):
        return param(step, "groups") == 1
    return step.op in ("act_mul", "act") and param(step, "kind") in KINDS


def bind_made(step: Step, ctx, x: Argument, aux: Argument, kind: int) -> Call:
    """The call that makes the operand at `x` (and `aux`, for int8) of the step's output."""
    y, a = step.outputs[0], step.inputs[0]
    b, is_norm = step.inputs[-1], step.op.endswith("norm")
    weight, bias = (whole_vector(step, ctx, role, y.width, default) if is_norm else 0
                    for role, default in (("weight", 1.0), ("bias", 0.0)))
    scratch = ctx.scratch("values of an operand", ctx.n_threads * SCRATCH_BYTES)
    kernel = _CODE.kernel(f"{step.op}_to_{NAMES[kind]}")
    stored = ctx.strided("y", y) if y in ctx.adapters.inputs else {"y": 0, "y_stride": 0}
    return Call.named(None, kernel, OPERAND, header=ctx.header, rows_field=ctx.rows(a), columns=y.width, x=x, aux=aux,
                      scratch=scratch, **ctx.strided("a", a), **ctx.strided("b", b), **stored,
                      kind=0 if is_norm else KINDS[param(step, "kind")], weight=weight, bias=bias,
                      eps=float(param(step, "eps")) if is_norm else 0.0)
