"""A row of logits as the candidates for the next token: their order, their weights, and walks over all of them.

Candidates are ordered as on the host: the largest score first, of equal ones the lower id. The place of one in this
order is a number of 52 bits made of its score and its id, smaller for better ones. Weights are those of
decoding.weights, in whole UNITs, so that sums are exact and the same whatever the order of threads.

A block works on a row. What it knows of the row, `what` in the functions below, is a tuple:
    peak, t, top, per      the best logit; the temperature; the best score; buckets per unit of score
    least                  candidates are at most this far below the best one (a number below 0)
    border, last           the score of the last candidate, and its id
    bucket, shift, prefix  what is looked for among them: see candidates.py
`room` is the block's shared memory, taken once: each place that calls a declaration gets memory of its own.
    counts, lows, highs    of each bucket: its candidates, and what their weights sum up to, in two words
    places, depths, weights   of candidates that are listed: how far they are below the best one is their depth
    warps, found, border   what threads tell each other
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
ID_BITS = 20           # of up to MOST_TOKENS
P0, P1, P2, P3, P4 = P
BUCKETS = 2048         # 4 for each thread
LISTED = THREADS       # one for each thread
LAST_ID = MOST_TOKENS - 1
INFINITE = float("inf")

_counts, _lows, _highs = SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS)
_places, _depths, _weights = SharedArray(u64, LISTED), SharedArray(f32, LISTED), SharedArray(u64, LISTED)
_warps, _found, _border = SharedArray(u64, WARPS), SharedArray(u32, 4), SharedArray(u64, 2)


@device
def memory():
    """`room`, to be called once."""
    return _counts(), _lows(), _highs(), _places(), _depths(), _weights(), _warps(), _found(), _border()


@device
def score_of(x, peak, t):
    """A logit after the temperature; the same operations as on the host."""
    return x + f32(0) if t == f32(1) else (x - peak) / t


@device
def stand(x, id, what):
    """A token's score, how far it is below the best one, and whether it is a candidate."""
    peak, t, top, _, least, border, last, _, _, _ = what
    score = score_of(x, peak, t)
    depth = score - top
    return score, depth, depth >= least and (score > border or (score == border and id <= last))


@device
def place_of(score, id):
    """A candidate's place in the order."""
    bits = bits_of(score + f32(0))  # -0 is 0
    falling = bits if bits >> u32(31) else u32(bits ^ u32(0x7FFFFFFF))
    return u64(u64(u64(falling) << u64(ID_BITS)) | u64(id))


@device
def at_place(place):
    """(score, id) of a place."""
    falling = u32(place >> u64(ID_BITS))
    return float_of(falling if falling >> u32(31) else u32(falling ^ u32(0x7FFFFFFF))), u32(place & u64(LAST_ID))


@device
def weight_of(depth):
    """The weight of a candidate; the same operations as on the host."""
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
def part_of(total, share):
    """total * share / 2**32, rounded down."""
    high, low = u64(total >> u64(32)), u64(total & u64(0xFFFFFFFF))
    return u64(u64(high * u64(share)) + u64(u64(low * u64(share)) >> u64(32)))


@device
def load_row(row, at, instead, end):
    """The 4 logits from `at` on; those from `end` on are -inf. instead: where it may read if `at` is beyond."""
    x0, x1, x2, x3 = load4(row, at if at < end else instead)
    never = f32(-INFINITE)
    return (x0 if at < end else never, x1 if at + 1 < end else never, x2 if at + 2 < end else never,
            x3 if at + 3 < end else never)


def over(visit: DeviceFunction) -> DeviceFunction:
    """walk(row, begin, end, stride, what, room): the sum of visit(logit, id, what, room) over ids begin .. begin + 3,
    and on by `stride`, below `end`, and of logits of -inf beyond; begin and stride are multiples of 4."""
    @device
    def four(some, i, what, room):
        first = u64(visit(some[0], i, what, room) + visit(some[1], u32(i + 1), what, room))
        return u64(first + u64(visit(some[2], u32(i + 2), what, room) + visit(some[3], u32(i + 3), what, room)))

    @device
    def walk(row, begin, end, stride, what, room):
        total, i = u64(0), u32(begin)
        while i < end:  # loads of 16 bytes, 4 of them on their way at once
            b, c, d = u32(i + stride), u32(i + 2 * stride), u32(i + 3 * stride)
            of_a, of_b = load_row(row, i, i, end), load_row(row, b, i, end)
            of_c, of_d = load_row(row, c, i, end), load_row(row, d, i, end)
            total = u64(total + four(of_a, i, what, room))
            total = u64(total + four(of_b, b, what, room))
            total = u64(total + four(of_c, c, what, room))
            total = u64(total + four(of_d, d, what, room))
            i = u32(i + 4 * stride)
        return total

    return walk


@device
def shuffle_u64(value, lane):
    """A lane's value."""
    low, high = shuffle(u32(value & u64(0xFFFFFFFF)), lane), shuffle(u32(value >> u64(32)), lane)
    return u64(u64(u64(high) << u64(32)) | u64(low))


@device
def sums_before(value, warps):
    """The sum over all threads before this one, and over all. warps: u64 [WARPS], which then has what each warp has."""
    lane, sum_here = u32(lane_index()), value
    for k in range(5):
        step = u32(1 << k)
        other = shuffle_u64(sum_here, u32(lane - step) & u32(31))
        if lane >= step:
            sum_here = u64(sum_here + other)
    sync_block()
    if lane == 31:
        warps[thread_index() >> u32(5)] = sum_here
    sync_block()
    before, total = u64(sum_here - value), u64(0)
    for warp in range(WARPS):
        if warp < thread_index() >> u32(5):
            before = u64(before + warps[warp])
        total = u64(total + warps[warp])
    return before, total
