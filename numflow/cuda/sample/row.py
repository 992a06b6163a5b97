"""A row of logits as candidates for the next token: their order, their weights, and loops over all of them.

Candidates are ordered as on the host: the largest score first; among equal scores, the lower id first. A candidate's
sort key is a 52-bit integer made of its score and its id; a smaller key is a better candidate. Weights are the fixed-
point integers of decoding.weights, so sums are exact and do not depend on the order of the threads.

One block handles one row. Its knowledge of the row, `state` in the functions below, is a tuple:
    max_logit, t, max_score, buckets_per_unit   largest logit; temperature; largest score; buckets per unit of score
    min_depth              candidates have at least this depth: their score minus the largest score, at most 0
    border, last           score and id of the last candidate that the filters so far keep
    bucket, shift, prefix  the candidates that are being selected: see candidates.py
`buffers` is the block's shared memory. It is declared in one place, because each call of a declaration allocates anew:
    counts, lows, highs    the histogram: candidates of each bucket, and the sum of their weights in two 32-bit words
    keys, depths, weights  the list: sort keys, depths and weights of candidates
    warps                  sums of the warps
    broadcast32, broadcast64   values that one thread hands to all others
"""

from numflow.cuda.lang.arithmetic import add_exactly, bits_of, float_of, fmax, multiply_exactly
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import lane_index, load4, shuffle, sync_block, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32, u64
from numflow.decoding.choice import MOST_TOKENS
from numflow.decoding.weights import BITS, COARSE, LEAST, LOG2_E, WHOLE, P

THREADS = 512
WARPS = THREADS // 32
ONE = 2.0**BITS        # the weight of the best candidate
ID_BITS = 20           # bits of an id below MOST_TOKENS
P0, P1, P2, P3, P4 = P
BUCKETS = 2048         # 4 for each thread
LISTED = THREADS       # slots of the list: one for each thread
LAST_ID = MOST_TOKENS - 1
INFINITE = float("inf")

_counts, _lows, _highs = SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS)
_keys, _depths, _weights = SharedArray(u64, LISTED), SharedArray(f32, LISTED), SharedArray(u64, LISTED)
_warps, _broadcast32, _broadcast64 = SharedArray(u64, WARPS), SharedArray(u32, 4), SharedArray(u64, 2)


@device
def memory():
    """The shared-memory buffers. A kernel calls this once."""
    return _counts(), _lows(), _highs(), _keys(), _depths(), _weights(), _warps(), _broadcast32(), _broadcast64()


@device
def score_of(x, max_logit, t):
    """The score: the logit divided by the temperature, by the same float32 operations as on the host."""
    return x + f32(0) if t == f32(1) else (x - max_logit) / t


@device
def examine(x, id, state):
    """A token's score, its depth (score minus the largest score), and whether it is a candidate."""
    max_logit, t, max_score, _, min_depth, border, last, _, _, _ = state
    score = score_of(x, max_logit, t)
    depth = score - max_score
    return score, depth, depth >= min_depth and (score > border or (score == border and id <= last))


@device
def sort_key(score, id):
    """A candidate's sort key: the score's bits, mapped so that larger scores have smaller integers, then the id."""
    bits = bits_of(score + f32(0))  # -0 becomes +0
    falling = bits if bits >> u32(31) else u32(bits ^ u32(0x7FFFFFFF))
    return u64(u64(u64(falling) << u64(ID_BITS)) | u64(id))


@device
def from_sort_key(key):
    """(score, id) of a sort key."""
    falling = u32(key >> u64(ID_BITS))
    return float_of(falling if falling >> u32(31) else u32(falling ^ u32(0x7FFFFFFF))), u32(key & u64(LAST_ID))


