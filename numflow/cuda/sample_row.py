"""A row of logits as the candidates for the next token: their order, their weights, and walks over all of them.

Candidates are ordered as on the host: the largest score first, of equal ones the lower id. The place of one in this
order is a number of 52 bits made of its score and its id. Weights are fixed-point numbers, so that sums are exact and
the same whatever the order of threads.

A block works on a row. What it knows of the row, `what` in the functions below, is a tuple:
    peak, t, top, per      the best logit; the temperature; the best score; buckets per unit of score
    least                  candidates are at most this far below the best one (a number below 0)
    border                 the place of the last candidate
    bucket, shift, prefix  what is looked for among them: see sample_set.py
`room` is the block's shared memory, taken once: each place that calls a declaration gets memory of its own.
    counts, lows, highs    of each bucket: its candidates, and what their weights sum up to, in two words
    places, depths, weights   of candidates that are listed: how far they are below the best one is their depth
    warps, found, border   what threads tell each other
"""

from numflow.cuda.arithmetic import bits_of, exp
from numflow.cuda.intrinsic import SharedArray
from numflow.cuda.intrinsics import lane_index, load4, shuffle, sync_block, thread_index
from numflow.cuda.kernel import DeviceFunction, device
from numflow.cuda.scalar import f32, u32, u64

THREADS = 512
WARPS = THREADS // 32
ONE = 2.0**43          # the weight of the best candidate
MOST_TOKENS = 1 << 20  # of a vocabulary: sums of weights are below 2**64, ids take 20 bits
ID_BITS = 20
BUCKETS = 2048         # 4 for each thread
LISTED = THREADS       # one for each thread
NOWHERE = (1 << 64) - 1  # a border behind all candidates

_counts, _lows, _highs = SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS), SharedArray(u32, BUCKETS)
_places, _depths, _weights = SharedArray(u64, LISTED), SharedArray(f32, LISTED), SharedArray(u64, LISTED)
_warps, _found, _border = SharedArray(u64, WARPS), SharedArray(u32, 4), SharedArray(u64, 2)


@device
def memory():
    """`room`, to be called once."""
    return _counts(), _lows(), _highs(), _places(), _depths(), _weights(), _warps(), _found(), _border()


@device
def score_of(x, peak, t):
    """What the temperature makes of a logit; the same operations as on the host."""
    return x + f32(0) if t == f32(1) else (x - peak) / t


@device
def stand(x, id, what):
    """How far a token is below the best one, its place, and whether it is a candidate."""
    peak, t, top, _, least, border, _, _, _ = what
    score = score_of(x, peak, t)
    bits, depth = bits_of(score), score - top
    falling = bits if bits >> u32(31) else u32(bits ^ u32(0x7FFFFFFF))  # smaller for larger scores
    place = u64(u64(u64(falling) << u64(ID_BITS)) | u64(id))
    return depth, place, depth >= least and place <= border


@device
def weight_of(depth):
    """The weight of a candidate."""
    return u64(exp(depth) * f32(ONE))


@device
def part_of(total, share):
    """total * share / 2**32, rounded down."""
    high, low = u64(total >> u64(32)), u64(total & u64(0xFFFFFFFF))
    return u64(u64(high * u64(share)) + u64(u64(low * u64(share)) >> u64(32)))


def over(visit: DeviceFunction) -> DeviceFunction:
    """walk(row, begin, end, stride, what, room): the sum of visit(logit, id, what, room) over ids begin .. begin + 3,
    and on by `stride`, below `end`; begin and stride are multiples of 4."""
    @device
    def four(x0, x1, x2, x3, i, end, what, room):
        total = u64(0)
        if i < end:
            total = visit(x0, i, what, room)
        if i + 1 < end:
            total = u64(total + visit(x1, u32(i + 1), what, room))
        if i + 2 < end:
            total = u64(total + visit(x2, u32(i + 2), what, room))
        if i + 3 < end:
            total = u64(total + visit(x3, u32(i + 3), what, room))
        return total

    @device
    def walk(row, begin, end, stride, what, room):
        total, i = u64(0), u32(begin)
        while i < end:  # loads of 16 bytes, 4 of them on their way at once
            b, c, d = u32(i + stride), u32(i + 2 * stride), u32(i + 3 * stride)
            a0, a1, a2, a3 = load4(row, i)
            b0, b1, b2, b3 = load4(row, b if b < end else i)
            c0, c1, c2, c3 = load4(row, c if c < end else i)
            d0, d1, d2, d3 = load4(row, d if d < end else i)
            total = u64(total + four(a0, a1, a2, a3, i, end, what, room))
            total = u64(total + four(b0, b1, b2, b3, b, end, what, room))
            total = u64(total + four(c0, c1, c2, c3, c, end, what, room))
            total = u64(total + four(d0, d1, d2, d3, d, end, what, room))
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
