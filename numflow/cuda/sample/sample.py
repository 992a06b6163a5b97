"""Choosing tokens on the device, so that ids come back and not rows of logits.

A row's settings are those of decoding.choice, which has them as words.
"""

from numflow.cuda.device.call import N_LOGIT_ROWS, Call, per_row
from numflow.cuda.lang.arithmetic import float_of, fmin
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, shuffle_xor, sync_block, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Following
from numflow.cuda.lang.reduce import better_of_warp
from numflow.cuda.lang.scalar import f32, i32, u32, u64
from numflow.cuda.sample.candidates import draw, narrower
from numflow.cuda.sample.row import BUCKETS, INFINITE, LAST_ID, THREADS, WARPS, load_row, memory, score_of
from numflow.decoding.choice import MIN_P, MOST_TOKENS, NONE, TOP_K, WORDS
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS
from numflow.ops import View

LOWEST = -3.4028235e38
WIDEST = 64.0  # distance from the best score that the buckets reach over at most
_values, _places, _lows = SharedArray(f32, WARPS), SharedArray(i32, WARPS), SharedArray(f32, WARPS)
_top_k, _top_p = narrower(True), narrower(False)


def best(ctx, logits: View) -> Call:
    """logits f32 [R, V] -> ids i32 [R]: the largest of each row, the first of equals; -1 for a row that has none, or
    an infinite one, or any NaN."""
    return per_row(None, _best, N_LOGIT_ROWS, 1, ctx.batch.ids, *ctx.view(logits), ctx.batch.counts, _width(logits))


def follow(ctx, logits: View) -> Call:
    """The same, and the tokens are the batch of the next step; ids i32 [R, MOST_STEPS], a column for each step."""
    return per_row(None, _follow, N_LOGIT_ROWS, 1, ctx.batch.following, *ctx.view(logits), ctx.batch.counts,
                   _width(logits))


def follow_drawn(ctx, logits: View) -> Call:
    """As `follow`, but drawn as each row's settings say, with the random number of the step."""
    return per_row(None, _follow_drawn, N_LOGIT_ROWS, 1, ctx.batch.following, *ctx.view(logits),
                   ctx.batch.ref("choices"), ctx.batch.counts, _width(logits))


def pick(ctx, logits: View) -> Call:
    """As `best`, but drawn as each row's settings say."""
    batch = ctx.batch
    return per_row(None, _pick, N_LOGIT_ROWS, 1, batch.ids, *ctx.view(logits), batch.ref("choices"), batch.counts,
                   _width(logits))


def _width(logits: View) -> int:
    if logits.width > MOST_TOKENS or logits.start % 4:
        raise RequestError(f"device 'cuda' cannot choose among {logits.width} tokens: {MOST_TOKENS} at most")
    return logits.width


@device
def _take(some, at, value, index, low, bad):
    """Four logits more, from index `at` on: the largest and its place, the smallest finite one, whether any is NaN."""
    for j in range(4):
        here = some[j]
        bad = bad | (here != here)
        if here > value:
            value, index = here, i32(at + j)
        low = fmin(low, here if here > f32(-INFINITE) else low)
    return value, index, low, bad


