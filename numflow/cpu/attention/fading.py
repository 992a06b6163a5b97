"""States of channels, which fade: a number that gates let fade (op `gated_recurrence`), a mean of values (op `wkv`)."""

import numpy as np

from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE, _WKV_CODE = (Code(f"numflow.cpu.attention.{name}_kernels") for name in ("gated_recurrence", "wkv"))
SLOTS = slots("header width x x_stride entry entry_stride fade fade_stride y y_stride rate entry_bias fade_bias state "
              "state_stride")
WKV_SLOTS = slots("header width k k_stride v v_stride y y_stride decay first state state_stride")


def gated_recurrence(step: Step, ctx) -> list[Call]:
    """x, entry, fade, y f32 [T, W]; rate and biases f32 [W]."""
    x, entry, fade = step.inputs
    rate = aligned(x.width, np.float32)
    rate[:] = -8 * np.logaddexp(np.float32(0), ctx.vector(step.weights["rate"]))
    return [Call.named(
        step, _CODE.kernel("gated_recurrence"), SLOTS, header=ctx.header, width=x.width, **ctx.strided("x", x),
        **ctx.strided("entry", entry), **ctx.strided("fade", fade), **ctx.strided("y", step.outputs[0]), rate=rate,
        entry_bias=whole_vector(step, ctx, "entry_bias", x.width, 0.0),
        fade_bias=whole_vector(step, ctx, "fade_bias", x.width, 0.0), **ctx.state_slots("state", param(step, "state")))]


def wkv(step: Step, ctx) -> list[Call]:
    """k, v, y f32 [T, W]; decay, first f32 [W]."""
    (k, v), y = step.inputs, step.outputs[0]
    weights = {role: whole_vector(step, ctx, role, k.width, 0.0) for role in ("decay", "first")}
    return [Call.named(
        step, _WKV_CODE.kernel("wkv"), WKV_SLOTS, header=ctx.header, width=k.width, **ctx.strided("k", k),
        **ctx.strided("v", v), **ctx.strided("y", y), **weights, **ctx.state_slots("state", param(step, "state")))]
