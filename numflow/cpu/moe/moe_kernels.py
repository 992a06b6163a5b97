"""Kernels of routing and of the sum over experts (moe.py)."""

import math

import numpy as np

from numflow.cpu.moe.moe import SOFTMAX, SOFTMAX_TOPK
from numflow.cpu.runtime.access import f32_ptr, f64, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import kernel
from numflow.cpu.simd.float32 import fma, load_part, store_part
from numflow.cpu.simd.vector import inline, zero_f32

HEADER, ROWS = 0, 1
LOGITS, LOGITS_STRIDE, IDS, IDS_STRIDE, GATES, GATES_STRIDE, EXPERTS, CHOSEN, SCORE, NORMALIZE, SCALE = range(2, 13)
GROUPS, TOP_GROUPS, GROUP_BEST, BIAS, SCRATCH, SCRATCH_STRIDE = range(13, 19)
X, X_STRIDE, Y, Y_STRIDE, ROUTES, WIDTH = LOGITS, LOGITS_STRIDE, IDS, IDS_STRIDE, EXPERTS, CHOSEN
_TAKEN = np.float32(-np.inf)


@kernel
def moe_route(args, thread, n_threads):
    """Items: rows. Scratch of a thread: scores [X], what the choice goes by [X], values of the groups."""
    experts, chosen = i64(args, EXPERTS), i64(args, CHOSEN)
    scratch = i64(args, SCRATCH) + 4 * thread * i64(args, SCRATCH_STRIDE)
    scores, choice, bias = f32_ptr(scratch), f32_ptr(scratch + 4 * experts), f32_ptr(i64(args, BIAS))
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)), thread, n_threads)
    for t in range(begin, end):
        logits = f32_ptr(i64(args, LOGITS) + 4 * t * i64(args, LOGITS_STRIDE))
        ids = i32_ptr(i64(args, IDS) + 4 * t * i64(args, IDS_STRIDE))
        gates = f32_ptr(i64(args, GATES) + 4 * t * i64(args, GATES_STRIDE))
        _score(i64(args, SCORE), logits, scores, experts)
        for x in range(experts):
            choice[x] = scores[x] + bias[x]
        if i64(args, TOP_GROUPS) < i64(args, GROUPS):
            _drop_groups(args, choice, f32_ptr(scratch + 8 * experts))
        for s in range(chosen):
            best = _best(choice, experts)
            choice[best] = _TAKEN
            ids[s], gates[s] = best, scores[best]
        if i64(args, SCORE) == SOFTMAX_TOPK:
            _softmax(gates, gates, chosen)
        _scale_gates(gates, chosen, i64(args, NORMALIZE), np.float32(f64(args, SCALE)))


@inline
def _score(kind, logits, scores, experts):
    if kind == SOFTMAX:
        _softmax(logits, scores, experts)
        return
    for x in range(experts):
        scores[x] = logits[x] if kind == SOFTMAX_TOPK else np.float32(1.0 / (1.0 + math.exp(-logits[x])))


@inline
def _softmax(x, y, n):
    """In double precision; x and y may be the same."""
    peak, total = x[0], 0.0
    for i in range(1, n):
        peak = max(peak, x[i])
    for i in range(n):
        total += math.exp(np.float64(x[i] - peak))
    for i in range(n):
        y[i] = np.float32(math.exp(np.float64(x[i] - peak)) / total)


@inline
def _best(values, n):
    """Index of the largest value, the lowest of equals; one that was not taken yet, unless values are NaN."""
    best = 0
    for i in range(1, n):
        if values[i] > values[best]:
            best = i
    return best


@inline
def _drop_groups(args, choice, values):
    """Take the experts outside the best groups out of the choice; a group's value is the sum of its best."""
    groups, size = i64(args, GROUPS), i64(args, EXPERTS) // i64(args, GROUPS)
    for g in range(groups):
        values[g] = _sum_of_best(choice, g * size, (g + 1) * size, i64(args, GROUP_BEST))
    for _ in range(groups - i64(args, TOP_GROUPS)):
        worst = 0
        for g in range(1, groups):  # of equals the last goes first
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
        better = 0
        for other in range(begin, end):
            better += values[other] > values[x] or (values[other] == values[x] and other < x)
        if better < count:
            total += values[x]
    return total


@inline
def _scale_gates(gates, chosen, normalize, scale):
    total = np.float32(0)
    for s in range(chosen):
        total += gates[s]
    for s in range(chosen):
        gates[s] = (gates[s] / total if normalize else gates[s]) * scale


@kernel
def expert_combine(args, thread, n_threads):
    """y[t] = sum over s of gates[t, s] * x[t * S + s], in the order of s. Items: rows times vectors of 16 columns."""
    routes, width = i64(args, ROUTES), i64(args, WIDTH)
    vectors = (width + 15) // 16
    begin, end = share(i64(i64(args, HEADER), i64(args, ROWS)) * vectors, thread, n_threads)
    for item in range(begin, end):
        t, column = item // vectors, item % vectors * 16
        gates = f32_ptr(i64(args, GATES) + 4 * t * i64(args, GATES_STRIDE))
        x = i64(args, X) + 4 * (t * routes * i64(args, X_STRIDE) + column)
        total = zero_f32()
        for s in range(routes):
            total = fma(gates[s], load_part(x + 4 * s * i64(args, X_STRIDE), width - column), total)
        store_part(i64(args, Y) + 4 * (t * i64(args, Y_STRIDE) + column), total, width - column)
