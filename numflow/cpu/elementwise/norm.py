"""Normalisation over each of `groups` equal column groups (ops `rms_norm`, `layer_norm`)."""

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.elementwise.norm_kernels")


def rms_norm(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; weight f32 [D] or [D / groups], ones if absent."""
    return [_bind(_CODE.kernel("rms_norm"), step, ctx)]


def layer_norm(step: Step, ctx) -> list[Call]:
    """x, y f32 [rows, D]; weight and bias f32 [D] or [D / groups], ones and zeros if absent."""
    return [_bind(_CODE.kernel("layer_norm"), step, ctx)]


def _bind(fn, step, ctx):
    x, y, groups = step.inputs[0], step.outputs[0], param(step, "groups")
    weight = whole_vector(step, ctx, "weight", x.width, 1.0)
    bias = whole_vector(step, ctx, "bias", x.width, 0.0)
    return Call.of(step, fn, ctx.header, ctx.rows(x), *ctx.view(x), *ctx.view(y), groups, x.width // groups, weight,
                   bias, float(param(step, "eps")))


def whole_vector(step, ctx, role, width, default):
    """The vector of a weight role, repeated to D columns, in padded memory; `default` in all columns if absent."""
    vector = aligned(width, np.float32)
    values = ctx.vector(step.weights[role]) if role in step.weights else np.float32(default)
    vector.reshape(-1, np.size(values))[:] = values
    return vector
