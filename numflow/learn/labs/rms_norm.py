"""Lab 1: RMSNorm.

Every layer of a model begins with a norm, which brings the rows of its input (one per token) to the same size: each
element is divided by the root mean square (RMS) of its row.

    y = x / sqrt(mean(x^2) + eps) * weight

eps prevents a division by zero in a row of zeros; it stands under the root. If `groups` is greater than 1, the D
columns are split into that many groups of neighbouring columns, and each group is normalised by its own mean. Models
use groups to normalise each attention head. The weight may be None. Else it has D elements, one per column, or
D / groups elements, which are then used for every group.

Write `rms_norm`. x and the result are float32 arrays. Do not change x.

    numflow learn check 1        numflow learn hint 1        numflow learn bench 1
"""

import numpy as np

LAB = {
    "number": 1, "title": "RMSNorm", "minutes": 15, "functions": ["rms_norm"], "grader": "reference",
    "cases": ["rms_norm*"],
    "hints": [
        "Draw x as a table of T rows. For one row of four elements compute mean, root and quotient by hand.",
        "The groups are the hard part: x.reshape(T, groups, D // groups) makes each group a row, and np.mean(..., "
        "axis=-1, keepdims=True) keeps the last axis, so that the division broadcasts.",
        "g = x.reshape(len(x), groups, -1); y = g / np.sqrt(np.mean(g * g, axis=-1, keepdims=True) + eps). A weight of "
        "D elements is reshaped to [groups, D // groups]; a weight of D // groups elements is multiplied as it is."],
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
    """rows that are multiplied by the weight but not normalised"""
    y = y if y.ndim == 3 else y.reshape(len(y), groups, -1)
    z = y if weight is None else y * (weight if weight.size == y.shape[2] else weight.reshape(y.shape[1:]))
    return z.reshape(len(y), -1)


def rms_norm__absolute(x, weight=None, *, eps, groups):
    """a norm by the mean of |x| instead of the root of the mean of x^2"""
    y = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(y / (np.mean(np.abs(y), axis=-1, keepdims=True) + np.float32(eps)), weight)


def rms_norm__sum(x, weight=None, *, eps, groups):
    """a norm by the sum of the squares instead of their mean"""
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
    """a norm with 1 + weight: if a file stores w - 1, the 1 is already added when the op gets the weight"""
    return rms_norm(x, None if weight is None else weight + 1, eps=eps, groups=groups)


def rms_norm__whole_row(x, weight=None, *, eps, groups):
    """a norm over the whole row, which ignores the groups"""
    y = rms_norm(x, None, eps=eps, groups=1)
    return y if weight is None else y * np.resize(weight, x.shape[1])


def rms_norm__strided(x, weight=None, *, eps, groups):
    """groups of every n-th column instead of neighbouring columns"""
    y = x.reshape(len(x), -1, groups)
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True) + np.float32(eps))
    return y.reshape(x.shape) if weight is None else y.reshape(x.shape) * np.resize(weight, x.shape[1])


def rms_norm__by_column(x, weight=None, *, eps, groups):
    """a mean over the tokens (axis 0) instead of the columns of each token"""
    y = x / np.sqrt(np.mean(x * x, axis=0, keepdims=True) + np.float32(eps))
    return y if weight is None else y * np.resize(weight, x.shape[1])


def rms_norm__all_tokens(x, weight=None, *, eps, groups):
    """one mean over all tokens: each row has its own mean"""
    parts = x.reshape(len(x), groups, -1)
    return rms_norm__weighted(parts / np.sqrt(np.mean(parts * parts) + np.float32(eps)), weight)


def rms_norm__weight_repeated(x, weight=None, *, eps, groups):
    """a weight whose elements are repeated one by one (np.repeat): every group uses the whole weight (np.tile)"""
    if weight is not None:
        weight = np.repeat(weight, x.shape[1] // len(weight))
    return rms_norm(x, weight, eps=eps, groups=groups)


def rms_norm__eps_squared(x, weight=None, *, eps, groups):
    """a norm with eps squared"""
    return rms_norm(x, weight, eps=eps * eps, groups=groups)


def rms_norm__weight_added(x, weight=None, *, eps, groups):
    """a weight that is added instead of multiplied"""
    y = rms_norm(x, eps=eps, groups=groups)
    return y if weight is None else y + np.tile(weight, x.shape[1] // len(weight))


def rms_norm__variance(x, weight=None, *, eps, groups):
    """a division by the standard deviation (np.std or np.var): RMSNorm does not subtract the mean"""
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
