"""The search of quant/search.py as kernels: preferred scale and zero of each block, then headers of rows and blocks.

Every value is computed by the operations of quant/search_kernels.py, in the same order and with the same roundings, so
that the headers have the same bits. Float32 products and sums that the compiler might fuse to an FMA use functions
named `_exactly`; float64 products are written to shared memory before they are summed.
"""

import functools
from typing import NamedTuple

from numflow.cuda.lang.arithmetic import (
    add_exactly,
    bits_of,
    count_bits,
    divide_exactly,
    fabs,
    float_of,
    floor_exactly,
    floor_to_int,
    fmax,
    fmin,
    multiply_exactly,
)
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import (
    ballot,
    block_x,
    block_y,
    lane_index,
    load4,
    shuffle,
    shuffle_xor,
    sync_block,
    sync_warp,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, f64, i32, u16, u32
from numflow.cuda.weights.search_rows import MOST_HEADERS, row_headers_of, scale_of
from numflow.quant import search
from numflow.quant.layout import BASE_BIAS, BASE_CODES, BASE_SHIFT, RowScheme

LIKES_WARPS, WARPS, AT_ONCE = 4, 8, 64  # warps of a thread block in the two kernels; quantisation blocks of a row
                                        # between two updates of its sum
_INFINITE, _WORST = float("inf"), search.WORST
_HALF, _WIDEST, _MARGIN, _STEP = 0.5, float(search.WIDEST), float(search.MARGIN), float(search.OFFSET_STEP)
_SMALLEST = float(search.SMALLEST)
_RANGES, _LANES, _WIDE, _REACH = search.RANGES, search.LANES, search.WIDE, search.REACH


class Blocks(NamedTuple):
    """For each quantisation block [N, B]: its range (which includes 0), its preferred scale and zero, and the sum of
    its squares."""

    low: f32.ptr
    high: f32.ptr
    scale: f32.ptr
    zero: f32.ptr
    squares: f64.ptr


class Headers(NamedTuple):
    """Headers of rows [N] and blocks [N, B]. tried [N, 2, B]: block headers of the best row header and the current one.
    """

    rows: u16.ptr
    blocks: u16.ptr
    tried: u16.ptr


@device
def nearest(value, top):
    """The nearest code to `value`, as f32."""
    return floor_exactly(fmin(fmax(add_exactly(value, f32(_HALF)), f32(0)), top))


@device
def _squared(w, c, inverse, zero, top):
    """c * (code - weight in codes)^2"""
    value = add_exactly(multiply_exactly(w, inverse), zero)
    distance = nearest(value, top) - value
    return multiply_exactly(c, multiply_exactly(distance, distance))


@functools.cache
def _sum_of_errors(size: int) -> DeviceFunction:
    """sum_of_errors(w, c, inverse, zero, top): weighted squared error of a block of `size` weights."""

    @device
    def sum_of_errors(w, c, inverse, zero, top):
        total = f32(0)
        for i in range(size // 4):
            w0, w1, w2, w3 = load4(w, 4 * i)
            c0, c1, c2, c3 = load4(c, 4 * i)
            total = add_exactly(total, _squared(w0, c0, inverse, zero, top))
            total = add_exactly(total, _squared(w1, c1, inverse, zero, top))
            total = add_exactly(total, _squared(w2, c2, inverse, zero, top))
            total = add_exactly(total, _squared(w3, c3, inverse, zero, top))
        return total

    return sum_of_errors


@device
def _middle(low, high, inverse, top):
    """The zero for which the middle of a block's range is the middle code."""
    return top * f32(_HALF) - multiply_exactly((low + high) * f32(_HALF), inverse)


@device
def _lowest_bit(word):
    """Index of the lowest set bit."""
    return count_bits(u32((word & u32(0 - word)) - 1))


@functools.cache
def likes_kernel(scheme: RowScheme) -> Kernel:
    """The preferred scale and zero of each block: one warp for each block; a lane tries two of the 64 combinations of a
    clipping range and a zero."""
    size, span, narrowest = scheme.block, float(scheme.levels - 1), scheme.narrowest
    sum_of_errors = _sum_of_errors(size)

    @device
    def range_scale(k, low, high):
        top, least = f32(span), f32(narrowest)
        part = divide_exactly(multiply_exactly(f32(_WIDEST) - least, f32(k)), f32(_RANGES - 1))
        return multiply_exactly(divide_exactly(high - low, top), add_exactly(least, part))

    @kernel(f"quantise_likes_{scheme.name}", 32 * LIKES_WARPS, exact=True)
    def _likes(found: Blocks, x: f32.ptr, importance: Rows, columns: u32, blocks: u32):
        block = u32(block_x() * LIKES_WARPS + u32(thread_index() >> u32(5)))
        lane, top = u32(lane_index()), f32(span)
        if block >= blocks:
            return
        w = x + u32(block_y() * columns + u32(block * size))
        c = importance.data + u32(block_y() * importance.stride + u32(block * size))
        # The range, including 0, and the sum of squares in order.
        own = w[lane & u32(size - 1)]
        low, high = own if own < f32(0) else f32(0), own if own > f32(0) else f32(0)
        for i in range(5):
            low, high = fmin(low, shuffle_xor(low, 1 << i)), fmax(high, shuffle_xor(high, 1 << i))
        squares = f64(0)
        for i in range(size):
            squares = squares + f64(w[i]) * f64(w[i])
        # Errors of all combinations; the least error of each range, over its 8 lanes.
        best, scale, zero = f64(_INFINITE), f32(0), f32(_HALF)
        for i in range(2):
            s = range_scale(u32(u32(lane >> u32(3)) + 4 * i), low, high)
            inverse = divide_exactly(f32(1), s) if s > f32(_SMALLEST) else f32(0)
            offset = multiply_exactly(multiply_exactly(f32(u32(lane & u32(7))) - f32(3.5), f32(_STEP)), top)
            at = fmin(fmax(add_exactly(_middle(low, high, inverse, top), offset), f32(0)), top)
            error = sum_of_errors(w, c, inverse, at, top)
            error = error if error < f32(_INFINITE) else f32(_INFINITE)
            least = error
            for j in range(3):
                least = fmin(least, shuffle_xor(least, 1 << j))
            equal = ballot(error == least)
            # The ranges one after the other: the first among equal least errors wins.
            for group in range(4):
                s = range_scale(u32(4 * i + group), low, high)
                weighted = f64(shuffle(least, 8 * group)) * (f64(s) * f64(s))
                from_here = shuffle(at, 8 * group + _lowest_bit(u32(equal >> u32(8 * group) & u32(255))))
                if weighted < best and s > f32(_SMALLEST):
                    best, scale, zero = weighted, s, divide_exactly(from_here, top)
        if multiply_exactly(divide_exactly(high - low, top), f32(_WIDEST)) <= f32(_SMALLEST):
            scale, zero = f32(0), f32(_HALF)
        # Write the results of the block.
        if lane == 0:
            place = u32(block_y() * blocks + block)
            found.low[place], found.high[place], found.squares[place] = low, high, squares
            found.scale[place], found.zero[place] = scale, zero

    return _likes


@functools.cache
def _best_header(scheme: RowScheme) -> DeviceFunction:
    """best_header(...), called by a warp: the least error of a block, f64, and the block header that has it."""
    size, span, narrowest, scale_bits = scheme.block, float(scheme.levels - 1), scheme.narrowest, scheme.scale_bits
    codes, zero_codes = 1 << scale_bits, 1 << scheme.zero_bits
    lanes = min(_LANES, zero_codes)  # zeros that are tried with a scale, one for each lane
    lane_bits, groups = lanes.bit_length() - 1, 32 // lanes
    sum_of_errors, many = _sum_of_errors(size), zero_codes > lanes
    group_errors, group_headers = SharedArray(f64, WARPS * groups), SharedArray(u32, WARPS * groups)

    @device
    def first_zero(low, high, inverse, zeros):
        away = divide_exactly(_middle(low, high, inverse, f32(span)) - zeros[0], zeros[1] - zeros[0])
        at = i32(floor_to_int(away) - lanes // 2)
        return u32(0) if at < 0 else u32(at if at < zero_codes - lanes else zero_codes - lanes)

    @device
    def best_header(w, c, low, high, window, scales, inverses, squared, zeros):
        lane, top, first, last = u32(lane_index()), f32(span), u32(0), u32(0)
        # The range of scale codes to try.
        reach = f32(_HALF) + f32(_HALF) * float_of(u32((127 - window) << u32(23)))
        shortest = multiply_exactly(divide_exactly(high - low, top), f32(narrowest))
        longest = fmax(high - low, divide_exactly(fmax(-low, high), reach))
        longest = multiply_exactly(divide_exactly(longest, top), f32(_MARGIN))
        for i in range((codes + 31) // 32):
            at = u32(lane + 32 * i)
            inside = at < codes - 1
            at = at if inside else u32(0)
            first = u32(first + count_bits(ballot(inside and scales[at + 1] <= shortest)))
            last = u32(last + count_bits(ballot(inside and scales[at] < longest)))
        # Each lane tries a zero, each group of `lanes` lanes a scale; the first among equal least errors wins.
        least, best = f64(_INFINITE), first
        group, z, at = u32(lane >> u32(lane_bits)), u32(lane & u32(lanes - 1)), first
        while at <= last:
            s = u32(at + group)
            used = s <= last
            s = s if used else last
            begin = first_zero(low, high, inverses[s], zeros) if many else u32(0)
            error = sum_of_errors(w, c, inverses[s], zeros[u32(begin + z)], top)
            error = error if error < f32(_INFINITE) else f32(_INFINITE)
            lowest = error
            for i in range(lane_bits):
                lowest = fmin(lowest, shuffle_xor(lowest, 1 << i))
            equal = u32(ballot(error == lowest) >> u32(group << u32(lane_bits)) & u32((1 << lanes) - 1))
            weighted = f64(lowest) * squared[s]
            if used and weighted < least:
                least, best = weighted, u32(s | u32(begin + _lowest_bit(equal)) << u32(scale_bits))
            at = u32(at + groups)
        # The least error over the groups, and the lowest scale code among equals.
        own = u32(u32(thread_index() >> u32(5)) * groups)
        errors, headers = group_errors() + own, group_headers() + own
        if z == 0:
            errors[group], headers[group] = least, best
        sync_warp()
        least, best = errors[0], headers[0]
        for i in range(1, groups):
            less = headers[i] & u32(codes - 1) < best & u32(codes - 1)
            if errors[i] < least or (errors[i] == least and less):
                least, best = errors[i], headers[i]
        sync_warp()
        return least, best

    return best_header


@functools.cache
def search_kernel(scheme: RowScheme) -> Kernel:
    """The headers of a row and its blocks: one thread block for each row tries row headers one after the other, and its
    warps try block headers."""
    size, scale_bits, codes = scheme.block, scheme.scale_bits, 1 << scheme.scale_bits
    zero_codes, row_headers, best_header = 1 << scheme.zero_bits, row_headers_of(scheme), _best_header(scheme)
    listed, facts, sums = SharedArray(u32, MOST_HEADERS), SharedArray(i32, 4), SharedArray(f64, 4)
    scales_, inverses_, squared_ = SharedArray(f32, codes), SharedArray(f32, codes), SharedArray(f64, codes)
    errors_, worsts_ = SharedArray(f64, AT_ONCE), SharedArray(f64, AT_ONCE)

    @device
    def span_of(scales, zeros, blocks):
        """Called by a warp: base codes of the smallest relevant scale and of the largest scale, the bits of the largest
        scale, and the largest distance of a zero from 1/2."""
        largest, farthest, first, at = i32(0), f32(0), i32(BASE_CODES), u32(lane_index())
        while at < blocks:
            if scales[at] > f32(0):
                pattern, away = i32(bits_of(scales[at])), fabs(zeros[at] - f32(_HALF))
                largest, farthest = pattern if pattern > largest else largest, fmax(farthest, away)
            at = u32(at + 32)
        for i in range(5):
            other = shuffle_xor(largest, 1 << i)
            largest, farthest = other if other > largest else largest, fmax(farthest, shuffle_xor(farthest, 1 << i))
        last, at = i32((largest >> i32(BASE_SHIFT)) - BASE_BIAS), u32(lane_index())
        while at < blocks:
            code = i32((i32(bits_of(scales[at])) >> i32(BASE_SHIFT)) - BASE_BIAS)
            if scales[at] > f32(0) and code >= last - _REACH:
                first = code if code < first else first
            at = u32(at + 32)
        for i in range(5):
            other = shuffle_xor(first, 1 << i)
            first = other if other < first else first
        return i32(1) if first < 1 else first, last, largest, farthest

    @device
    def counts(scale, first):
        return scale > f32(0) and i32((i32(bits_of(scale)) >> i32(BASE_SHIFT)) - BASE_BIAS) >= first

    @kernel(f"quantise_search_{scheme.name}", 32 * WARPS, exact=True)
    def _search(out: Headers, x: f32.ptr, importance: Rows, known: Blocks, zeros: f32.ptr, columns: u32, blocks: u32,
                by_block: u32):
        row, thread, headers, fact, total_of = block_y(), u32(thread_index()), listed(), facts(), sums()
        scales, inverses, squared, errors, worsts = scales_(), inverses_(), squared_(), errors_(), worsts_()
        warp, lane, place = u32(thread >> u32(5)), u32(lane_index()), u32(row * blocks)
        tried = out.tried + u32(2 * place)
        # The row headers to try. In a row with very different scales, errors of blocks are weighted by their squares.
        if warp == 0:
            first, last, largest, farthest = span_of(known.scale + place, known.zero + place, blocks)
            if lane == 0:
                wide, used, whole, at = by_block != 0 and last - first > _WIDE, i32(0), f64(0), u32(0)
                while wide and at < blocks:
                    whole = whole + known.squares[place + at]
                    used = i32(used + 1) if counts(known.scale[place + at], first) else used
                    at = u32(at + 1)
                count = u32(0)
                if last >= 1:
                    count = row_headers(headers, first, last, largest, multiply_exactly(farthest, f32(1.1)))
                fact[0], fact[1], fact[2], total_of[2] = i32(count), first, used, whole
        sync_block()
        count, first, used, whole = u32(fact[0]), fact[1], fact[2], total_of[2]
        least, chosen, turn, which = f64(_INFINITE), u32(0), u32(0), u32(0)
        while which < count:
            header = headers[which]
            # The scales of this header.
            if thread < codes:
                scale = scale_of(header, thread, scale_bits)
                scales[thread], inverses[thread] = scale, divide_exactly(f32(1), scale)
                squared[thread] = f64(scale) * f64(scale)
            sync_block()
            total, worst, begin = f64(0), f64(0), u32(0)
            while begin < blocks:
                # The best headers of some blocks, a warp for each.
                at = u32(begin + warp)
                while at < blocks and at < begin + AT_ONCE:
                    w = x + u32(row * columns + u32(at * size))
                    c = importance.data + u32(row * importance.stride + u32(at * size))
                    error, found = best_header(w, c, known.low[place + at], known.high[place + at], header & u32(3),
                                               scales, inverses, squared,
                                               zeros + u32((header & u32(3)) * zero_codes))
                    if lane == 0:
                        share, most = f64(1), f64(0)
                        if used > 0:
                            share, most = f64(1) / whole, f64(0)
                            if counts(known.scale[place + at], first):
                                share = share + f64(1) / (f64(used) * known.squares[place + at])
                                most = f64(_WORST) / known.squares[place + at]
                        tried[u32(turn * blocks + at)] = u16(found)
                        errors[at - begin], worsts[at - begin] = error * share, error * most
                    at = u32(at + WARPS)
                sync_block()
                # Add the errors in the order of blocks. Stop once the sum exceeds the best header's.
                if thread == 0:
                    at = u32(0)
                    while at < AT_ONCE and begin + at < blocks:
                        total = total + errors[at]
                        worst = worsts[at] if worsts[at] > worst else worst
                        at = u32(at + 1)
                    total_of[0], total_of[1] = total, worst
                sync_block()
                begin = u32(begin + AT_ONCE) if total_of[0] + total_of[1] <= least else blocks
            if total_of[0] + total_of[1] < least:
                least, chosen, turn = total_of[0] + total_of[1], header, u32(1 - turn)
            which = u32(which + 1)
        # Write the headers with the least error, which are in the half of `tried` that is not the current one.
        if thread == 0:
            out.rows[row] = u16(chosen)
        at = thread
        while at < blocks:
            out.blocks[place + at] = tried[u32(u32(1 - turn) * blocks + at)] if chosen != 0 else u16(0)
            at = u32(at + 32 * WARPS)

    return _search
