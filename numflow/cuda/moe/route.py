"""The router: choice of a token's experts (op `moe_route`). One warp for each token; a lane has every 32nd expert."""

import functools
from typing import NamedTuple

from numflow.cuda.device.call import N_TOKENS
from numflow.cuda.elementwise.act import sigmoid
from numflow.cuda.lang.arithmetic import exp, fabs, fmax, fmin, sqrt
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, sync_warp
from numflow.cuda.lang.kernel import Kernel, device, kernel
from numflow.cuda.lang.parameters import IntRows, Rows
from numflow.cuda.lang.reduce import better_of_warp, warp_max, warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32

MOST_EXPERTS = 1024
MOST_GROUPS = 128
LOWEST = -3.0e38  # score of an expert that can no longer be chosen
KEPT = -3.3e38    # marks a group that is kept; below LOWEST, so that the search never returns it again


@device
def softplus_of(x):
    """log(1 + e^x): log(1 + z) is the series of 2 atanh(w) for w = z / (2 + z), which is 1/3 at most."""
    z = exp(-fabs(x))
    w = z / (f32(2) + z)
    s = w * w
    series = f32(1 / 7) + s * (f32(1 / 9) + s * (f32(1 / 11) + s * f32(1 / 13)))
    series = f32(1) + s * (f32(1 / 3) + s * (f32(1 / 5) + s * series))
    return fmax(x, f32(0)) + (w + w) * series


class Routing(NamedTuple):
    """Settings of the router: groups of experts and normalisation of gates. reach: 2 * jitter."""

    groups: u32
    top_groups: u32
    group_best: u32
    normalize: u32
    least_sum: f32
    scale: f32
    reach: f32


