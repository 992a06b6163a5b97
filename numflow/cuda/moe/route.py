"""Choice of a token's experts (op `moe_route`): a warp for each token, a lane for every 32nd expert."""

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
LOWEST = -3.0e38
KEPT = -3.3e38  # below what is ever chosen


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
    """Numbers that choose experts and scale their gates; reach: 2 * jitter."""

    groups: u32
    top_groups: u32
    group_best: u32
    normalize: u32
    least_sum: f32
    scale: f32
    reach: f32


@functools.cache
def route_kernel(score: str, has_bias: bool, grouped: bool, has_scales: bool, is_given: bool) -> Kernel:
    """One warp for each token; equal scores: the lower expert first."""
    score_memory, choice_memory = SharedArray(f32, MOST_EXPERTS), SharedArray(f32, MOST_EXPERTS)
    group_memory = SharedArray(f32, MOST_GROUPS)
    of_sigmoid, of_softmax, late = score == "sigmoid", score == "softmax", score == "softmax_topk"
    of_softplus = score == "sqrt_softplus"
    one_by_one, sigmoid_of_chosen = score == "sparsemixer", score == "sigmoid_topk"

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

    @device
    def near(left, logits, count, reach, lane):
        """Softmax, at the largest logit of those left, over those left that are near it; it is struck out."""
        total, i = f32(0), u32(lane)
        top = f32(LOWEST)
        while i < count:
            top = fmax(top, left[i])
            i = u32(i + 32)
        top, i = warp_max(top), u32(lane)
        while i < count:
            far = top - logits[i] > reach * fmax(fabs(logits[i]), top)
            if left[i] > f32(LOWEST) and not far:
                total += exp(left[i] - top)
            i = u32(i + 32)
        total = warp_sum(total)
        sync_warp()
        _, index = take(left, count, lane)
        return f32(1) / total, index

    @kernel(f"moe_route_{score}{'_bias' * has_bias}{'_groups' * grouped}{'_scales' * has_scales}{'_given' * is_given}",
            32)
    def _route(ids: IntRows, gates: Rows, logits: Rows, given: Rows, bias: f32.ptr, counts: i32.ptr, experts: u32,
               chosen: u32, scales: f32.ptr, rule: Routing):
        # Place in the grid: a row; shared memory.
        t, lane = block_x(), u32(lane_index())
        if t >= counts[N_TOKENS]:
            return
        scores, choice, per_group = score_memory(), choice_memory(), group_memory()
        row = logits.data + t * logits.stride
        # Maximum of the logits over the warp.
        peak, total = f32(LOWEST), f32(0)
        i = lane
        while i < experts:
            peak = row[i] if row[i] > peak else peak
            i = u32(i + 32)
        peak = warp_max(peak)
        # Scores to shared memory, and their sum over the warp.
        i = lane
        while i < experts:
            value = row[i]
            if of_softmax:
                value = exp(value - peak)
                total += value
            elif of_sigmoid:
                value = sigmoid(value)
            elif of_softplus:
                value = sqrt(softplus_of(value))
            scores[i] = value
            i = u32(i + 32)
        if of_softmax:
            total = warp_sum(total)
        # What is chosen by, scores with a bias; barrier of the warp.
        i = lane
        while i < experts:
            if of_softmax:
                scores[i] = scores[i] / total
            choice[i] = scores[i] + bias[i] if has_bias else scores[i]
            i = u32(i + 32)
        sync_warp()
        # Strike out experts of weak groups.
        if grouped:
            _keep_best_groups(choice, per_group, experts, rule.groups, rule.top_groups, rule.group_best, lane)
        # Take the best, one after the other.
        total, s = f32(0), u32(0)
        while s < chosen:
            if is_given:
                number = fmin(fmax(given.data[t * given.stride + s], f32(0)), f32(experts) - f32(1))
                index = i32(number)
                gate = scores[index]
            elif one_by_one:
                gate, index = near(choice, scores, experts, rule.reach, lane)
            else:
                _, index = take(choice, experts, lane)
                gate = scores[index]
            if late:
                gate = exp(gate - peak)
            elif sigmoid_of_chosen:
                gate = sigmoid(gate)
            total += gate
            if lane == 0:
                ids.data[t * ids.stride + s] = index
                gates.data[t * gates.stride + s] = gate
            s = u32(s + 1)
        # Epilogue: scale the gates. Those of a softmax over the chosen add up to 1, which no least sum changes.
        if not late:
            total = fmax(total, rule.least_sum)
        factor = rule.scale / total if late or rule.normalize != 0 else rule.scale
        if lane == 0:
            s = u32(0)
            while s < chosen:
                gate = gates.data[t * gates.stride + s] * factor
                if has_scales:
                    gate = gate * scales[u32(ids.data[t * ids.stride + s])]
                gates.data[t * gates.stride + s] = gate
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
