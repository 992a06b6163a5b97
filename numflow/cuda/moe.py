"""Mixture of experts (ops `moe_route`, `expert_linear`, `expert_combine`).

A token is routed by one warp, a lane for every 32nd expert. Each route then multiplies with the matrix of its expert by
the matrix-vector kernels of `linear`, whose rows name their matrix.
"""

import functools

from numflow.cuda.act import sigmoid
from numflow.cuda.arithmetic import exp
from numflow.cuda.call import N_ROUTES, N_TOKENS, Call, Sizes, ceil, per_row
from numflow.cuda.device import Launch
from numflow.cuda.intrinsic import SharedArray
from numflow.cuda.intrinsics import block_x, block_y, lane_index, sync_warp, thread_index
from numflow.cuda.kernel import Kernel, device, kernel
from numflow.cuda.linear import gemv_args, gemv_kernel, uses_int8
from numflow.cuda.reduce import warp_max, warp_sum
from numflow.cuda.sample import better_of_warp
from numflow.cuda.scalar import f32, i32, u32
from numflow.errors import NetworkError
from numflow.ops import Step, param

THREADS = 128
MOST_EXPERTS = 1024
LOWEST = -3.0e38
KEPT = -3.3e38  # below what is ever chosen


def moe_route(step: Step, ctx) -> list[Call]:
    """logits f32 [T, X], bias f32 [X] -> ids i32 [T, S], gates f32 [T, S]."""
    (logits,), (ids, gates) = step.inputs, step.outputs
    if logits.width > MOST_EXPERTS:
        raise NetworkError(f"{step}: device 'cuda' routes to at most {MOST_EXPERTS} experts")
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    chosen = route_kernel(param(step, "score"), bias is not None, param(step, "top_groups") < param(step, "groups"))
    return [per_row(step, chosen, N_TOKENS, 1, *ctx.view(ids), *ctx.view(gates), *ctx.view(logits), bias,
                    ctx.batch.counts, logits.width, ids.width, param(step, "groups"), param(step, "top_groups"),
                    param(step, "group_best"), int(param(step, "normalize")), param(step, "scale"))]


def expert_linear(step: Step, ctx) -> list[Call]:
    """x f32 [T or T * S, K], ids i32 [T, S], weight [X * N, K], bias f32 [X * N] -> y f32 [T * S, N]."""
    (x, ids), (y,) = step.inputs, step.outputs
    weight = ctx.matrix(step.weights["weight"])
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    int8, routes = uses_int8(weight, ctx.activations), ids.width if ctx.rows(x) == ctx.rows(ids) else 1
    operand = ctx.operand(x, "int8" if int8 else "rows" if weight.is_float else "f32")
    flat = ctx.scratch("experts of routes", 4 * ctx.capacity["routes"])
    chosen, blocks = gemv_kernel(weight, int8, 1, y.width, True)
    args = gemv_args(*ctx.view(y), operand, weight, bias, flat, ctx.batch.counts, N_ROUTES, y.width, routes)

    def multiply(sizes: Sizes) -> Launch:
        return Launch(chosen, (blocks, sizes.rows[N_ROUTES], 1), args)

    gather = per_row(None, _flatten, N_TOKENS, ceil(ids.width, 32), flat, *ctx.view(ids), ctx.batch.counts, ids.width,
                     param(step, "first"), weight.groups)
    return [*operand.calls, gather, Call(step, multiply)]


def expert_combine(step: Step, ctx) -> list[Call]:
    """x f32 [T * S, D], gates f32 [T, S] -> y f32 [T, D]."""
    (x, gates), (y,) = step.inputs, step.outputs
    return [per_row(step, _combine, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x), *ctx.view(gates),
                    ctx.batch.counts, y.width, gates.width)]


@kernel("expert_ids", 32)
def _flatten(flat: i32.ptr, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32, experts: i32):
    """The matrix of each route: experts `first` and on are here, -1 is one of another device."""
    t, s = block_y(), block_x() * 32 + thread_index()
    if t < counts[N_TOKENS] and s < chosen:
        expert = i32(ids[t * stride + s] - first)
        flat[t * chosen + s] = expert if expert >= 0 and expert < experts else i32(-1)


@kernel("expert_combine", THREADS)
def _combine(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, gates: f32.ptr, gates_stride: u32, counts: i32.ptr,
             width: u32, routes: u32):
    t, column = block_y(), block_x() * 128 + thread_index()
    if t >= counts[N_TOKENS] or column >= width:
        return
    total, s = f32(0), u32(0)
    while s < routes:
        total += gates[t * gates_stride + s] * x[(t * routes + s) * x_stride + column]
        s = u32(s + 1)
    y[t * y_stride + column] = total


