"""The candidates of a row narrowed by filters, and one of them drawn, without sorting the vocabulary (row.py).

What a filter leaves is always the leading candidates, up to one of them, the border. It is found by counting: all
candidates are counted, and their weights summed up, in buckets of equal width by their distance from the best one; the
bucket that the border lies in is counted again by digits of the places until few enough are left to be listed and
compared with each other. As soon as all that is left fits into the list, nobody walks over the row any more.

bucket, shift, prefix: candidates of the bucket (shift ONE_BUCKET) or of it and those before it (UP_TO_BUCKET); else
those of the bucket whose place begins with `prefix`, the bits from `shift` on.
"""

from numflow.cuda.lang.arithmetic import fmin
from numflow.cuda.lang.intrinsics import atomic_add, lane_index, sync_block, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32, u64
from numflow.cuda.sample.row import (
    BUCKETS,
    LAST_ID,
    LISTED,
    THREADS,
    WARPS,
    at_place,
    over,
    part_of,
    place_of,
    stand,
    sums_before,
    weight_of,
)

DIGIT = 11  # bits that choose one of the buckets
FIRST_SHIFT = 44  # of the digits of a place
ONE_BUCKET, UP_TO_BUCKET = 64, 65


@device
def _bucket(depth, what):
    return u32(fmin(-depth * what[3], f32(BUCKETS - 1)))


@device
def _weigh(x, id, what, room):
    _, depth, good = stand(x, id, what)
    return weight_of(depth) if good else u64(0)


def _counter(by_count: bool) -> DeviceFunction:
    """Adds a candidate to its bucket: one that has the digits that are known, to that of its next digit."""
    @device
    def count(x, id, what, room):
        score, depth, good = stand(x, id, what)
        bucket, inside, shift, prefix = _bucket(depth, what), what[7], what[8], what[9]
        if shift < u32(ONE_BUCKET):
            place = place_of(score, id)
            good = good and bucket == inside and u64(place >> u64(shift + DIGIT)) == prefix
            bucket = u32(u64(place >> u64(shift)) & u64(BUCKETS - 1))
        if good:
            counts, lows, highs = room[0], room[1], room[2]
            weight = u64(1) if by_count else weight_of(depth)
            if weight > u64(0):
                atomic_add(counts, bucket, u32(1))
                if not by_count:
                    low, high = u32(weight & u64(0xFFFFFFFF)), u32(weight >> u64(32))
                    before = atomic_add(lows, bucket, low)
                    atomic_add(highs, bucket, u32(high + (u32(1) if u32(before + low) < low else u32(0))))
        return u64(0)
    return count


def _lister(by_count: bool) -> DeviceFunction:
    """Writes down the candidates that are looked for."""
    @device
    def put(x, id, what, room):
        score, depth, good = stand(x, id, what)
        bucket, inside, shift, prefix = _bucket(depth, what), what[7], what[8], what[9]
        if good and (bucket == inside or (shift == u32(UP_TO_BUCKET) and bucket < inside)):
            place = place_of(score, id)
            places, depths, weights, found = room[3], room[4], room[5], room[7]
            weight = weight_of(depth)
            if ((by_count or weight > u64(0))
                    and (shift >= u32(ONE_BUCKET) or u64(place >> u64(shift)) == prefix)):
                slot = atomic_add(found, 2, u32(1))
                places[slot], depths[slot], weights[slot] = place, depth, weight
        return u64(0)
    return put


@device
def _is_listed(slot, listed, what, room):
    """True if a slot of the list holds a candidate."""
    places, depths = room[3], room[4]
    return slot < listed and places[slot] <= place_of(what[5], what[6]) and depths[slot] >= what[4]


