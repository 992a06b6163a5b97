"""Lab 4: online softmax.

Attention over 100,000 keys does not need a row of 100,000 scores in memory. Process the keys in chunks, and keep three
values for each head and query:

    m   largest score so far                        [H, n, 1], -inf at first
    l   sum of exp(score - m) so far                [H, n, 1], 0 at first
    o   sum of exp(score - m) * value so far        [H, n, E], 0 at first

After the last chunk the result is o / l. `merge` takes m, l, o and a chunk with scores s [H, n, C] and values v
[H, C, E], and returns the new m, l, o. If the chunk has a score above m, the old sums l and o are relative to the old m
and must be rescaled to the new m. Chunks come in any order and in any size, so merging must be associative: then
several processors can share the keys of one query. FlashAttention and numflow's kernels work like this.

A masked key, one that a query must not see, has the score -inf. If all keys of a chunk are masked, and all keys before
were masked too, then m stays -inf, l and o stay 0, and there must be no NaN. With an attention sink (a logit without a
value) the start is different: m = sink, l = 1.

    numflow learn check 4        numflow learn hint 4        numflow learn bench 4
"""

import numpy as np

LAB = {
    "number": 4, "title": "Online softmax", "minutes": 45, "functions": ["merge"], "grader": "online", "needs": [3],
    "cases": ["attention", "attention-*"],
    "hints": [
        "Take the scores 1, 3 and then 2, 5, with values 10, 20, 30, 40. Compute m, l, o after the first two scores, "
        "and then for all four at once. By which factor do the first two terms of l and o differ?",
        "The hard case is that all keys are masked: m' = -inf, and exp(m - m') = exp(-inf + inf) is NaN. Subtract 0 "
        "instead of m' where m' is not finite.",
        "m' = max(m, max(s)); a = exp(m - m'); p = exp(s - m'); l' = l a + sum(p); o' = o a + p @ v."],
}


def merge(m, l, o, s, v):  # noqa: E741
    """m [H, n, 1], l [H, n, 1], o [H, n, E], scores s [H, n, C], values v [H, C, E] -> m, l, o."""
    m2 = np.maximum(m, s.max(axis=2, keepdims=True))
    seen = np.where(np.isfinite(m2), m2, np.float32(0))
    a, p = np.exp(m - seen), np.exp(s - seen)
    return m2, l * a + p.sum(axis=2, keepdims=True), o * a + p @ v


def merge__no_rescale(m, l, o, s, v):  # noqa: E741
    """sums that are not rescaled when m grows: multiply l and o by exp(m - m')"""
    m2, _, _ = merge(m, l, o, s, v)
    p = np.exp(s - np.where(np.isfinite(m2), m2, np.float32(0)))
    return m2, l + p.sum(axis=2, keepdims=True), o + p @ v


def merge__stale_o(m, l, o, s, v):  # noqa: E741
    """an o that is not multiplied by exp(m - m'), while l is"""
    m2, l2, _ = merge(m, l, o, s, v)
    return m2, l2, o + np.exp(s - np.where(np.isfinite(m2), m2, np.float32(0))) @ v


def merge__stale_l(m, l, o, s, v):  # noqa: E741
    """an l that is not multiplied by exp(m - m'), while o is"""
    m2, _, o2 = merge(m, l, o, s, v)
    return m2, l + np.exp(s - np.where(np.isfinite(m2), m2, np.float32(0))).sum(axis=2, keepdims=True), o2


def merge__upside_down(m, l, o, s, v):  # noqa: E741
    """a factor of exp(m' - m) instead of exp(m - m')"""
    m2, l2, o2 = merge(m, np.zeros_like(l), np.zeros_like(o), s, v)
    a = np.exp(m2 - m)
    return m2, l2 + l * a, o2 + o * a


def merge__chunk_only(m, l, o, s, v):  # noqa: E741
    """the maximum of the chunk alone: the largest score so far may be larger"""
    m2 = s.max(axis=2, keepdims=True)
    seen = np.where(np.isfinite(m2), m2, np.float32(0))
    a, p = np.exp(m - seen), np.exp(s - seen)
    return m2, l * a + p.sum(axis=2, keepdims=True), o * a + p @ v