@functools.cache
def route_kernel(score: str, has_bias: bool, grouped: bool) -> Kernel:
    """One warp for each token; equal scores: the lower expert first."""
    score_memory, choice_memory = SharedArray(f32, MOST_EXPERTS), SharedArray(f32, MOST_EXPERTS)
    group_memory = SharedArray(f32, 128)
    of_sigmoid, of_softmax, late = score == "sigmoid", score == "softmax", score == "softmax_topk"

    @device
    def take(values, count, lane):
        """Index of the largest of `count` values, the first of equals, which is then struck out."""
        value, index = f32(LOWEST), i32(0x7FFFFFFF)
        i = u32(lane)
        while i < count:
            if values[i] > value:
                value, index = values[i], i32(i)
            i = u32(i + 32)
        value, index = better_of_warp(value, index)
        index = index if index < count else i32(0)  # nothing but NaN
        sync_warp()
        if lane == 0:
            values[index] = f32(LOWEST)
        sync_warp()
        return value, index

    @kernel(f"moe_route_{score}{'_bias' * has_bias}{'_groups' * grouped}", 32)
    def _route(ids: i32.ptr, ids_stride: u32, gates: f32.ptr, gates_stride: u32, logits: f32.ptr, logits_stride: u32,
               bias: f32.ptr, counts: i32.ptr, experts: u32, chosen: u32, groups: u32, top_groups: u32,
               group_best: u32, normalize: u32, scale: f32):
        t, lane = block_y(), u32(lane_index())
        if t >= counts[N_TOKENS]:
            return
        scores, choice, per_group = score_memory(), choice_memory(), group_memory()
        row = logits + t * logits_stride
        peak, total = f32(LOWEST), f32(0)
        i = lane
        while i < experts:
            peak = row[i] if row[i] > peak else peak
            i = u32(i + 32)
        peak = warp_max(peak)
        i = lane
        while i < experts:
            value = row[i]
            if of_softmax:
                value = exp(value - peak)
                total += value
            elif of_sigmoid:
                value = sigmoid(value)
            scores[i] = value
            i = u32(i + 32)
        if of_softmax:
            total = warp_sum(total)
        i = lane
        while i < experts:
            if of_softmax:
                scores[i] = scores[i] / total
            choice[i] = scores[i] + bias[i] if has_bias else scores[i]
            i = u32(i + 32)
        sync_warp()
        if grouped:
            _keep_best_groups(choice, per_group, experts, groups, top_groups, group_best, lane)
        total, s = f32(0), u32(0)
        while s < chosen:
            _, index = take(choice, experts, lane)
            gate = scores[index]
            if late:
                gate = exp(gate - peak)
            total += gate
            if lane == 0:
                ids[t * ids_stride + s] = index
                gates[t * gates_stride + s] = gate
            s = u32(s + 1)
        factor = scale / total if late or normalize != 0 else scale
        if lane == 0:
            s = u32(0)
            while s < chosen:
                gates[t * gates_stride + s] = gates[t * gates_stride + s] * factor
                s = u32(s + 1)

    @device
    def _keep_best_groups(choice, per_group, experts, groups, top_groups, group_best, lane):
        """Strike out the experts of all groups but the best `top_groups`, by the sum of their best."""
        size = u32(experts // groups)
        group = lane
        while group < groups:
            total, last, last_at = f32(0), f32(3.0e38), i32(-1)
            for_best = u32(0)
            while for_best < group_best and for_best < size:
                value, at = f32(LOWEST), i32(-1)
                i = u32(0)
                while i < size:
                    here = choice[group * size + i]
                    later = here == last and i32(i) > last_at
                    if (here < last or later) and here > value:
                        value, at = here, i32(i)
                    i = u32(i + 1)
                total, last, last_at = total + value, value, at
                for_best = u32(for_best + 1)
            per_group[group] = total
            group = u32(group + 32)
        sync_warp()
        kept = u32(0)
        while kept < top_groups:
            _, index = take(per_group, groups, lane)
            if lane == 0:
                per_group[index] = f32(KEPT)
            sync_warp()
            kept = u32(kept + 1)
        i = lane
        while i < experts:
            if per_group[i // size] != f32(KEPT):
                choice[i] = f32(LOWEST)
            i = u32(i + 32)
        sync_warp()

    return _route
