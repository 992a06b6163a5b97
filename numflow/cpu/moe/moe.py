"""Mixture of experts: which experts a token goes to, and the sum of what they return (`moe_route`, `expert_combine`).

Every id is in 0 .. X - 1 whatever the logits are, so what reads it as an index stays inside its memory.
"""

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.moe.moe_kernels")

SOFTMAX, SIGMOID, SOFTMAX_TOPK = range(3)
SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_topk": SOFTMAX_TOPK}


def moe_route(step: Step, ctx) -> list[Call]:
    """logits f32 [T, X], bias f32 [X] -> ids i32 [T, S], gates f32 [T, S]. Equal scores: the lower id first."""
    logits, (ids, gates) = step.inputs[0], step.outputs
    experts, groups = logits.width, param(step, "groups")
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else np.zeros(experts, np.float32)
    scratch = aligned((ctx.n_threads, 2 * experts + groups), np.float32)
    return [Call.of(step, _CODE.kernel("moe_route"), ctx.header, ctx.rows(logits), *ctx.view(logits),
                    *ctx.view(ids), *ctx.view(gates), experts, ids.width, SCORES[param(step, "score")],
                    param(step, "normalize"), float(param(step, "scale")), groups, param(step, "top_groups"),
                    param(step, "group_best"), bias, scratch, scratch.shape[1])]


def expert_combine(step: Step, ctx) -> list[Call]:
    """x f32 [T*S, D], gates f32 [T, S] -> y f32 [T, D]."""
    x, gates = step.inputs
    y = step.outputs[0]
    return [Call.of(step, _CODE.kernel("expert_combine"), ctx.header, ctx.rows(y), *ctx.view(x), *ctx.view(y),
                    *ctx.view(gates), gates.width, y.width)]