@device
def weight_of(depth):
    """The weight e^depth of a candidate as an integer, by the same float32 operations as decoding.weights."""
    depth = multiply_exactly(fmax(depth, f32(LEAST)), f32(LOG2_E))
    whole = add_exactly(depth, f32(WHOLE))
    rest = add_exactly(depth, -add_exactly(whole, f32(-WHOLE)))
    power = add_exactly(multiply_exactly(rest, f32(P4)), f32(P3))
    power = add_exactly(multiply_exactly(power, rest), f32(P2))
    power = add_exactly(multiply_exactly(power, rest), f32(P1))
    power = add_exactly(multiply_exactly(power, rest), f32(P0))
    power = add_exactly(multiply_exactly(power, rest), f32(1))
    weight = float_of(u32(bits_of(power) + u32(bits_of(whole) << u32(23))))
    return u64(add_exactly(add_exactly(weight, f32(COARSE)), f32(-COARSE)) * f32(ONE))


@device
def fraction_of(total, share):
    """total * share / 2**32, rounded down, without 128-bit products."""
    high, low = u64(total >> u64(32)), u64(total & u64(0xFFFFFFFF))
    return u64(u64(high * u64(share)) + u64(u64(low * u64(share)) >> u64(32)))


@device
def load_row(row, at, instead, end):
    """The 4 logits from index `at` on; -inf from index `end` on. instead: a valid index to read from if at >= end."""
    x0, x1, x2, x3 = load4(row, at if at < end else instead)
    low = f32(-INFINITE)
    return (x0 if at < end else low, x1 if at + 1 < end else low, x2 if at + 2 < end else low,
            x3 if at + 3 < end else low)


def row_walker(visit: DeviceFunction) -> DeviceFunction:
    """Make walk(row, begin, end, stride, state, buffers): the sum of visit(logit, id, state, buffers).

    The ids are begin .. begin + 3, then begin + stride .. begin + stride + 3, and so on. begin and stride are multiples
    of 4. The last steps may visit ids beyond `end`, with logits of -inf.
    """
    @device
    def visit_four(logits, i, state, buffers):
        ab = u64(visit(logits[0], i, state, buffers) + visit(logits[1], u32(i + 1), state, buffers))
        cd = u64(visit(logits[2], u32(i + 2), state, buffers) + visit(logits[3], u32(i + 3), state, buffers))
        return u64(ab + cd)

    @device
    def walk(row, begin, end, stride, state, buffers):
        total, i = u64(0), u32(begin)
        while i < end:  # 4 loads of 16 bytes in flight at once
            b, c, d = u32(i + stride), u32(i + 2 * stride), u32(i + 3 * stride)
            of_a, of_b = load_row(row, i, i, end), load_row(row, b, i, end)
            of_c, of_d = load_row(row, c, i, end), load_row(row, d, i, end)
            total = u64(total + visit_four(of_a, i, state, buffers))
            total = u64(total + visit_four(of_b, b, state, buffers))
            total = u64(total + visit_four(of_c, c, state, buffers))
            total = u64(total + visit_four(of_d, d, state, buffers))
            i = u32(i + 4 * stride)
        return total

    return walk


@device
def shuffle_u64(value, lane):
    """The u64 value of another lane, by two 32-bit shuffles."""
    low, high = shuffle(u32(value & u64(0xFFFFFFFF)), lane), shuffle(u32(value >> u64(32)), lane)
    return u64(u64(u64(high) << u64(32)) | u64(low))


@device
def exclusive_scan(value, warps):
    """Exclusive prefix sum over the threads of the block, and the total. warps: u64 [WARPS], gets the warps' sums."""
    lane, inclusive = u32(lane_index()), value
    for k in range(5):
        step = u32(1 << k)
        other = shuffle_u64(inclusive, u32(lane - step) & u32(31))
        if lane >= step:
            inclusive = u64(inclusive + other)
    sync_block()
    if lane == 31:
        warps[thread_index() >> u32(5)] = inclusive
    sync_block()
    before, total = u64(inclusive - value), u64(0)
    for warp in range(WARPS):
        if warp < thread_index() >> u32(5):
            before = u64(before + warps[warp])
        total = u64(total + warps[warp])
    return before, total
