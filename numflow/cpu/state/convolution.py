"""Causal depthwise convolution with state (op `causal_conv`):

    y[t, c] = act(bias[c] + sum over j < K of weight[c, j] * x[t - K + 1 + j, c])

The state of a sequence is its last K - 1 rows of x. Threads share sequences times groups of 64 channels.
"""

import numpy as np

from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import CONV_KINDS, Step, param

_CODE = Code("numflow.cpu.state.convolution_kernels")
SLOTS = slots("header width y y_stride x x_stride weight bias taps state state_stride kind")
KINDS = {name: kind for kind, name in enumerate(CONV_KINDS)}


def causal_conv(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, C], which must not overlap; weight f32 [C, K], transposed here to [K, C]; bias f32 [C]."""
    x, y = step.inputs[0], step.outputs[0]
    weight = np.ascontiguousarray(ctx.vector(step.weights["weight"]).T)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else 0
    return [Call.named(step, _CODE.kernel("causal_conv"), SLOTS, header=ctx.header, width=y.width,
                       **ctx.strided("y", y), **ctx.strided("x", x), weight=weight, bias=bias, taps=len(weight),
                       **ctx.state_slots("state", param(step, "state")), kind=KINDS[param(step, "kind")])]