@device
def _survey(row, width):
    """The largest of a row and its first place (-1: there is none that is finite), and the smallest."""
    values, places, lows = _values(), _places(), _lows()
    thread = u32(thread_index())
    value, index, low, bad = f32(-INFINITE), i32(0x7FFFFFFF), f32(INFINITE), False
    i = u32(4 * thread)
    while i < width:
        b, c, d = u32(i + 4 * THREADS), u32(i + 8 * THREADS), u32(i + 12 * THREADS)
        of_a, of_b = load_row(row, i, i, width), load_row(row, b, i, width)
        of_c, of_d = load_row(row, c, i, width), load_row(row, d, i, width)
        value, index, low, bad = _take(of_a, i, value, index, low, bad)
        value, index, low, bad = _take(of_b, b, value, index, low, bad)
        value, index, low, bad = _take(of_c, c, value, index, low, bad)
        value, index, low, bad = _take(of_d, d, value, index, low, bad)
        i = u32(i + 16 * THREADS)
    index = i32(-1) if bad or value == f32(INFINITE) else index
    value = f32(INFINITE) if bad else value  # so that it is found
    value, index = better_of_warp(value, index)
    for k in range(5):
        low = fmin(low, shuffle_xor(low, 1 << k))
    if lane_index() == 0:
        warp = u32(thread >> u32(5))
        values[warp], places[warp], lows[warp] = value, index, low
    sync_block()
    value, index, low = values[0], places[0], lows[0]
    for warp in range(1, WARPS):
        if values[warp] > value or (values[warp] == value and places[warp] < index):
            value, index = values[warp], places[warp]
        low = fmin(low, lows[warp])
    return value, index if index < width else i32(-1), low


@kernel("argmax", THREADS, exact=True)
def _best(ids: i32.ptr, logits: f32.ptr, stride: u32, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    _, index, _ = _survey(logits + row * stride, width)
    if thread_index() == 0:
        ids[row] = index


@device
def _go_on(row, index, ids, draws, steps, rows, tokens, positions, sequence_of, lengths):
    """Make a row's token, or -1, that of the next step."""
    if thread_index() == 0:
        step, t = steps[row], rows[row]
        sequence = sequence_of[t]
        ids[i32(row * MOST_STEPS) + step] = index
        steps[row] = i32(step + 1)
        tokens[t] = index if index > 0 else i32(0)
        positions[t] = i32(positions[t] + 1)
        lengths[sequence] = i32(lengths[sequence] + 1)


@kernel("argmax_follow", THREADS, exact=True)
def _follow(batch: Following, logits: f32.ptr, stride: u32, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    _, index, _ = _survey(logits + row * stride, width)
    _go_on(row, index, *batch)


@device
def _drawn(source, width, own, share):
    """The token of a row by its settings and a random number, in every thread; -1: the row is not finite."""
    peak, index, low = _survey(source, width)
    t = float_of(own[0])
    if t == f32(0) or index < 0:
        return index
    room, top = memory(), score_of(peak, peak, t)
    reach = fmin(top - score_of(low, peak, t), f32(WIDEST))
    per = f32(BUCKETS - 1) / (reach if reach > f32(1e-3) else f32(1e-3))
    least, border, last, listed, i = f32(LOWEST), f32(LOWEST), u32(LAST_ID), u32(0), u32(2)
    while own[i] != NONE:
        what = (peak, t, top, per, least, border, last, u32(0), u32(64), u64(0))
        if own[i] == MIN_P:
            least = float_of(own[i + 1])
        elif own[i] == TOP_K:
            border, last, listed = _top_k(source, width, what, own[i + 1], listed, room)
        else:
            border, last, listed = _top_p(source, width, what, own[i + 1], listed, room)
        i = u32(i + 2)
    what = (peak, t, top, per, least, border, last, u32(0), u32(64), u64(0))
    return i32(draw(source, width, what, share, listed, room))


@kernel("sample", THREADS, exact=True)
def _pick(ids: i32.ptr, logits: f32.ptr, stride: u32, settings: u32.ptr, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    own = settings + row * WORDS
    index = _drawn(logits + row * stride, width, own, own[1])
    if thread_index() == 0:
        ids[row] = index


@kernel("sample_follow", THREADS, exact=True)
def _follow_drawn(batch: Following, logits: f32.ptr, stride: u32, settings: u32.ptr, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    share = batch.draws[u32(row * MOST_STEPS) + u32(batch.steps[row])]
    index = _drawn(logits + row * stride, width, settings + row * WORDS, share)
    _go_on(row, index, *batch)


BEST, FOLLOW, PICK, FOLLOW_DRAWN = _best, _follow, _pick, _follow_drawn
