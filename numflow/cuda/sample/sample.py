"""Choosing tokens on the device, so that ids come back and not rows of logits.

A row's settings are WORDS words: the temperature (f32; 0: the best token), the random number of the draw (in 2**-32),
then (filter, value) for each filter in order, ended by NONE: MIN_P (f32: the logarithm of the share), TOP_K (a count),
TOP_P (in 2**-32).
"""

import math
from collections.abc import Sequence
from struct import pack

import numpy as np

from numflow.cuda.device.call import N_LOGIT_ROWS, Call, per_row
from numflow.cuda.lang.arithmetic import float_of, fmin
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import block_x, lane_index, shuffle_xor, sync_block, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Following
from numflow.cuda.lang.reduce import better_of_warp
from numflow.cuda.lang.scalar import f32, i32, u32, u64
from numflow.cuda.sample.candidates import draw, narrower
from numflow.cuda.sample.row import BUCKETS, INFINITE, LAST_ID, MOST_TOKENS, THREADS, WARPS, load_row, memory, score_of
from numflow.decoding.choice import Choice
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS
from numflow.ops import View

NONE, MIN_P, TOP_K, TOP_P = range(4)
WORDS = 12
LOWEST = -3.4028235e38
WIDEST = 64.0  # distance from the best score that the buckets reach over at most
_values, _places, _lows = SharedArray(f32, WARPS), SharedArray(i32, WARPS), SharedArray(f32, WARPS)
_top_k, _top_p = narrower(True), narrower(False)


def encode(choices: Sequence[Choice]) -> np.ndarray:
    """The settings of rows, int32 [R, WORDS]."""
    rows = b"".join(_row(choice).ljust(4 * WORDS, b"\0") for choice in choices)
    return np.frombuffer(rows, np.int32).reshape(-1, WORDS)


def _row(choice: Choice) -> bytes:
    row = pack("<fI", choice.temperature, _share(choice.uniform))
    for name, value in choice.filters:
        if name == "min_p":
            row += pack("<If", MIN_P, math.log(value))
        else:
            row += pack("<II", *((TOP_P, _share(value)) if name == "top_p" else (TOP_K, min(int(value), MOST_TOKENS))))
    return row


def _share(value: float) -> int:
    return min(int(value * 2.0**32), 2**32 - 1)


def best(ctx, logits: View) -> Call:
    """logits f32 [R, V] -> ids i32 [R]: the largest of each row, the first of equals; -1 for a row that has none, or
    an infinite one, or any NaN."""
    return per_row(None, _best, N_LOGIT_ROWS, 1, ctx.batch.ids, *ctx.view(logits), ctx.batch.counts, _width(logits))


def follow(ctx, logits: View) -> Call:
    """The same, and the tokens are the batch of the next step; ids i32 [R, MOST_STEPS], a column for each step."""
    return per_row(None, _follow, N_LOGIT_ROWS, 1, ctx.batch.following, *ctx.view(logits), ctx.batch.counts,
                   _width(logits))


def pick(ctx, logits: View) -> Call:
    """The same, but drawn as each row's settings say."""
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


@kernel("argmax_follow", THREADS, exact=True)
def _follow(batch: Following, logits: f32.ptr, stride: u32, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    _, index, _ = _survey(logits + row * stride, width)
    if thread_index() == 0:
        step, t = batch.steps[row], batch.rows[row]
        sequence = batch.sequence_of[t]
        batch.ids[i32(row * MOST_STEPS) + step] = index
        batch.steps[row] = i32(step + 1)
        batch.tokens[t] = index if index > 0 else i32(0)
        batch.positions[t] = i32(batch.positions[t] + 1)
        batch.lengths[sequence] = i32(batch.lengths[sequence] + 1)


@kernel("sample", THREADS, exact=True)
def _pick(ids: i32.ptr, logits: f32.ptr, stride: u32, settings: u32.ptr, counts: i32.ptr, width: u32):
    row = block_x()
    if row >= counts[N_LOGIT_ROWS]:
        return
    source, own = logits + row * stride, settings + row * WORDS
    peak, index, low = _survey(source, width)
    t = float_of(own[0])
    if t == f32(0) or index < 0:
        if thread_index() == 0:
            ids[row] = index
        return
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
    chosen = draw(source, width, what, own[1], listed, room)
    if thread_index() == 0:
        ids[row] = i32(chosen)


BEST, FOLLOW, PICK = _best, _follow, _pick
