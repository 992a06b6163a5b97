"""A state of one number for each channel, which gates let fade (op `gated_recurrence`)."""

import numpy as np

from numflow.cpu.elementwise.norm import whole_vector
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.attention.gated_recurrence_kernels")
SLOTS = slots("header width x x_stride entry entry_stride fade fade_stride y y_stride rate entry_bias fade_bias state "
              "state_stride")


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
