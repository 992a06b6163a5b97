"""A mean of values whose weights fade, of each channel (op `wkv`)."""

from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.attention.wkv_kernels")
SLOTS = slots("header width k k_stride v v_stride y y_stride decay first state state_stride")


def wkv(step: Step, ctx) -> list[Call]:
    """k, v, y f32 [T, W]; decay, first f32 [W]."""
    (k, v), y = step.inputs, step.outputs[0]
    weights = {role: whole_vector(step, ctx, role, k.width, 0.0) for role in ("decay", "first")}
    return [Call.named(
        step, _CODE.kernel("wkv"), SLOTS, header=ctx.header, width=k.width, **ctx.strided("k", k),
        **ctx.strided("v", v), **ctx.strided("y", y), **weights, **ctx.state_slots("state", param(step, "state")))]
