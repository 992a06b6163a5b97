"""Mixture of experts: routing of tokens to experts, and the weighted sum of the experts' outputs (`moe_route`,
`expert_scale`, `expert_combine`).

Every expert id is in 0 .. X - 1 whatever the logits are, NaN included, so it is a valid index.
"""

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.moe.moe_kernels")
ROUTE = slots("header rows logits logits_stride ids ids_stride gates gates_stride experts chosen score normalize scale "
              "least_sum groups top_groups group_best bias scales jitter given given_stride scratch scratch_stride")
COMBINE = slots("header rows x x_stride y y_stride gates gates_stride routes width weighted")

SOFTMAX, SIGMOID, SOFTMAX_TOPK, SPARSEMIXER, SIGMOID_TOPK, SQRT_SOFTPLUS = range(6)
SCORES = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "softmax_topk": SOFTMAX_TOPK, "sparsemixer": SPARSEMIXER,
          "sigmoid_topk": SIGMOID_TOPK, "sqrt_softplus": SQRT_SOFTPLUS}


def moe_route(step: Step, ctx) -> list[Call]:
    """logits f32 [T, X], experts f32 [T, S], bias, scales f32 [X] -> ids i32 [T, S], gates f32 [T, S].

    Of equal scores the lower id comes first.
    """
    logits, (ids, gates) = step.inputs[0], step.outputs
    experts, groups = logits.width, param(step, "groups")
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else np.zeros(experts, np.float32)
    scales = ctx.vector(step.weights["scales"]) if "scales" in step.weights else 0
    given = ctx.strided("given", step.inputs[1]) if len(step.inputs) == 2 else {"given": 0, "given_stride": 0}
    scratch = aligned((ctx.n_threads, 2 * experts + groups), np.float32)
    return [Call.named(
        step, _CODE.kernel("moe_route"), ROUTE, header=ctx.header, rows=ctx.rows(logits),
        **ctx.strided("logits", logits), **ctx.strided("ids", ids), **ctx.strided("gates", gates), experts=experts,
        chosen=ids.width, score=SCORES[param(step, "score")], normalize=param(step, "normalize"),
        scale=float(param(step, "scale")), least_sum=float(param(step, "least_sum")), groups=groups,
        top_groups=param(step, "top_groups"), group_best=param(step, "group_best"), bias=bias, scales=scales,
        jitter=float(param(step, "jitter")), **given, scratch=scratch, scratch_stride=scratch.shape[1])]


def expert_scale(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], gates f32 [T, S] -> y f32 [T*S, D]."""
    x, gates = step.inputs
    y = step.outputs[0]
    return [Call.named(step, _CODE.kernel("expert_scale"), COMBINE, header=ctx.header, rows=ctx.rows(y),
                       **ctx.strided("x", x), **ctx.strided("y", y), **ctx.strided("gates", gates), routes=gates.width,
                       width=y.width, weighted=True)]


def expert_combine(step: Step, ctx) -> list[Call]:
    """x f32 [T*S, D], gates f32 [T, S] -> y f32 [T, D]."""
    x, gates = step.inputs
    y = step.outputs[0]
    return [Call.named(step, _CODE.kernel("expert_combine"), COMBINE, header=ctx.header, rows=ctx.rows(y),
                       **ctx.strided("x", x), **ctx.strided("y", y), **ctx.strided("gates", gates), routes=gates.width,
                       width=y.width, weighted=param(step, "weighted"))]
