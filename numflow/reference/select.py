"""Selection of rows and concatenation of columns (ops `select_rows`, `head_concat`)."""

import numpy as np


def select_rows(x, *, batch):
    """y [R, D] = x[logit_rows]."""
    return x[batch.logit_rows]


def head_concat(a, b, *, heads, width):
    """Head h of y is (head h of a, head h of b); a [T, H * A], b [T, H * B] or shared [T, B] -> y [T, H * (A + B)].

    width: columns of y, from which follows whether b is shared by all heads.
    """
    a = a.reshape(len(a), heads, -1)
    shared = width == heads * a.shape[2] + heads * b.shape[1]
    b = np.repeat(b[:, None], heads, axis=1) if shared else b.reshape(len(b), heads, -1)
    return np.concatenate([a, b], axis=2).reshape(len(a), width)
