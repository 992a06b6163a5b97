"""The tokens of a row that may come: narrowed by filters, and one of them drawn; without sorting the vocabulary.

Candidates are ordered as on the host: the largest score first, of equal ones the lower id. The place of one in this
order is a number of 52 bits made of its score and its id. What a filter leaves is always the leading ones, up to one of
them, the border.

The border is found by counting. All candidates are counted, and their weights summed up, in buckets of equal width by
their distance from the best one; the bucket that the border lies in is counted again by digits of the places until few
enough are left to be compared with each other. Weights are fixed-point numbers, so that sums are exact and the same
whatever the order of threads.

A block works on a row. What it knows of the row, `what` in the functions below, is a tuple:
    peak, t, top, per      the best logit; the temperature; the best score; buckets per unit of score
    least                  candidates are at most this far below the best one (a number below 0)
    border                 the place of the last candidate
    bucket, shift, prefix  of what is counted: the bucket that it lies in, the digits of the place that are known

`room` is the block's shared memory, declared once: each place that calls a declaration gets memory of its own.
"""

from numflow.cuda.arithmetic import bits_of, exp, fmin
from numflow.cuda.intrinsic import SharedArray
from numflow.cuda.intrinsics import atomic_add, lane_index, load4, shuffle, sync_block, thread_index
from numflow.cuda.kernel import DeviceFunction, device
from numflow.cuda.scalar import f32, u32, u64

THREADS = 512
WARPS = THREADS // 32
ONE = 2.0**43         # the weight of the best candidate
MOST_TOKENS = 1 << 20  # of a vocabulary: sums of weights are below 2**64, ids take 20 bits
ID_BITS = 20
BUCKETS = 2048        # 4 for each thread
DIGIT = 11            # bits that choose one of them
WIDEST = 64.0         # distance that the buckets reach over at most
LISTED = THREADS      # candidates that are compared with each other, one for each thread

_counts, _sums = SharedArray(u32, BUCKETS), SharedArray(u64, BUCKETS)  # of each bucket
_places, _weights = SharedArray(u64, LISTED), SharedArray(u64, LISTED)
_warps, _found, _border = SharedArray(u64, WARPS), SharedArray(u32, 4), SharedArray(u64, 2)
NOWHERE = (1 << 64) - 1  # a border behind all candidates


@device
def memory():
    """`room`, to be called once."""
    return _counts(), _sums(), _places(), _weights(), _warps(), _found(), _border()


@device
def score_of(x, peak, t):
    """What the temperature makes of a logit; the same operations as on the host."""
    return x + f32(0) if t == f32(1) else (x - peak) / t


@device
def place_of(score, id):
    """The place in the order of candidates."""
    bits = bits_of(score)
    falling = bits if bits >> u32(31) else u32(bits ^ u32(0x7FFFFFFF))
    return u64(u64(u64(falling) << u64(ID_BITS)) | u64(id))


@device
def part_of(total, share):
    """total * share / 2**32, rounded down."""
    high, low = u64(total >> u64(32)), u64(total & u64(0xFFFFFFFF))
    return u64(u64(high * u64(share)) + u64(u64(low * u64(share)) >> u64(32)))


@device
def _look(x, id, what):
    """Whether a token is a candidate, its weight, its bucket, and its place."""
    peak, t, top, per, least, border, _, _, _ = what
    score = score_of(x, peak, t)
    below, place = score - top, place_of(score, id)
    good = below >= least and place <= border
    bucket = u32(fmin(-below * per, f32(BUCKETS - 1)))
    return good, u64(exp(below) * f32(ONE)), bucket, place


@device
def _weigh(x, id, what, room):
    good, weight, _, _ = _look(x, id, what)
    return weight if good else u64(0)


def _counter(by_count: bool) -> DeviceFunction:
    """Adds a candidate to its bucket: one that has the digits that are known, by its next digit."""
    @device
    def count(x, id, what, room):
        good, weight, bucket, place = _look(x, id, what)
        inside, shift, prefix = what[6], what[7], what[8]
        if shift < u32(64):
            good = good and bucket == inside and u64(place >> u64(shift + DIGIT)) == prefix
            bucket = u32(u64(place >> u64(shift)) & u64(BUCKETS - 1))
        if good:
            atomic_add(room[0], bucket, u32(1))
            atomic_add(room[1], bucket, u64(1) if by_count else weight)
        return u64(0)
    return count


@device
def _list(x, id, what, room):
    """Writes down the candidates that have all known digits."""
    good, weight, bucket, place = _look(x, id, what)
    inside, shift, prefix = what[6], what[7], what[8]
    if good and bucket == inside and (shift >= u32(64) or u64(place >> u64(shift)) == prefix):
        places, weights, found = room[2], room[3], room[5]
        slot = atomic_add(found, 2, u32(1))
        places[slot], weights[slot] = place, weight
    return u64(0)