def narrower(by_count: bool) -> DeviceFunction:
    """narrow(row, width, what, wanted, listed, room) -> (border, last, listed): the border of the `wanted` leading
    candidates (by_count), or of the fewest that have at least wanted / 2**32 of all weight.

    listed: length of the list, if it has all candidates, else 0.
    """
    count_all, list_all = over(_counter(by_count)), over(_lister(by_count))

    @device
    def fill(row, width, what, wanted, room):
        """List what the border is among: (length of the list, whether it has all candidates up to there, what is
        wanted of it; 0: all candidates are to stay)."""
        peak, t, top, per, least, border, last, _, _, _ = what
        counts, lows, highs, _, _, _, warps, found, shared = room
        thread = u32(thread_index())
        first, level = u32(4 * thread), u32(0)
        bucket, shift, prefix, goal = u32(0), u32(ONE_BUCKET), u64(0), u64(0)
        while True:
            for i in range(BUCKETS // THREADS):
                at = u32(thread + THREADS * i)
                counts[at], lows[at], highs[at] = u32(0), u32(0), u32(0)
            if thread == 0:
                found[2] = u32(0)
            sync_block()
            what = (peak, t, top, per, least, border, last, bucket, shift, prefix)
            count_all(row, first, width, u32(4 * THREADS), what, room)
            sync_block()
            many, here = u64(0), u64(0)
            for i in range(4):
                many = u64(many + u64(counts[first + i]))
                here = u64(here + _sum_of(counts, lows, highs, u32(first + i)))
            many_before, many = sums_before(many, warps)
            before, total = sums_before(here, warps)
            if level == 0:
                goal = _goal(total, wanted)
                if goal >= total:
                    return u32(0), False, u64(0)
            for i in range(4):
                after = u64(before + _sum_of(counts, lows, highs, u32(first + i)))
                many_before = u64(many_before + u64(counts[first + i]))
                if before < goal and goal <= after:
                    found[0], found[1], found[3] = u32(first + i), counts[first + i], u32(many_before)
                    shared[0] = before
                before = after
            sync_block()
            chosen, many_inside, many_up_to, passed = found[0], found[1], found[3], shared[0]
            sync_block()
            whole = level == 0 and many_up_to <= LISTED
            if level == 0:
                bucket = chosen
            else:
                prefix = u64(u64(prefix << u64(DIGIT)) | u64(chosen))
            if whole:
                shift = u32(UP_TO_BUCKET)
                break
            goal = u64(goal - passed)
            if many_inside <= LISTED:
                break
            shift, level = u32(FIRST_SHIFT) if level == 0 else u32(shift - DIGIT), u32(level + 1)
        what = (peak, t, top, per, least, border, last, bucket, shift, prefix)
        list_all(row, first, width, u32(4 * THREADS), what, room)
        sync_block()
        return u32(found[2]), whole, goal

    @device
    def _sum_of(counts, lows, highs, bucket):
        if by_count:
            return u64(counts[bucket])
        return u64(u64(u64(highs[bucket]) << u64(32)) | u64(lows[bucket]))

    @device
    def _goal(total, wanted):
        goal = u64(wanted) if by_count else part_of(total, wanted)
        return goal if goal > u64(0) else u64(1)

    @device
    def narrow(row, width, what, wanted, listed, room):
        thread, places, weights, shared = u32(thread_index()), room[3], room[5], room[8]
        length, whole, goal = listed, True, u64(0)
        if listed == 0:
            length, whole, goal = fill(row, width, what, wanted, room)
        own, good = u64(0), _is_listed(thread, length, what, room)
        if good:
            own = u64(1) if by_count else weights[thread]
        if listed > 0:
            _, total = sums_before(own, room[6])
            goal = _goal(total, wanted)
            if goal >= total:
                goal = u64(0)
        if goal == u64(0):
            return what[5], what[6], listed
        if good:
            ahead, other = u64(0), u32(0)
            while other < length:
                if places[other] < places[thread] and _is_listed(other, length, what, room):
                    ahead = u64(ahead + (u64(1) if by_count else weights[other]))
                other = u32(other + 1)
            if ahead < goal and goal <= u64(ahead + own):
                shared[1] = places[thread]
        sync_block()
        border, last = at_place(shared[1])
        return border, last, length if whole else u32(0)

    return narrow


_weigh_all = over(_weigh)


@device
def draw(row, width, what, share, listed, room):
    """The id at share / 2**32 of the candidates' weights, in the order of ids; the same in every thread."""
    return _draw_listed(what, share, listed, room) if listed > 0 else _draw_of_all(row, width, what, share, room)


@device
def _draw_listed(what, share, listed, room):
    thread, places, weights, shared = u32(thread_index()), room[3], room[5], room[8]
    own = weights[thread] if _is_listed(thread, listed, what, room) else u64(0)
    _, total = sums_before(own, room[6])
    goal, ahead, other = part_of(total, share), u64(0), u32(0)
    if own > u64(0):
        id = u64(places[thread] & u64(LAST_ID))
        while other < listed:
            if u64(places[other] & u64(LAST_ID)) < id and _is_listed(other, listed, what, room):
                ahead = u64(ahead + weights[other])
            other = u32(other + 1)
        if ahead <= goal and goal < u64(ahead + own):
            shared[0] = id
    sync_block()
    return u32(shared[0])


@device
def _draw_of_all(row, width, what, share, room):
    thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
    warps, weights = room[6], room[5]
    begin, end, goal, level = u32(0), u32(width), u64(0), u32(0)
    while level == 0 or u32(end - begin) > 128:  # each warp sums up a piece; go on in the one that holds the goal
        piece = u32((u32(end - begin) + (WARPS * 128 - 1)) // (WARPS * 128) * 128)
        first = u32(begin + warp * piece)
        stop = u32(first + piece) if first + piece < end else end
        here = _weigh_all(row, u32(first + 4 * lane), stop, u32(128), what, room)
        _, total = sums_before(here, warps)
        if level == 0:
            goal = part_of(total, share)
        chosen, before = u32(0), u64(0)
        while chosen < WARPS - 1 and u64(before + warps[chosen]) <= goal:
            before, chosen = u64(before + warps[chosen]), u32(chosen + 1)
        goal, begin, level = u64(goal - before), u32(begin + chosen * piece), u32(level + 1)
        end = u32(begin + piece) if begin + piece < end else end
    i = u32(begin + thread)
    if i < end:
        weights[thread] = _weigh(row[i], i, what, room)
    sync_block()
    i, before = u32(0), weights[0]
    while before <= goal and u32(begin + i) + 1 < end:
        i = u32(i + 1)
        before = u64(before + weights[i])
    return u32(begin + i)
