"""Attention that never stores a whole row of scores: twin of `numflow/cpu/attention/tile.py`.

Keys are processed in chunks. Each query has three values, which a chunk with scores s and values v updates:

    m  the largest score      m' = max(m, max s)
    l  sum of exp(s - m)      l' = l exp(m - m') + sum exp(s - m')
    o  sum of exp(s - m) v    o' = o exp(m - m') + exp(s - m') v

o / l is the softmax of all scores times the values. m never decreases, so no exponent is above 0. The results of
separate parts of the keys are joined by the same rule: this is how several threads share a long text.
"""

import itertools

import numpy as np


def part(q, k, v, first, last, positions, scale):
    """(m, l, o) of keys first .. last - 1 for causal queries: q [n, E], k [L, E], v [L, F], positions [n]."""
    m, total = np.full(len(q), -np.inf, np.float32), np.zeros(len(q), np.float32)
    o = np.zeros((len(q), v.shape[1]), np.float32)
    for start in range(first, last, 4):
        keys = np.arange(start, min(start + 4, last))
        s = np.where(keys <= positions[:, None], np.float32(scale) * (q @ k[keys].T), np.float32(-np.inf))
        m, total, o = join((m, total, o), chunk(s, v[keys]))
    return m, total, o


def chunk(s, v):
    """(m, l, o) of one chunk with scores s [n, C] and values v [C, F]; m = -inf if all keys are masked."""
    m = s.max(axis=1)
    e = np.exp(s - np.where(np.isfinite(m), m, 0)[:, None])
    return m, e.sum(axis=1), e @ v


def join(one, other):
    """(m, l, o) of the keys of two parts together."""
    m = np.maximum(one[0], other[0])
    a, b = (np.exp(part[0] - np.where(np.isfinite(m), m, 0)) for part in (one, other))  # rescaling of each part
    return m, one[1] * a + other[1] * b, one[2] * a[:, None] + other[2] * b[:, None]


def attention(q, k, v, positions, scale, spans=2):
    """Causal attention of one head [n, F], with the keys split into `spans` parts, as for several threads."""
    borders = np.linspace(0, len(k), spans + 1).astype(int)
    m, total, o = part(q, k, v, borders[0], borders[1], positions, scale)
    for first, last in itertools.pairwise(borders[1:]):
        m, total, o = join((m, total, o), part(q, k, v, first, last, positions, scale))
    return o / total[:, None]
