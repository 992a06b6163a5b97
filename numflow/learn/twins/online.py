"""Attention that never holds a whole row of scores: twin of `numflow/cpu/attention/tile.py`.

Keys come in chunks. Of each query three things are kept, which a chunk with scores s and values v changes:

    m  the largest score      m' = max(m, max s)
    l  sum of exp(s - m)      l' = l exp(m - m') + sum exp(s - m')
    o  sum of exp(s - m) v    o' = o exp(m - m') + exp(s - m') v

o / l is the softmax of all scores times the values. m never falls, so no exponent is above 0. Parts of the keys that
were worked on apart are joined by the same rule, which is how threads share a long text.
"""

import itertools

import numpy as np


def part(q, k, v, first, last, positions, scale):
    """(m, l, o) of keys first .. last - 1 for causal queries: q [n, E], k [L, E], v [L, F], positions [n]."""
    m, total = np.full(len(q), -np.inf, np.float32), np.zeros(len(q), np.float32)
    o = np.zeros((len(q), v.shape[1]), np.float32)
    for at in range(first, last, 4):
        keys = np.arange(at, min(at + 4, last))
        s = np.where(keys <= positions[:, None], np.float32(scale) * (q @ k[keys].T), np.float32(-np.inf))
        m, total, o = join((m, total, o), chunk(s, v[keys]))
    return m, total, o


def chunk(s, v):
    """(m, l, o) of scores s [n, C] alone; a query that sees none of the keys has m = -inf."""
    m = s.max(axis=1)
    e = np.exp(s - np.where(np.isfinite(m), m, 0)[:, None])
    return m, e.sum(axis=1), e @ v


def join(one, other):
    """(m, l, o) of the keys of both."""
    m = np.maximum(one[0], other[0])
    fade, grow = (np.exp(half[0] - np.where(np.isfinite(m), m, 0)) for half in (one, other))
    return m, one[1] * fade + other[1] * grow, one[2] * fade[:, None] + other[2] * grow[:, None]


def attention(q, k, v, positions, scale, spans=2):
    """Causal attention of one head, the keys in `spans` parts as if for so many threads: [n, F]."""
    borders = np.linspace(0, len(k), spans + 1).astype(int)
    m, total, o = part(q, k, v, borders[0], borders[1], positions, scale)
    for first, last in itertools.pairwise(borders[1:]):
        m, total, o = join((m, total, o), part(q, k, v, first, last, positions, scale))
    return o / total[:, None]
