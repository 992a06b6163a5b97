"""Normalisation over each of `groups` equal column groups (ops `rms_norm`, `layer_norm`)."""

import numpy as np


def rms_norm(x, weight=None, *, eps, groups):
    """y = x / sqrt(mean(x^2) + eps) * weight; x [T, D], weight [D] or [D / groups]."""
    g = _split(x, groups)
    y = g / np.sqrt(np.mean(g * g, axis=-1, keepdims=True) + np.float32(eps))
    return _affine(y, x.shape, weight, None)


def layer_norm(x, weight=None, bias=None, *, eps, groups):
    """y = (x - mean) / sqrt(var + eps) * weight + bias; x [T, D], weight and bias [D] or [D / groups]."""
    g = _split(x, groups)
    centred = g - np.mean(g, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(eps))
    return _affine(y, x.shape, weight, bias)


def _split(x, groups):
    return x.reshape(len(x), groups, x.shape[1] // groups)


def _affine(y, shape, weight, bias):
    """y [T, groups, D / groups] * weight + bias -> [T, D]; a vector of one group's length is used for every group."""
    for vector, apply in ((weight, np.multiply), (bias, np.add)):
        if vector is not None:
            y = apply(y, vector if vector.size == y.shape[2] else vector.reshape(y.shape[1:]))
    return y.reshape(shape)