def over(visit: DeviceFunction) -> DeviceFunction:
    """The sum of visit(logit, id, what, room) over ids begin .. begin + 3, and on by `stride`, below `end`; begin and
    stride are multiples of 4."""
    @device
    def walk(row, begin, end, stride, what, room):
        total, i = u64(0), u32(begin)
        while i < end:  # loads of 16 bytes, 4 of them on their way at once
            b, c, d = u32(i + stride), u32(i + 2 * stride), u32(i + 3 * stride)
            a0, a1, a2, a3 = load4(row, i)
            b0, b1, b2, b3 = load4(row, b if b < end else i)
            c0, c1, c2, c3 = load4(row, c if c < end else i)
            d0, d1, d2, d3 = load4(row, d if d < end else i)
            total = u64(total + _four(a0, a1, a2, a3, i, end, what, room))
            total = u64(total + _four(b0, b1, b2, b3, b, end, what, room))
            total = u64(total + _four(c0, c1, c2, c3, c, end, what, room))
            total = u64(total + _four(d0, d1, d2, d3, d, end, what, room))
            i = u32(i + 4 * stride)
        return total

    @device
    def _four(x0, x1, x2, x3, i, end, what, room):
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

    return walk


_weigh_all, _list_all = over(_weigh), over(_list)


@device
def shuffle_u64(value, lane):
    """A lane's value."""
    low, high = shuffle(u32(value & u64(0xFFFFFFFF)), lane), shuffle(u32(value >> u64(32)), lane)
    return u64(u64(u64(high) << u64(32)) | u64(low))


@device
def _sums_before(value, warps):
    """The sum over all threads before this one, and over all."""
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


def narrower(by_count: bool) -> DeviceFunction:
    """narrow(row, width, what, wanted, room) -> the border of the `wanted` leading candidates (by_count), or of the
    fewest that have at least wanted / 2**32 of all weight."""
    count_all = over(_counter(by_count))

    @device
    def narrow(row, width, what, wanted, room):
        peak, t, top, per, least, border, _, _, _ = what
        counts, sums, places, weights, warps, found, shared = room
        thread = u32(thread_index())
        bucket, shift, prefix, goal, level = u32(0), u32(64), u64(0), u64(0), u32(0)
        while True:
            for i in range(BUCKETS // THREADS):
                counts[thread + THREADS * i], sums[thread + THREADS * i] = u32(0), u64(0)
            if thread == 0:
                found[2] = u32(0)
            sync_block()
            what = (peak, t, top, per, least, border, bucket, shift, prefix)
            count_all(row, u32(4 * thread), width, u32(4 * THREADS), what, room)
            sync_block()
            first = u32(4 * thread)
            here = u64(u64(sums[first] + sums[first + 1]) + u64(sums[first + 2] + sums[first + 3]))
            before, total = _sums_before(here, warps)
            if level == 0:
                goal = u64(wanted) if by_count else part_of(total, wanted)
                goal = goal if goal > u64(0) else u64(1)
                if goal >= total:  # all of them
                    return border
            for i in range(4):
                after = u64(before + sums[first + i])
                if before < goal and goal <= after:
                    found[0], found[1], shared[0] = u32(first + i), counts[first + i], before
                before = after
            sync_block()
            goal = u64(goal - shared[0])
            if level == 0:
                bucket = found[0]
            else:
                prefix = u64(u64(prefix << u64(DIGIT)) | u64(found[0]))
            many = found[1]
            sync_block()
            if many <= LISTED:
                break
            shift, level = u32(44) if level == 0 else u32(shift - DIGIT), u32(level + 1)
        what = (peak, t, top, per, least, border, bucket, shift, prefix)
        _list_all(row, u32(4 * thread), width, u32(4 * THREADS), what, room)
        sync_block()
        if thread < many:
            ahead, other = u64(0), u32(0)
            while other < many:
                if places[other] < places[thread]:
                    ahead = u64(ahead + (u64(1) if by_count else weights[other]))
                other = u32(other + 1)
            if ahead < goal and goal <= u64(ahead + (u64(1) if by_count else weights[thread])):
                shared[1] = places[thread]
        sync_block()
        return shared[1]

    return narrow


@device
def draw(row, width, what, share, room):
    """The id at share / 2**32 of the candidates' weights, in the order of ids; the same in every thread."""
    thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
    sums, warps = room[1], room[4]
    begin, end, goal, level = u32(0), u32(width), u64(0), u32(0)
    while level == 0 or u32(end - begin) > 128:  # each warp sums up a piece; go on in the one that holds the goal
        piece = u32((u32(end - begin) + (WARPS * 128 - 1)) // (WARPS * 128) * 128)
        first = u32(begin + warp * piece)
        stop = u32(first + piece) if first + piece < end else end
        here = _weigh_all(row, u32(first + 4 * lane), stop, u32(128), what, room)
        _, total = _sums_before(here, warps)  # leaves what each warp has in `warps`
        if level == 0:
            goal = part_of(total, share)
        chosen, before = u32(0), u64(0)
        while chosen < WARPS - 1 and u64(before + warps[chosen]) <= goal:
            before, chosen = u64(before + warps[chosen]), u32(chosen + 1)
        goal, begin, level = u64(goal - before), u32(begin + chosen * piece), u32(level + 1)
        end = u32(begin + piece) if begin + piece < end else end
    i = u32(begin + thread)
    if i < end:
        sums[thread] = _weigh(row[i], i, what, room)
    sync_block()
    i, before = u32(0), sums[0]
    while before <= goal and u32(begin + i) + 1 < end:
        i = u32(i + 1)
        before = u64(before + sums[i])
    return u32(begin + i)
