"""Kernels of expert routing and of the weighted sum over experts (moe.py)."""

import math

import numpy as np

from numflow.cpu.moe.moe import (
    COMBINE,
    ROUTE,
    SIGMOID,
    SIGMOID_TOPK,
    SOFTMAX,
    SOFTMAX_TOPK,
    SPARSEMIXER,
    SQRT_SOFTPLUS,
)
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import fma, load_part, store_part
from numflow.cpu.simd.vector import inline, zero_f32

_TAKEN = np.float32(-np.inf)


@kernel
def moe_route(args, thread, n_threads):
    """Items: rows. Scratch of a thread: scores [X], biased scores to choose by [X], values of the expert groups."""
    experts, chosen = i64(args, ROUTE.experts), i64(args, ROUTE.chosen)
    scratch = i64(args, ROUTE.scratch) + 4 * thread * i64(args, ROUTE.scratch_stride)
    scores, choice, bias = f32_ptr(scratch), f32_ptr(scratch + 4 * experts), f32_ptr(i64(args, ROUTE.bias))
    begin, end = share(i64(i64(args, ROUTE.header), i64(args, ROUTE.rows)), thread, n_threads)
    for t in range(begin, end):
        logits = f32_ptr(i64(args, ROUTE.logits) + 4 * t * i64(args, ROUTE.logits_stride))
        ids = i32_ptr(i64(args, ROUTE.ids) + 4 * t * i64(args, ROUTE.ids_stride))
        gates = f32_ptr(i64(args, ROUTE.gates) + 4 * t * i64(args, ROUTE.gates_stride))
        if i64(args, ROUTE.score) == SPARSEMIXER:
            _sparsemixer(logits, choice, ids, gates, experts, chosen, np.float32(2 * f64(args, ROUTE.jitter)))
        else:
            _score(i64(args, ROUTE.score), logits, scores, experts)
            for x in range(experts):
                choice[x] = scores[x] + bias[x]
            if i64(args, ROUTE.top_groups) < i64(args, ROUTE.groups):
                _drop_groups(args, choice, f32_ptr(scratch + 8 * experts))
            for s in range(chosen):
                best = _given(args, t, s, experts) if i64(args, ROUTE.given) else _best(choice, experts)
                choice[best] = _TAKEN
                ids[s], gates[s] = best, scores[best]
            if i64(args, ROUTE.score) == SOFTMAX_TOPK:
                _softmax(gates, gates, chosen)
            elif i64(args, ROUTE.score) == SIGMOID_TOPK:
                _score(SIGMOID, gates, gates, chosen)
        _scale_gates(gates, chosen, i64(args, ROUTE.normalize), np.float32(f64(args, ROUTE.least_sum)),
                     np.float32(f64(args, ROUTE.scale)))
        if i64(args, ROUTE.scales):
            for s in range(chosen):
                gates[s] *= f32_ptr(i64(args, ROUTE.scales))[ids[s]]


@inline
def _given(args, t, s, experts):
    """Expert id s of token t from the input, clamped; 0 for NaN."""
    id = f32_ptr(i64(args, ROUTE.given) + 4 * t * i64(args, ROUTE.given_stride))[s]
    return np.int64(min(max(np.float32(0), id), np.float32(experts - 1)))


@inline
def _sparsemixer(logits, left, ids, gates, experts, chosen, reach):
    """SparseMixer: repeatedly choose the largest remaining logit; its gate is the softmax over the remaining logits
    that are near it."""
    for x in range(experts):
        left[x] = logits[x]
    for s in range(chosen):
        best = _best(left, experts)
        top, total = logits[best], 0.0
        for x in range(experts):
            is_far = top - logits[x] > reach * max(abs(logits[x]), top)
            if left[x] != _TAKEN and not is_far:
                total += math.exp(np.float64(left[x] - top))
        left[best] = _TAKEN
        ids[s], gates[s] = best, np.float32(1.0 / total)


@inline
def _score(kind, logits, scores, experts):
    """scores = activation of logits; both may be the same array."""
    if kind == SOFTMAX:
        _softmax(logits, scores, experts)
        return
    for x in range(experts):
        value = np.float64(logits[x])
        if kind == SIGMOID:
            scores[x] = np.float32(1.0 / (1.0 + math.exp(-value)))
        elif kind == SQRT_SOFTPLUS:
            scores[x] = np.float32(math.sqrt(max(value, 0.0) + math.log1p(math.exp(-abs(value)))))
        else:
            scores[x] = logits[x]


