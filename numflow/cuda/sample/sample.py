"""Sampling on the device, so that token ids are copied to the host instead of rows of logits.

The settings of a row are the 32-bit words of decoding.choice.
"""

from numflow.cuda.device.call import N_LOGIT_ROWS, Call, per_row
from numflow.cuda.lang.arithmetic import float_of, fmin
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, shuffle_xor, sync_block, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Following
from numflow.cuda.lang.reduce import better_of_warp
from numflow.cuda.lang.scalar import f32, i32, u32, u64
from numflow.cuda.sample.candidates import border_finder, draw
from numflow.cuda.sample.row import BUCKETS, INFINITE, LAST_ID, THREADS, WARPS, load_row, memory, score_of
from numflow.decoding.choice import MIN_P, MOST_TOKENS, NONE, TOP_K, WORDS
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS
from numflow.ops import View

LOWEST = -3.4028235e38
WIDEST = 64.0  # largest distance from the best score that the histogram's buckets cover
_values, _indices, _lows = SharedArray(f32, WARPS), SharedArray(i32, WARPS), SharedArray(f32, WARPS)
_top_k, _top_p = border_finder(True), border_finder(False)


def best(ctx, logits: View) -> Call:
    """logits f32 [R, V] -> ids i32 [R]: the argmax of each row, the first among equals.

    -1 for a row without a finite logit, with a logit of +inf, or with any NaN.
    """
    return per_row(None, _best, N_LOGIT_ROWS, 1, ctx.batch.ids, *ctx.view(logits), ctx.batch.counts, _width(logits))


def follow(ctx, logits: View) -> Call:
    """As `best`, and the kernel makes the tokens the batch of the next step. ids i32 [R, MOST_STEPS], a column a step.
    """
    return per_row(None, _follow, N_LOGIT_ROWS, 1, ctx.batch.following, *ctx.view(logits), ctx.batch.counts,
                   _width(logits))


def follow_drawn(ctx, logits: View) -> Call:
    """As `follow`, but sampled by each row's settings with the random number of the step."""
    return per_row(None, _follow_drawn, N_LOGIT_ROWS, 1, ctx.batch.following, *ctx.view(logits),
                   ctx.batch.ref("choices"), ctx.batch.counts, _width(logits))


def pick(ctx, logits: View) -> Call:
    """As `best`, but sampled by each row's settings."""
    batch = ctx.batch
    return per_row(None, _pick, N_LOGIT_ROWS, 1, batch.ids, *ctx.view(logits), batch.ref("choices"), batch.counts,
                   _width(logits))


def _width(logits: View) -> int:
    if logits.width > MOST_TOKENS or logits.start % 4:
        raise RequestError(f"device 'cuda' cannot sample from {logits.width} tokens, at most from {MOST_TOKENS}")
    return logits.width


@device
def _reduce_four(logits, first, value, index, low, has_nan):
    """Include 4 more logits, from index `first` on, in the maximum, its index, the finite minimum and the NaN flag."""
    for j in range(4):
        logit = logits[j]
        has_nan = has_nan | (logit != logit)
        if logit > value:
            value, index = logit, i32(first + j)
        low = fmin(low, logit if logit > f32(-INFINITE) else low)
    return value, index, low, has_nan


