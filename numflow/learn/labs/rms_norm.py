"""Lab 1: RMSNorm.

Every layer of a model begins by bringing the rows of its input to the same size: each number is divided by the root
of the mean of the squares of its row.

    y = x / sqrt(mean(x^2) + eps) * weight

eps keeps a row of zeros from a division by zero, and it stands under the root. With `groups` greater than 1 the D
columns are so many groups of the same size, and each group has a mean of its own: models norm the columns of each head
that way. The weight may be missing (None); it has a number for each column, or for each column of one group, which then
serves all groups.

Write `rms_norm`. x and the result are float32 arrays; x itself must stay as it is.

    numflow learn check 1        numflow learn hint 1        numflow learn bench 1
"""

import numpy as np

LAB = {
    "number": 1, "title": "RMSNorm", "minutes": 15, "functions": ["rms_norm"], "grader": "reference",
    "cases": ["rms_norm*"],
    "hints": [
        "Draw x as a table of T rows. For one row of four numbers work out mean, root and quotient by hand.",
        "The hard line is the one about groups: x.reshape(T, groups, D // groups) gives each group a row of its own, "
        "and np.mean(..., axis=-1, keepdims=True) keeps the axis, so that the division fits.",
        "g = x.reshape(len(x), groups, -1); y = g / np.sqrt(np.mean(g * g, axis=-1, keepdims=True) + eps); the weight "
        "is reshaped to [groups, D // groups] if it has D numbers, and multiplied as it is if it has D // groups."],
}


def rms_norm(x, weight=None, *, eps, groups):
    """x [T, D], weight [D] or [D / groups] or None -> [T, D]."""
    g = x.reshape(len(x), groups, x.shape[1] // groups)
    y = g / np.sqrt(np.mean(g * g, axis=-1, keepdims=True) + np.float32(eps))
    if weight is not None:
        y = y * (weight if weight.size == y.shape[2] else weight.reshape(y.shape[1:]))
    return y.reshape(x.shape)


def rms_norm__no_eps(x, weight=None, *, eps, groups):
    """a norm without eps"""
    return rms_norm(x, weight, eps=0.0, groups=groups)


def rms_norm__eps_outside(x, weight=None, *, eps, groups):
    """a norm whose eps is added outside the root"""
    root = x / np.where(x == 0, 1, rms_norm(x, eps=0.0, groups=groups))
    y = (x / (root + np.float32(eps))).reshape(len(x), groups, -1)
    return rms_norm__weighted(y, weight).reshape(x.shape)


def rms_norm__weighted(y, weight=None, *, eps=0.0, groups=1):
    """rows that are multiplied by the weight and not normed at all"""
    y = y if y.ndim == 3 else y.reshape(len(y), groups, -1)
    z = y if weight is None else y * (weight if weight.size == y.shape[2] else weight.reshape(y.shape[1:]))
    return z.reshape(len(y), -1)


def rms_norm__absolute(x, weight=None, *, eps, groups):
    """a norm by the mean of |x| in place of the root of the mean of x^2"""
    y = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(y / (np.mean(np.abs(y), axis=-1, keepdims=True) + np.float32(eps)), weight)


def rms_norm__sum(x, weight=None, *, eps, groups):
    """a norm by the sum of the squares in place of their mean"""
    y = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + np.float32(eps)), weight)


def rms_norm__no_root(x, weight=None, *, eps, groups):
    """a division by the mean of the squares, without the root"""
    y = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(y / (np.mean(y * y, axis=-1, keepdims=True) + np.float32(eps)), weight)


def rms_norm__centred(x, weight=None, *, eps, groups):
    """a layer norm: the mean of the row was subtracted"""
    y = x.reshape(len(x), groups, -1)
    return rms_norm((y - np.mean(y, axis=-1, keepdims=True)).reshape(x.shape), weight, eps=eps, groups=groups)


def rms_norm__no_weight(x, weight=None, *, eps, groups):
    """a norm without its weight"""
    return rms_norm(x, None, eps=eps, groups=groups)


def rms_norm__weight_plus_one(x, weight=None, *, eps, groups):
    """a norm with 1 + weight: what files hold as w - 1 has its 1 back already when an op gets it"""
    return rms_norm(x, None if weight is None else weight + 1, eps=eps, groups=groups)


def rms_norm__whole_row(x, weight=None, *, eps, groups):
    """a norm over the whole row: groups are ignored"""
    y = rms_norm(x, None, eps=eps, groups=1)
    return y if weight is None else y * np.resize(weight, x.shape[1])


def rms_norm__strided(x, weight=None, *, eps, groups):
    """groups of every n-th column in place of neighbouring columns"""
    y = x.reshape(len(x), -1, groups)
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + np.float32(eps))
    return y.reshape(x.shape) if weight is None else y.reshape(x.shape) * np.resize(weight, x.shape[1])


def rms_norm__by_column(x, weight=None, *, eps, groups):
    """a mean over the tokens (axis 0) in place of the columns of each token"""
    y = x / np.sqrt(np.mean(x * x, axis=0, keepdims=True) + np.float32(eps))
    return y if weight is None else y * np.resize(weight, x.shape[1])


def rms_norm__all_tokens(x, weight=None, *, eps, groups):
    """a mean over all tokens: each row has a mean of its own"""
    parts = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(parts / np.sqrt(np.mean(parts * parts) + np.float32(eps)), weight)


def rms_norm__weight_repeated(x, weight=None, *, eps, groups):
    """a weight whose numbers are repeated one by one (np.repeat): each group has the whole weight (np.tile)"""
    if weight is not None:
        weight = np.repeat(weight, x.shape[1] // len(weight))
    return rms_norm(x, weight, eps=eps, groups=groups)


def rms_norm__eps_squared(x, weight=None, *, eps, groups):
    """a norm with eps squared"""
    return rms_norm(x, weight, eps=eps * eps, groups=groups)


def rms_norm__weight_added(x, weight=None, *, eps, groups):
    """a weight that is added: rows are multiplied by it"""
    y = rms_norm(x, eps=eps, groups=groups)
    return y if weight is None else y + np.tile(weight, x.shape[1] // len(weight))


def rms_norm__variance(x, weight=None, *, eps, groups):
    """a division by the standard deviation, np.std or np.var: the mean of the squares is without the mean"""
    parts = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(parts / np.sqrt(parts.var(axis=-1, keepdims=True) + np.float32(eps)), weight)


def bench(functions):
    """4096 rows of 4096 columns."""
    from numflow.learn.graders.reference import bars

    def build(b):
        (x,) = b.inputs(4096)
        y = b.buffer(4096)
        b.step("rms_norm", (x,), (y,), {"weight": b.weight("weight", b.normal(4096))}, eps=1e-5)
        return y

    return bars(functions, LAB, build, 4096, moved=2 * 4096 * 4096 * 4)
