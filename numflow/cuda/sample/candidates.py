"""Filters (top-k, top-p) of a row's candidates, and the draw of one of them, without sorting the vocabulary (row.py).

A filter always keeps the leading candidates, up to and including one, the border. The border is found by a radix select
(histograms): first count the candidates, and sum their weights, in buckets of equal width by their distance from the
best score. The bucket with the border is then split by successive digits of the sort keys, until it has so few
candidates that they fit into a list and can be compared with each other. Once all remaining candidates are in the list,
later filters and the draw read the list, not the row.

bucket, shift, prefix of the row's state select candidates: with shift ONE_BUCKET the candidates of `bucket`; with
UP_TO_BUCKET those of `bucket` and all better buckets; else those of `bucket` whose sort key >> shift is `prefix`.
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
    examine,
    exclusive_scan,
    fraction_of,
    from_sort_key,
    row_walker,
    sort_key,
    weight_of,
)

DIGIT = 11  # bits of a digit: 2**DIGIT buckets
FIRST_SHIFT = 44  # shift of the first digit of a sort key
ONE_BUCKET, UP_TO_BUCKET = 64, 65


@device
def _bucket(depth, state):
    return u32(fmin(-depth * state[3], f32(BUCKETS - 1)))


@device
def _weigh(x, id, state, buffers):
    _, depth, is_candidate = examine(x, id, state)
    return weight_of(depth) if is_candidate else u64(0)


def _counter(by_count: bool) -> DeviceFunction:
    """Make count(x, id, state, buffers): add a candidate to the histogram.

    First by its bucket; later, for candidates that have the digits found so far, by the next digit of the sort key.
    """
    @device
    def count(x, id, state, buffers):
        score, depth, is_candidate = examine(x, id, state)
        bucket, wanted_bucket, shift, prefix = _bucket(depth, state), state[7], state[8], state[9]
        if shift < u32(ONE_BUCKET):
            key = sort_key(score, id)
            is_candidate = is_candidate and bucket == wanted_bucket and u64(key >> u64(shift + DIGIT)) == prefix
            bucket = u32(u64(key >> u64(shift)) & u64(BUCKETS - 1))
        if is_candidate:
            counts, lows, highs = buffers[0], buffers[1], buffers[2]
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
    """Make put(x, id, state, buffers): append a candidate to the list if the state selects it."""
    @device
    def put(x, id, state, buffers):
        score, depth, is_candidate = examine(x, id, state)
        bucket, wanted_bucket, shift, prefix = _bucket(depth, state), state[7], state[8], state[9]
        if is_candidate and (bucket == wanted_bucket or (shift == u32(UP_TO_BUCKET) and bucket < wanted_bucket)):
            key = sort_key(score, id)
            keys, depths, weights, found = buffers[3], buffers[4], buffers[5], buffers[7]
            weight = weight_of(depth)
            if ((by_count or weight > u64(0))
                    and (shift >= u32(ONE_BUCKET) or u64(key >> u64(shift)) == prefix)):
                slot = atomic_add(found, 2, u32(1))
                keys[slot], depths[slot], weights[slot] = key, depth, weight
        return u64(0)
    return put


@device
def _is_listed(slot, listed, state, buffers):
    """True if a slot of the list has a candidate that the filters so far keep."""
    keys, depths = buffers[3], buffers[4]
    return slot < listed and keys[slot] <= sort_key(state[5], state[6]) and depths[slot] >= state[4]


def border_finder(by_count: bool) -> DeviceFunction:
    """Make find_border(row, width, state, wanted, listed, buffers) -> (border, last, listed).

    by_count: the border of the `wanted` leading candidates (top-k). Else the border of the fewest leading candidates
    that have at least wanted / 2**32 of the total weight (top-p).
    listed: length of the list if the list has all candidates, else 0.
    """
    count_all, list_all = row_walker(_counter(by_count)), row_walker(_lister(by_count))

    @device
    def fill(row, width, state, wanted, buffers):
        """Write the candidates among which the border is to the list.

        Returns the length of the list, whether it has all candidates up to the border, and the count or weight that
        the border must reach within the list (0: all candidates stay).
        """
        max_logit, t, max_score, buckets_per_unit, min_depth, border, last, _, _, _ = state
        counts, lows, highs, _, _, _, warps, broadcast32, broadcast64 = buffers
        thread = u32(thread_index())
        first, level = u32(4 * thread), u32(0)
        bucket, shift, prefix, goal = u32(0), u32(ONE_BUCKET), u64(0), u64(0)
        while True:
            for i in range(BUCKETS // THREADS):
                slot = u32(thread + THREADS * i)
                counts[slot], lows[slot], highs[slot] = u32(0), u32(0), u32(0)
            if thread == 0:
                broadcast32[2] = u32(0)
            sync_block()
            state = (max_logit, t, max_score, buckets_per_unit, min_depth, border, last, bucket, shift, prefix)
            count_all(row, first, width, u32(4 * THREADS), state, buffers)
            sync_block()
            count, weight_sum = u64(0), u64(0)
            for i in range(4):
                count = u64(count + u64(counts[first + i]))
                weight_sum = u64(weight_sum + _sum_of(counts, lows, highs, u32(first + i)))
            count_before, count = exclusive_scan(count, warps)
            before, total = exclusive_scan(weight_sum, warps)
            if level == 0:
                goal = _goal(total, wanted)
                if goal >= total:
                    return u32(0), False, u64(0)
            for i in range(4):
                after = u64(before + _sum_of(counts, lows, highs, u32(first + i)))
                count_before = u64(count_before + u64(counts[first + i]))
                if before < goal and goal <= after:
                    broadcast32[0], broadcast32[1] = u32(first + i), counts[first + i]
                    broadcast32[3] = u32(count_before)
                    broadcast64[0] = before
                before = after
            sync_block()
            border_bucket, bucket_count = broadcast32[0], broadcast32[1]
            count_up_to, weight_passed = broadcast32[3], broadcast64[0]
            sync_block()
            is_whole = level == 0 and count_up_to <= LISTED
            if level == 0:
                bucket = border_bucket
            else:
                prefix = u64(u64(prefix << u64(DIGIT)) | u64(border_bucket))
            if is_whole:
                shift = u32(UP_TO_BUCKET)
                break
            goal = u64(goal - weight_passed)
            if bucket_count <= LISTED:
                break
            shift, level = u32(FIRST_SHIFT) if level == 0 else u32(shift - DIGIT), u32(level + 1)
        state = (max_logit, t, max_score, buckets_per_unit, min_depth, border, last, bucket, shift, prefix)
        list_all(row, first, width, u32(4 * THREADS), state, buffers)
        sync_block()
        return u32(broadcast32[2]), is_whole, goal

    @device
    def _sum_of(counts, lows, highs, bucket):
        if by_count:
            return u64(counts[bucket])
        return u64(u64(u64(highs[bucket]) << u64(32)) | u64(lows[bucket]))

    @device
    def _goal(total, wanted):
        goal = u64(wanted) if by_count else fraction_of(total, wanted)
        return goal if goal > u64(0) else u64(1)

    @device
    def find_border(row, width, state, wanted, listed, buffers):
        thread, keys, weights, broadcast64 = u32(thread_index()), buffers[3], buffers[5], buffers[8]
        length, is_whole, goal = listed, True, u64(0)
        if listed == 0:
            length, is_whole, goal = fill(row, width, state, wanted, buffers)
        own_weight, is_candidate = u64(0), _is_listed(thread, length, state, buffers)
        if is_candidate:
            own_weight = u64(1) if by_count else weights[thread]
        if listed > 0:
            _, total = exclusive_scan(own_weight, buffers[6])
            goal = _goal(total, wanted)
            if goal >= total:
                goal = u64(0)
        if goal == u64(0):
            return state[5], state[6], listed
        if is_candidate:
            weight_ahead, other = u64(0), u32(0)
            while other < length:
                if keys[other] < keys[thread] and _is_listed(other, length, state, buffers):
                    weight_ahead = u64(weight_ahead + (u64(1) if by_count else weights[other]))
                other = u32(other + 1)
            if weight_ahead < goal and goal <= u64(weight_ahead + own_weight):
                broadcast64[1] = keys[thread]
        sync_block()
        border, last = from_sort_key(broadcast64[1])
        return border, last, length if is_whole else u32(0)

    return find_border


_weigh_all = row_walker(_weigh)


@device
def draw(row, width, state, share, listed, buffers):
    """Draw a candidate: the id at which the running sum of weights, in the order of ids, passes share / 2**32 of the
    total. All threads get the same id."""
    if listed > 0:
        return _draw_listed(state, share, listed, buffers)
    return _draw_of_all(row, width, state, share, buffers)


@device
def _draw_listed(state, share, listed, buffers):
    thread, keys, weights, broadcast64 = u32(thread_index()), buffers[3], buffers[5], buffers[8]
    own_weight = weights[thread] if _is_listed(thread, listed, state, buffers) else u64(0)
    _, total = exclusive_scan(own_weight, buffers[6])
    goal, weight_ahead, other = fraction_of(total, share), u64(0), u32(0)
    if own_weight > u64(0):
        id = u64(keys[thread] & u64(LAST_ID))
        while other < listed:
            if u64(keys[other] & u64(LAST_ID)) < id and _is_listed(other, listed, state, buffers):
                weight_ahead = u64(weight_ahead + weights[other])
            other = u32(other + 1)
        if weight_ahead <= goal and goal < u64(weight_ahead + own_weight):
            broadcast64[0] = id
    sync_block()
    return u32(broadcast64[0])


@device
def _draw_of_all(row, width, state, share, buffers):
    thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
    warps, weights = buffers[6], buffers[5]
    begin, end, goal, level = u32(0), u32(width), u64(0), u32(0)
    while level == 0 or u32(end - begin) > 128:  # each warp sums one piece; continue in the piece that has the goal
        piece = u32((u32(end - begin) + (WARPS * 128 - 1)) // (WARPS * 128) * 128)
        first = u32(begin + warp * piece)
        stop = u32(first + piece) if first + piece < end else end
        weight_sum = _weigh_all(row, u32(first + 4 * lane), stop, u32(128), state, buffers)
        _, total = exclusive_scan(weight_sum, warps)
        if level == 0:
            goal = fraction_of(total, share)
        chosen_warp, before = u32(0), u64(0)
        while chosen_warp < WARPS - 1 and u64(before + warps[chosen_warp]) <= goal:
            before, chosen_warp = u64(before + warps[chosen_warp]), u32(chosen_warp + 1)
        goal, begin, level = u64(goal - before), u32(begin + chosen_warp * piece), u32(level + 1)
        end = u32(begin + piece) if begin + piece < end else end
    i = u32(begin + thread)
    if i < end:
        weights[thread] = _weigh(row[i], i, state, buffers)
    sync_block()
    i, before = u32(0), weights[0]
    while before <= goal and u32(begin + i) + 1 < end:
        i = u32(i + 1)
        before = u64(before + weights[i])
    return u32(begin + i)