@device
def _extrema(row, width):
    """The maximum of a row, its first index (-1 as in `best`), and the smallest finite logit."""
    values, indices, lows = _values(), _indices(), _lows()
    thread = u32(thread_index())
    value, index, low, has_nan = f32(-INFINITE), i32(0x7FFFFFFF), f32(INFINITE), False
    i = u32(4 * thread)
    while i < width:
        b, c, d = u32(i + 4 * THREADS), u32(i + 8 * THREADS), u32(i + 12 * THREADS)
        of_a, of_b = load_row(row, i, i, width), load_row(row, b, i, width)
        of_c, of_d = load_row(row, c, i, width), load_row(row, d, i, width)
        value, index, low, has_nan = _reduce_four(of_a, i, value, index, low, has_nan)
        value, index, low, has_nan = _reduce_four(of_b, b, value, index, low, has_nan)
        value, index, low, has_nan = _reduce_four(of_c, c, value, index, low, has_nan)
        value, index, low, has_nan = _reduce_four(of_d, d, value, index, low, has_nan)
        i = u32(i + 16 * THREADS)
    index = i32(-1) if has_nan or value == f32(INFINITE) else index
    value = f32(INFINITE) if has_nan else value  # so that the reduction returns this index, -1
    value, index = better_of_warp(value, index)
    for k in range(5):
        low = fmin(low, shuffle_xor(low, 1 << k))
    if lane_index() == 0:
        warp = u32(thread >> u32(5))
        values[warp], indices[warp], lows[warp] = value, index, low
    sync_block()
    value, index, low = values[0], indices[0], lows[0]
    for warp in range(1, WARPS):
        if values[warp] > value or (values[warp] == value and indices[warp] < index):
            value, index = values[warp], indices[warp]
        low = fmin(low, lows[warp])
    return value, index if index < width else i32(-1), low


@kernel("argmax", THREADS, exact=True)
def _best(ids: i32.ptr, logits: f32.ptr, stride: u32, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    _, index, _ = _extrema(logits + row * stride, width)
    if thread_index() == 0:
        ids[row] = index


@device
def _advance(row, index, ids, draws, steps, rows, tokens, positions, sequence_of, lengths):
    """Append a row's token, or -1, to its ids, and make it the input of the next step."""
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
    _, index, _ = _extrema(logits + row * stride, width)
    _advance(row, index, *batch)


@device
def _sample(source, width, settings, share):
    """The token of a row by its settings and a random number, in every thread; -1 as in `best`."""
    max_logit, index, low = _extrema(source, width)
    t = float_of(settings[0])
    if t == f32(0) or index < 0:
        return index
    buffers, max_score = memory(), score_of(max_logit, max_logit, t)
    reach = fmin(max_score - score_of(low, max_logit, t), f32(WIDEST))
    buckets_per_unit = f32(BUCKETS - 1) / (reach if reach > f32(1e-3) else f32(1e-3))
    min_depth, border, last, listed, i = f32(LOWEST), f32(LOWEST), u32(LAST_ID), u32(0), u32(2)
    while settings[i] != NONE:
        state = (max_logit, t, max_score, buckets_per_unit, min_depth, border, last, u32(0), u32(64), u64(0))
        if settings[i] == MIN_P:
            min_depth = float_of(settings[i + 1])
        elif settings[i] == TOP_K:
            border, last, listed = _top_k(source, width, state, settings[i + 1], listed, buffers)
        else:
            border, last, listed = _top_p(source, width, state, settings[i + 1], listed, buffers)
        i = u32(i + 2)
    state = (max_logit, t, max_score, buckets_per_unit, min_depth, border, last, u32(0), u32(64), u64(0))
    return i32(draw(source, width, state, share, listed, buffers))


@kernel("sample", THREADS, exact=True)
def _pick(ids: i32.ptr, logits: f32.ptr, stride: u32, settings: u32.ptr, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    row_settings = settings + row * WORDS
    index = _sample(logits + row * stride, width, row_settings, row_settings[1])
    if thread_index() == 0:
        ids[row] = index


@kernel("sample_follow", THREADS, exact=True)
def _follow_drawn(batch: Following, logits: f32.ptr, stride: u32, settings: u32.ptr, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    share = batch.draws[u32(row * MOST_STEPS) + u32(batch.steps[row])]
    index = _sample(logits + row * stride, width, settings + row * WORDS, share)
    _advance(row, index, *batch)


BEST, FOLLOW, PICK, FOLLOW_DRAWN = _best, _follow, _pick, _follow_drawn
