"""Sampling kernel (sample.py): picks the tokens of decoding.sampler, to the last bit, without sorting.

A thread samples a row. Logits are split into chunks of 256, 16 columns of 16 each. The maximum of each column is
computed first: it tells how many candidates can be above a bound, and in which columns, without reading the others. The
candidates that pass a filter are listed with a key (smaller for better candidates: by falling score, then by id) and a
weight. The cut-off of a filter is found by quickselect on the keys; so is the drawn token, by quickselect on ids.
"""

import numpy as np

from numflow.cpu.runtime.access import f32_bits, f32_from_bits, f32_ptr, f64_ptr, i32_ptr, i64, i64_ptr, share
from numflow.cpu.runtime.kernel import LENGTHS, LOGIT_ROWS, POSITIONS, SEQUENCE_OF, TOKENS, kernel
from numflow.cpu.sample.sample import BLOCK, CHUNK, PICK
from numflow.cpu.simd.float32 import keep_lanes, max_lanes, maximum, splat, sum_lanes, two_to, where_less
from numflow.cpu.simd.float64 import add_wide, sum_wide, zero_f64
from numflow.cpu.simd.vector import inline, load_f32, merged, store_f32, zero_f32
from numflow.decoding.choice import MIN_P, NONE, TOP_K, TOP_P, WORDS
from numflow.decoding.weights import BITS, COARSE, LEAST, LOG2_E, UNIT, WHOLE, P
from numflow.executor.contract import MOST_STEPS

_F = np.float32
_RUN = 1024  # logits per maximum in the search of the argmax
_FEW = 64    # columns to search first for top_p; 4 times as many each time that is not enough
_HALVINGS = 24
_ZERO, _ONE, _INFINITY, _LOWEST = _F(0), _F(1), _F(np.inf), _F(-np.inf)
_LEAST, _LOG2_E, _WHOLE, _COARSE = _F(LEAST), _F(LOG2_E), _F(WHOLE), _F(COARSE)
_P0, _P1, _P2, _P3, _P4 = map(_F, P)
_UNITS = 2.0**BITS
_WORD, _HALF = (1 << 32) - 1, (1 << 16) - 1


@inline
def _argmax(x, width):
    """Index of the largest of `width` logits, the first if equal; -1 if it is not finite, or a logit is NaN."""
    best, index, not_finite = _LOWEST, 0, zero_f32()
    for chunk in range(0, width, _RUN):
        top, end = splat(_LOWEST), min(chunk + _RUN, width)
        for i in range(chunk, end - 15, 16):
            value = load_f32(x + 4 * i)
            top = maximum(top, value)
            not_finite = maximum(not_finite, where_less(value, splat(_INFINITY), zero_f32(), splat(_ONE)))
        largest = max_lanes(top)
        for i in range(end - (end - chunk) % 16, end):
            value = f32_ptr(x)[i]
            largest = max(largest, value)
            if not value < _INFINITY:
                not_finite = splat(_ONE)
        if largest > best:
            best, index = largest, chunk
    if max_lanes(not_finite) > 0 or best == _LOWEST:
        return -1
    while f32_ptr(x)[index] != best:
        index += 1
    return index


@inline
def _logits(x, left):
    """16 logits, of which `left` exist; -inf in the other lanes."""
    return load_f32(x) if left >= 16 else keep_lanes(load_f32(x), 0, left - 1, _LOWEST)


@inline
def _weights(depth):
    """Weights of 16 depths (scaled distances below the maximum), by the operations of decoding.weights."""
    y = maximum(depth, splat(_LEAST)) * _LOG2_E
    whole = y + _WHOLE
    rest = y - (whole - _WHOLE)
    power = ((((rest * _P4 + _P3) * rest + _P2) * rest + _P1) * rest + _P0) * rest + _ONE
    return (power * two_to(whole) + _COARSE) - _COARSE