@functools.cache
def route_kernel(score: str, has_bias: bool, grouped: bool, has_scales: bool, is_given: bool) -> Kernel:
    """One warp for each token, grid (rows). Among equal scores, the expert with the lower index comes first."""
    score_memory, choice_memory = SharedArray(f32, MOST_EXPERTS), SharedArray(f32, MOST_EXPERTS)
    group_memory = SharedArray(f32, MOST_GROUPS)
    is_sigmoid, is_softmax, softmax_of_chosen = score == "sigmoid", score == "softmax", score == "softmax_topk"
    is_softplus = score == "sqrt_softplus"
    is_sparsemixer, sigmoid_of_chosen = score == "sparsemixer", score == "sigmoid_topk"

    @device
    def pop_best(values, count, lane):
        """Pop the largest of `count` values, the first among equals: its value and index. It is set to LOWEST."""
        value, index = f32(LOWEST), i32(0x7FFFFFFF)
        i = u32(lane)
        while i < count:
            if values[i] > value:
                value, index = values[i], i32(i)
            i = u32(i + 32)
        value, index = better_of_warp(value, index)
        index = index if index < count else i32(0)  # all values are NaN
        sync_warp()
        if lane == 0:
            values[index] = f32(LOWEST)
        sync_warp()
        return value, index

    @device
    def pop_sparsemixer(remaining, logits, count, reach, lane):
        """Pop the expert with the largest remaining logit; its gate is the softmax over the remaining logits near it.

        A logit x is near if maximum - x <= reach * max(|x|, maximum).
        """
        total, i = f32(0), u32(lane)
        maximum = f32(LOWEST)
        while i < count:
            maximum = fmax(maximum, remaining[i])
            i = u32(i + 32)
        maximum, i = warp_max(maximum), u32(lane)
        while i < count:
            is_far = maximum - logits[i] > reach * fmax(fabs(logits[i]), maximum)
            if remaining[i] > f32(LOWEST) and not is_far:
                total += exp(remaining[i] - maximum)
            i = u32(i + 32)
        total = warp_sum(total)
        sync_warp()
        _, index = pop_best(remaining, count, lane)
        return f32(1) / total, index

    @kernel(f"moe_route_{score}{'_bias' * has_bias}{'_groups' * grouped}{'_scales' * has_scales}{'_given' * is_given}",
            32)
    def _route(ids: IntRows, gates: Rows, logits: Rows, given: Rows, bias: f32.ptr, counts: i32.ptr, experts: u32,
               n_chosen: u32, scales: f32.ptr, rule: Routing):
        # Block index: a row. Shared memory.
        t, lane = block_x(), u32(lane_index())
        if t >= counts[N_TOKENS]:
            return
        scores, choice, per_group = score_memory(), choice_memory(), group_memory()
        row = logits.data + t * logits.stride
        # Maximum of the logits, reduced over the warp.
        maximum_logit, total = f32(LOWEST), f32(0)
        i = lane
        while i < experts:
            maximum_logit = row[i] if row[i] > maximum_logit else maximum_logit
            i = u32(i + 32)
        maximum_logit = warp_max(maximum_logit)
        # Scores to shared memory, and their sum over the warp.
        i = lane
        while i < experts:
            value = row[i]
            if is_softmax:
                value = exp(value - maximum_logit)
                total += value
            elif is_sigmoid:
                value = sigmoid(value)
            elif is_softplus:
                value = sqrt(softplus_of(value))
            scores[i] = value
            i = u32(i + 32)
        if is_softmax:
            total = warp_sum(total)
        # Selection scores: scores plus bias. Warp barrier.
        i = lane
        while i < experts:
            if is_softmax:
                scores[i] = scores[i] / total
            choice[i] = scores[i] + bias[i] if has_bias else scores[i]
            i = u32(i + 32)
        sync_warp()
        # Exclude the experts of all groups but the best ones.
        if grouped:
            _keep_best_groups(choice, per_group, experts, rule.groups, rule.top_groups, rule.group_best, lane)
        # Choose the best experts, one after the other.
        total, s = f32(0), u32(0)
        while s < n_chosen:
            if is_given:
                expert = fmin(fmax(given.data[t * given.stride + s], f32(0)), f32(experts) - f32(1))
                index = i32(expert)
                gate = scores[index]
            elif is_sparsemixer:
                gate, index = pop_sparsemixer(choice, scores, experts, rule.reach, lane)
            else:
                _, index = pop_best(choice, experts, lane)
                gate = scores[index]
            if softmax_of_chosen:
                gate = exp(gate - maximum_logit)
            elif sigmoid_of_chosen:
                gate = sigmoid(gate)
            total += gate
            if lane == 0:
                ids.data[t * ids.stride + s] = index
                gates.data[t * gates.stride + s] = gate
            s = u32(s + 1)
        # Epilogue: scale the gates. Gates from a softmax over the chosen experts add up to 1; least_sum does not apply.
        if not softmax_of_chosen:
            total = fmax(total, rule.least_sum)
        factor = rule.scale / total if softmax_of_chosen or rule.normalize != 0 else rule.scale
        if lane == 0:
            s = u32(0)
            while s < n_chosen:
                gate = gates.data[t * gates.stride + s] * factor
                if has_scales:
                    gate = gate * scales[u32(ids.data[t * ids.stride + s])]
                gates.data[t * gates.stride + s] = gate
                s = u32(s + 1)

    @device
    def _keep_best_groups(choice, per_group, experts, groups, top_groups, group_best, lane):
        """Exclude the experts of all groups but the `top_groups` best. A group's score is the sum of its `group_best`
        largest selection scores."""
        size = u32(experts // groups)
        group = lane
        while group < groups:
            total, last, last_index = f32(0), f32(3.0e38), i32(-1)
            n_taken = u32(0)
            while n_taken < group_best and n_taken < size:
                value, best_index = f32(LOWEST), i32(-1)
                i = u32(0)
                while i < size:
                    candidate = choice[group * size + i]
                    later = candidate == last and i32(i) > last_index
                    if (candidate < last or later) and candidate > value:
                        value, best_index = candidate, i32(i)
                    i = u32(i + 1)
                total, last, last_index = total + value, value, best_index
                n_taken = u32(n_taken + 1)
            per_group[group] = total
            group = u32(group + 32)
        sync_warp()
        n_kept = u32(0)
        while n_kept < top_groups:
            _, index = pop_best(per_group, groups, lane)
            if lane == 0:
                per_group[index] = f32(KEPT)
            sync_warp()
            n_kept = u32(n_kept + 1)
        i = lane
        while i < experts:
            if per_group[i // size] != f32(KEPT):
                choice[i] = f32(LOWEST)
            i = u32(i + 32)
        sync_warp()

    return _route