def merge__no_maximum(m, l, o, s, v):  # noqa: E741
    """exponentials of the scores themselves: subtract m, so that they do not overflow"""
    p = np.exp(s)
    return np.maximum(m, s.max(axis=2, keepdims=True)), l + p.sum(axis=2, keepdims=True), o + p @ v


def merge__not_a_number(m, l, o, s, v):  # noqa: E741
    """exp(-inf + inf), which is NaN: m' is -inf as long as all keys of a query are masked"""
    m2 = np.maximum(m, s.max(axis=2, keepdims=True))
    a, p = np.exp(m - m2), np.exp(s - m2)
    return m2, l * a + p.sum(axis=2, keepdims=True), o * a + p @ v


def merge__bare_l(m, l, o, s, v):  # noqa: E741
    """an l with exp(s) instead of exp(s - m')"""
    m2, _, o2 = merge(m, l, o, s, v)
    return m2, l * np.exp(m - np.where(np.isfinite(m2), m2, np.float32(0))) + np.exp(s).sum(axis=2, keepdims=True), o2


def merge__divided(m, l, o, s, v):  # noqa: E741
    """an o that is divided by l in every chunk: divide once, at the end"""
    m2, l2, o2 = merge(m, l, o, s, v)
    return m2, l2, o2 / l2


def merge__bare_factor(m, l, o, s, v):  # noqa: E741
    """sums that are multiplied by exp(m) instead of exp(m - m')"""
    new = merge(m, np.zeros_like(l), np.zeros_like(o), s, v)
    return new[0], l * np.exp(m) + new[1], o * np.exp(m) + new[2]


def merge__mean(m, l, o, s, v):  # noqa: E741
    """the mean of a chunk's scores instead of the largest score"""
    new = np.maximum(m, s.mean(axis=2, keepdims=True))
    a, p = np.exp(m - new), np.exp(s - new)
    return new, l * a + p.sum(axis=2, keepdims=True), o * a + p @ v


def merge__not_weighted(m, l, o, s, v):  # noqa: E741
    """values that are summed without the weight exp(score - m')"""
    m2, l2, old = merge(m, l, o, s, np.zeros_like(v))
    return m2, l2, old + np.isfinite(s).astype(np.float32) @ v


def merge__counted(m, l, o, s, v):  # noqa: E741
    """an l that counts the keys instead of summing exp(score - m')"""
    m2, _, o2 = merge(m, l, o, s, v)
    a = np.exp(m - np.where(np.isfinite(m2), m2, 0))
    return m2, l * a + np.isfinite(s).sum(axis=2, keepdims=True).astype(np.float32), o2


def bench(functions):
    """Peak memory of attention with 8 heads, 64 queries and 4096 keys, with all scores at once and in chunks."""
    import tracemalloc

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64, 64), (8, 4096, 64), (8, 4096, 64)))

    def whole():
        s = q @ k.transpose(0, 2, 1) * np.float32(0.125)
        e = np.exp(s - s.max(axis=2, keepdims=True))
        return e @ v / e.sum(axis=2, keepdims=True)

    def chunks():
        m = np.full((8, 64, 1), -np.inf, np.float32)
        l, o = np.zeros_like(m), np.zeros((8, 64, 64), np.float32)  # noqa: E741
        for first in range(0, 4096, 64):
            s = q @ k[:, first:first + 64].transpose(0, 2, 1) * np.float32(0.125)
            m, l, o = functions["merge"](m, l, o, s, v[:, first:first + 64])  # noqa: E741
        return o / l

    peaks = []
    for run in (whole, chunks):
        tracemalloc.start()
        run()
        peaks.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    return {"what": "memory at 4096 keys, 64 queries, 8 heads", "unit": "MB",
            "bars": [("all scores at once", peaks[0]), ("chunks of 64, yours", peaks[1])]}
