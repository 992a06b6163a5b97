"""Element-wise ops: `act`, `act_mul`, `gate_rows`, `add`, `scale`, `softcap`, `clamp`, `copy`."""

import math

import numpy as np


def act(x, *, kind):
    """y = act(x), one of ACTIVATIONS."""
    return _ACT[kind](x)


def act_mul(gate, up, *, kind, limit, alpha):
    """y = act(gate) * up; 'swiglu_clamp' cuts both at `limit` and adds 1 to `up`."""
    if kind == "swiglu_clamp":
        return swiglu_clamp(gate, up, limit, alpha)
    return _ACT[kind](gate) * up


def gate_rows(x, gate):
    """y = x * sigmoid(gate); x [T, D], gate [T, 1]."""
    return x * sigmoid(gate)


def add(a, b, *, scale):
    """y = a + scale * b."""
    return a + np.float32(scale) * b


def scale(x, *, scale):
    """y = x * scale."""
    return x * np.float32(scale)


def softcap(x, *, cap):
    """y = cap * tanh(x / cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def clamp(x, *, limit):
    """y = min(max(x, -limit), limit)."""
    return np.clip(x, np.float32(-limit), np.float32(limit))


def copy(x):
    """y = x."""
    return x


def sigmoid(x):
    """1 / (1 + exp(-x)), written so that neither sign overflows."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def erf(x):
    """The error function in double precision, rounded to float32."""
    return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape).astype(np.float32)


def relu(x):
    return np.maximum(x, 0)


def relu2(x):
    """relu(x)^2"""
    return np.square(relu(x))


def gelu(x):
    """x * P(standard normal <= x), by erf."""
    return 0.5 * x * (1 + erf(x * np.float32(math.sqrt(0.5))))


def gelu_tanh(x):
    """The tanh approximation of gelu."""
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)))


def gelu_quick(x):
    """x * sigmoid(1.702 x)"""
    return x * sigmoid(np.float32(1.702) * x)


def silu(x):
    """x * sigmoid(x)"""
    return x * sigmoid(x)


def swiglu_clamp(gate, up, limit, alpha):
    """g * sigmoid(alpha * g) * (u + 1), where g = min(gate, limit) and u = clip(up, -limit, limit)."""
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    return gate * sigmoid(np.float32(alpha) * gate) * (up + 1)


_ACT = {"relu": relu, "relu2": relu2, "gelu": gelu, "gelu_tanh": gelu_tanh, "gelu_quick": gelu_quick, "silu": silu,
        "sigmoid": sigmoid, "tanh": np.tanh}