@inline
def _softmax(x, y, n):
    """y = softmax(x), in double precision; both may be the same array."""
    peak, total = x[0], 0.0
    for i in range(1, n):
        peak = max(peak, x[i])
    for i in range(n):
        total += math.exp(np.float64(x[i] - peak))
    for i in range(n):
        y[i] = np.float32(math.exp(np.float64(x[i] - peak)) / total)


@inline
def _best(values, n):
    """Index of the largest value, the lowest index if equal; an index that is not taken, unless values are NaN."""
    best = 0
    for i in range(1, n):
        if values[i] > values[best]:
            best = i
    return best


@inline
def _drop_groups(args, choice, values):
    """Exclude the experts outside the best groups; a group's value is the sum of its `group_best` best experts."""
    groups, size = i64(args, ROUTE.groups), i64(args, ROUTE.experts) // i64(args, ROUTE.groups)
    for g in range(groups):
        values[g] = _sum_of_best(choice, g * size, (g + 1) * size, i64(args, ROUTE.group_best))
    for _ in range(groups - i64(args, ROUTE.top_groups)):
        worst = 0
        for g in range(1, groups):  # of equal groups the last is dropped first
            if values[g] <= values[worst]:
                worst = g
        values[worst] = -_TAKEN
        for x in range(worst * size, (worst + 1) * size):
            choice[x] = _TAKEN


@inline
def _sum_of_best(values, begin, end, count):
    """The sum of the `count` largest of values[begin:end]."""
    total = np.float32(0)
    for x in range(begin, end):
        rank = 0
        for other in range(begin, end):
            rank += values[other] > values[x] or (values[other] == values[x] and other < x)
        if rank < count:
            total += values[x]
    return total


@inline
def _scale_gates(gates, chosen, normalize, least_sum, scale):
    """gates = gates / max(sum, least_sum) if normalize, times scale."""
    total = np.float32(0)
    for s in range(chosen):
        total += gates[s]
    total = max(total, least_sum)
    for s in range(chosen):
        gates[s] = (gates[s] / total if normalize else gates[s]) * scale


@kernel
def expert_scale(args, thread, n_threads):
    """y[t * S + s] = gates[t, s] * x[t]. Items: routes times vectors of 16 columns."""
    routes, width = i64(args, COMBINE.routes), i64(args, COMBINE.width)
    vectors = (width + 15) // 16
    begin, end = share(i64(i64(args, COMBINE.header), i64(args, COMBINE.rows)) * vectors, thread, n_threads)
    for item in range(begin, end):
        route, column = item // vectors, item % vectors * 16
        t, s = route // routes, route % routes
        gate = f32_ptr(i64(args, COMBINE.gates) + 4 * t * i64(args, COMBINE.gates_stride))[s]
        x = i64(args, COMBINE.x) + 4 * (t * i64(args, COMBINE.x_stride) + column)
        store_part(i64(args, COMBINE.y) + 4 * (route * i64(args, COMBINE.y_stride) + column),
                   load_part(x, width - column) * gate, width - column)


@kernel
def expert_combine(args, thread, n_threads):
    """y[t] = sum over s of gates[t, s] * x[t * S + s], in the order of s; without gates if not weighted. Items: rows
    times vectors of 16 columns."""
    routes, width = i64(args, COMBINE.routes), i64(args, COMBINE.width)
    vectors = (width + 15) // 16
    begin, end = share(i64(i64(args, COMBINE.header), i64(args, COMBINE.rows)) * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        gates = f32_ptr(i64(args, COMBINE.gates) + 4 * t * i64(args, COMBINE.gates_stride))
        x = i64(args, COMBINE.x) + 4 * (t * routes * i64(args, COMBINE.x_stride) + column)
        total = zero_f32()
        for s in range(routes):
            gate = gates[s] if i64(args, COMBINE.weighted) else np.float32(1)
            total = fma(gate, load_part(x + 4 * s * i64(args, COMBINE.x_stride), width - column), total)
        store_part(i64(args, COMBINE.y) + 4 * (t * i64(args, COMBINE.y_stride) + column), total, width - column)
