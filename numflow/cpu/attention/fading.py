"""Recurrences by channel with decaying states: a gated linear recurrence (op `gated_recurrence`) and a decaying
weighted mean of values (op `wkv`)."""

import numpy as np

from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE, _WKV_CODE = (Code(f"numflow.cpu.attention.{name}_kernels") for name in ("gated_recurrence", "wkv"))
SLOTS = slots("header width x x_stride input_gate input_gate_stride recurrence_gate recurrence_gate_stride y y_stride "
              "rate input_bias recurrence_bias state state_stride")
WKV_SLOTS = slots("header width k k_stride v v_stride y y_stride decay first state state_stride")


def gated_recurrence(step: Step, ctx) -> list[Call]:
    """x, input and recurrence gates, y f32 [T, W]; rate and biases f32 [W]."""
    x, input_gate, recurrence_gate = step.inputs
    rate = aligned(x.width, np.float32)
    rate[:] = -8 * np.logaddexp(np.float32(0), ctx.vector(step.weights["rate"]))
    return [Call.named(
        step, _CODE.kernel("gated_recurrence"), SLOTS, header=ctx.header, width=x.width, **ctx.strided("x", x),
        **ctx.strided("input_gate", input_gate), **ctx.strided("recurrence_gate", recurrence_gate),
        **ctx.strided("y", step.outputs[0]), rate=rate,
        input_bias=whole_vector(step, ctx, "entry_bias", x.width, 0.0),
        recurrence_bias=whole_vector(step, ctx, "fade_bias", x.width, 0.0),
        **ctx.state_slots("state", param(step, "state")))]


def wkv(step: Step, ctx) -> list[Call]:
    """k, v, y f32 [T, W]; decay, first f32 [W]."""
    (k, v), y = step.inputs, step.outputs[0]
    weights = {role: whole_vector(step, ctx, role, k.width, 0.0) for role in ("decay", "first")}
    return [Call.named(
        step, _WKV_CODE.kernel("wkv"), WKV_SLOTS, header=ctx.header, width=k.width, **ctx.strided("k", k),
        **ctx.strided("v", v), **ctx.strided("y", y), **weights, **ctx.state_slots("state", param(step, "state")))]
