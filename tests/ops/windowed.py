"""A decoder of two layers, one with full attention and one with a window, and batches with a table for each."""

from dataclasses import replace

import numpy as np

from numflow.learn.cases.build import VOCABULARY
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.network.windows import first_key
from numflow.ops import Batch

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16


def decoder(windows=(0, 70)):
    """One attention layer per window; positions affect masks only."""
    b = Builder("windowed")
    x, z = b.buffer(WIDTH), b.buffer(WIDTH)
    q, k, v = (b.buffer(n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    mixed = b.buffer(HEADS * HEAD_DIM)
    b.step("embed", (), (x,), {"table": b.weight("table", b.normal(VOCABULARY, WIDTH))})
    for window in windows:
        for y in (q, k, v):
            b.step("linear", (x,), (y,), {"weight": b.weight("weight", b.normal(y.width, WIDTH) / 4)})
        cache = b.cache(kv_heads=KV_HEADS, k_dim=HEAD_DIM)
        b.step("cache_write", (k, v), (), cache=cache)
        b.step("attention", (q,), (mixed,), cache=cache, heads=HEADS, scale=HEAD_DIM**-0.5, window=window)
        b.step("linear", (mixed,), (z,), {"weight": b.weight("weight", b.normal(WIDTH, mixed.width) / 4)})
        b.step("add", (x, z), (x,))
    last, logits = b.buffer(WIDTH, "logits"), b.buffer(VOCABULARY, "logits")
    b.step("select_rows", (x,), (last,))
    b.step("linear", (last,), (logits,), {"weight": b.weight("weight", b.normal(VOCABULARY, WIDTH) / 4)})
    case = b.case(logits)
    return replace(case.network, outputs={"hidden": last, "logits": logits}), case.weights


def plain(begin, count, size):
    """`count` tokens of a sequence from `begin` on, with one table for all layers."""
    text = np.random.default_rng(3).integers(0, VOCABULARY, 1024, dtype=np.int32)
    return Batch(text[begin:begin + count], np.arange(begin, begin + count, dtype=np.int32),
                 np.array([0, count], np.int32), np.arange(-(-1024 // size), dtype=np.int32)[None],
                 np.arange(count, dtype=np.int32))


def tabled(begin, count, size, window, ring):
    """The same with a table for the window, whose blocks are reused as a ring; entries of blocks that left the window
    are out of range."""
    batch, gone = plain(begin, count, size), first_key(window, begin) // size
    table = np.arange(batch.blocks.shape[1], dtype=np.int32)[None] % ring
    table[:, :gone] = 1 << 28
    return replace(batch, windows={window: table})


def pieces(total, sizes):
    """(begin, count) of the pieces of a sequence, with these sizes, repeated."""
    at, turn = 0, 0
    while at < total:
        count = min(sizes[turn % len(sizes)], total - at)
        yield at, count
        at, turn = at + count, turn + 1