@merged
def _column_maxima(x, width, columns):
    """Store the maximum of each column; returns the largest logit, or -inf if a logit is not finite."""
    best, not_finite = splat(_LOWEST), zero_f32()
    for chunk in range(0, width, CHUNK):
        top = splat(_LOWEST)
        for i in range(chunk, min(chunk + CHUNK, width), 16):
            value = _logits(x + 4 * i, width - i)
            top = maximum(top, value)
            not_finite = maximum(not_finite, where_less(value, splat(_INFINITY), zero_f32(), splat(_ONE)))
        store_f32(columns + 4 * (chunk // 16), top)
        best = maximum(best, top)
    return max_lanes(best) if max_lanes(not_finite) == _ZERO else _LOWEST


@merged
def _to_depths(columns, count, peak, t):
    """Convert maxima of columns to depths, (logit - peak) / t."""
    for i in range(0, count, 16):
        store_f32(columns + 4 * i, (load_f32(columns + 4 * i) - peak) / t)


@merged
def _bound(columns, count, wanted):
    """A depth that at least `wanted` columns reach, and at most twice as many if bisection finds one; LEAST if fewer
    columns have a weight."""
    low, high = _LEAST, _ZERO
    middle = low
    for _ in range(_HALVINGS):
        reached = zero_f32()
        for i in range(0, count, 16):
            reached = reached + where_less(load_f32(columns + 4 * i), splat(middle), zero_f32(), splat(_ONE))
        total = sum_lanes(reached)
        if total >= wanted:
            low = middle
            if total <= 2 * wanted:
                break
        elif middle == _LEAST:
            break
        else:
            high = middle
        middle = (low + high) * _F(0.5)
    return low


@merged
def _key(score, id):
    """Sort key: smaller for better candidates; -0 counts as 0."""
    bits = f32_bits(score + _ZERO)
    rising = np.int64(bits if bits >= 0 else bits ^ 0x7FFFFFFF)
    return (-1 - rising) << 32 | id


@merged
def _list(x, width, columns, bound, peak, t, keys, weights):
    """List the candidates that reach a bound; returns their number."""
    count = 0
    for chunk in range(0, width, CHUNK):
        maxima = columns + 4 * (chunk // 16)
        if max_lanes(load_f32(maxima)) >= bound:
            for lane in range(16):
                if f32_ptr(maxima)[lane] >= bound:
                    for id in range(chunk + lane, min(chunk + CHUNK, width), 16):
                        value = f32_ptr(x)[id]
                        depth = (value - peak) / t
                        if depth >= bound:
                            i64_ptr(keys)[count] = _key(value if t == _ONE else depth, id)
                            f32_ptr(weights)[count] = depth
                            count += 1
    for i in range(0, count, 16):
        store_f32(weights + 4 * i, _weights(load_f32(weights + 4 * i)))
    return count


@merged
def _filtered(x, bound, peak, t, keys, weights, count):
    """Remove the listed candidates below a bound; returns the number that remain."""
    n = 0
    for i in range(count):
        if (f32_ptr(x)[i64_ptr(keys)[i] & _WORD] - peak) / t >= bound:
            i64_ptr(keys)[n], f32_ptr(weights)[n] = i64_ptr(keys)[i], f32_ptr(weights)[i]
            n += 1
    return n


@inline
def _sum(weights, count):
    total = 0.0
    for i in range(count):
        total += f32_ptr(weights)[i]
    return total


@inline
def _swap(keys, weights, i, j):
    key, weight = i64_ptr(keys), f32_ptr(weights)
    key[i], key[j] = key[j], key[i]
    weight[i], weight[j] = weight[j], weight[i]


@inline
def _quickselect(keys, weights, count, goal, counting):
    """The least number of candidates, in the order of keys, whose weights sum to `goal`, or whose number is `goal` if
    `counting`. All listed candidates together reach the goal.

    They are moved to the front of the list, unordered except that the last of them is at its end.
    """
    key, weight = i64_ptr(keys), f32_ptr(weights)
    begin, end, before = 0, count, 0.0
    while end - begin > 1:
        last, middle = end - 1, (begin + end) // 2
        a, b, c = key[begin], key[middle], key[last]
        _swap(keys, weights, last, begin if (a < b) != (a < c) else middle if (b < a) != (b < c) else last)
        pivot, split, smaller = key[last], begin, 0.0
        for i in range(begin, last):
            if key[i] < pivot:
                smaller += _ONE if counting else weight[i]
                _swap(keys, weights, i, split)
                split += 1
        _swap(keys, weights, split, last)
        pivot_weight = _ONE if counting else weight[split]
        if before + smaller >= goal:
            end = split
        elif before + smaller + pivot_weight >= goal:
            return split + 1
        else:
            before, begin = before + smaller + pivot_weight, split + 1
    return begin + 1


@inline
def _share(total, fraction):
    """total * fraction / 2^32, rounded down to a multiple of UNIT."""
    units = np.int64(total * _UNITS)
    low = units & _WORD
    low_product = ((low >> 16) * fraction + ((low & _HALF) * fraction >> 16)) >> 16
    return ((units >> 32) * fraction + low_product) * UNIT


@inline
def _sum_up(x, width, peak, t, sums):
    """The weight of all candidates; stores the weight of each block."""
    total = 0.0
    for block in range(0, width, BLOCK):
        block_sum = zero_f64()
        for i in range(block, min(block + BLOCK, width), 16):
            block_sum = add_wide(block_sum, _weights((_logits(x + 4 * i, width - i) - peak) / t))
        f64_ptr(sums)[block // BLOCK] = sum_wide(block_sum)
        total += sum_wide(block_sum)
    return total


@merged
def _draw_of_all(x, width, peak, t, sums, target, weights):
    """The first id whose cumulative weight is above the target."""
    before, block = 0.0, 0
    while before + f64_ptr(sums)[block] <= target:
        before += f64_ptr(sums)[block]
        block += 1
    for i in range(BLOCK * block, min(BLOCK * (block + 1), width), 16):
        store_f32(weights, _weights((_logits(x + 4 * i, width - i) - peak) / t))
        for lane in range(16):
            before += f32_ptr(weights)[lane]
            if before > target:
                return i + lane
    return -1


@merged
def _drawn(x, width, settings, random, keys, weights, columns, sums):
    """The token of a row by its settings and a random number; -1 if a logit is not finite."""
    words, peak, t = i32_ptr(settings), _column_maxima(x, width, columns), f32_from_bits(i32_ptr(settings)[0])
    if peak == _LOWEST:
        return -1
    n_columns = (width + CHUNK - 1) // CHUNK * 16
    _to_depths(columns, n_columns, peak, t)
    # Filters in their order; the first one lists candidates (count < 0: all are candidates), others shorten the list.
    count, total, word = -1, 0.0, 2
    while words[word] != NONE:
        kind, value = words[word], words[word + 1]
        goal, bound, wanted = np.float64(value), max(f32_from_bits(value), _LEAST), np.int64(value)
        if kind == TOP_P:  # a share of the weight of all candidates, or of the listed candidates
            if count < 0:
                total, wanted = _sum_up(x, width, peak, t, sums), _FEW
            goal = max(_share(total, value & _WORD), UNIT)
        if count < 0:
            while True:
                if kind != MIN_P:
                    bound = _bound(columns, n_columns, wanted)
                count = _list(x, width, columns, bound, peak, t, keys, weights)
                total = _sum(weights, count)
                if kind != TOP_P or total >= goal:
                    break
                wanted *= 4
        if kind == MIN_P:
            count = _filtered(x, bound, peak, t, keys, weights, count)
        elif kind == TOP_P or value < count:
            count = _quickselect(keys, weights, count, goal, kind == TOP_K)
        total, word = _sum(weights, count), word + 2
    if count < 0:
        total = _sum_up(x, width, peak, t, sums)
        return _draw_of_all(x, width, peak, t, sums, _share(total, random), weights)
    for i in range(count):
        i64_ptr(keys)[i] &= _WORD
    return i64_ptr(keys)[_quickselect(keys, weights, count, _share(total, random) + UNIT, False) - 1]


@kernel
def pick_tokens(args, thread, n_threads):
    """y = a token per row. Items: rows. goes_on: store it as the next token of the row's sequence."""
    header, goes_on, settings = i64(args, PICK.header), i64(args, PICK.goes_on), i64(args, PICK.settings)
    width, keys = i64(args, PICK.width), i64(args, PICK.scratch) + thread * i64(args, PICK.scratch_stride)
    begin, end = share(i64(header, i64(args, PICK.rows)), thread, n_threads)
    for r in range(begin, end):
        x, words = i64(args, PICK.x) + 4 * r * i64(args, PICK.x_stride), settings + 4 * WORDS * r
        if settings == 0 or f32_ptr(words)[0] == _ZERO:
            token = _argmax(x, width)
        else:
            token = _drawn(x, width, words, i32_ptr(i64(args, PICK.draws))[MOST_STEPS * r] & _WORD, keys,
                           keys + i64(args, PICK.weights), keys + i64(args, PICK.columns), keys + i64(args, PICK.sums))
        i32_ptr(i64(args, PICK.y))[r] = token
        if goes_on:
            t = i32_ptr(i64(header, LOGIT_ROWS))[r]
            i32_ptr(i64(header, TOKENS))[t] = max(token, 0)
            i32_ptr(i64(header, POSITIONS))[t] += 1
            i32_ptr(i64(header, LENGTHS))[i32_ptr(i64(header, SEQUENCE_OF))[t]] += 1
