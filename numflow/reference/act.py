"""Element-wise ops (`act`, `act_mul`, `gate_rows`, `mul`, `add`, `scale`, `scale_by_position`, `softcap`, `clamp`,
`softplus`, `signed_sqrt`, `copy`) and ops on whole rows (`sparsify`, `match_rms`, `mix`, `balance`)."""

import math

import numpy as np


def act(x, *, kind, positive=0.0, negative=0.0, beta=0.0, eps=0.0):
    """y = act(x), one of ACTIVATIONS; the other parameters are the coefficients of 'xielu'."""
    if kind == "xielu":
        return xielu(x, *map(np.float32, (positive, negative, beta, eps)))
    return _ACT[kind](x)


def act_mul(gate, up, *, kind, limit, alpha):
    """y = act(gate) * up; 'silu_clamp' and 'swiglu_clamp' clamp both to `limit`, 'swiglu_clamp' adds 1 to `up`."""
    if kind == "swiglu_clamp":
        return swiglu_clamp(gate, up, limit, alpha)
    if kind == "silu_clamp":
        return silu(np.minimum(gate, np.float32(limit))) * np.clip(up, np.float32(-limit), np.float32(limit))
    return _ACT[kind](gate) * up


def gate_rows(x, gate, *, plain=False):
    """y = x * sigmoid(gate), or x * gate if plain; x [T, D], gate [T, H], one per column group, of H equal groups."""
    return x * np.repeat(gate if plain else sigmoid(gate), x.shape[1] // gate.shape[1], axis=1)


def permute(x, order):
    """y[t, j] = x[t, order[j]]; order float32 [D]."""
    return x[:, order.astype(np.int64)]


def mul(a, b):
    """y = a * b."""
    return a * b


def add(a, b, *, scale):
    """y = a + scale * b."""
    return a + np.float32(scale) * b


def scale(x, weight=None, shift=None, *, scale):
    """y = x * scale * weight [D] + shift [D]."""
    y = x * np.float32(scale)
    y = y if weight is None else y * weight
    return y if shift is None else y + shift


def scale_by_position(x, *, batch, scale, length, offset=0, smooth=0):
    """With q = (position + offset) / length, by `smooth`: 0: y = x * (1 + scale * ln(1 + floor(q))); 1: y = x * (1 +
    scale * ln(max(1, q))); 2: y = x * (1 + q)^scale."""
    positions = batch.positions.astype(np.int64) + offset
    if smooth == 2:
        return x * ((1 + positions / length) ** scale).astype(np.float32)[:, None]
    logarithm = np.log(np.maximum(positions / length, 1)) if smooth else np.log1p(positions // length)
    return x * (1 + scale * logarithm).astype(np.float32)[:, None]


def sparsify(x, *, deviations):
    """y = max(x - mean - deviations * std, 0), with mean and (population) standard deviation of each row."""
    mean, std = np.mean(x, axis=1, keepdims=True), np.std(x, axis=1, keepdims=True)
    return np.maximum(x - (mean + std * np.float32(deviations)), 0)


def match_rms(x, like, *, least):
    """Each [D] of x [T, G * D] times sqrt(mean(like^2) / max(mean(x^2), least)); like [T, D]."""
    parts = x.reshape(len(x), x.shape[1] // like.shape[1], like.shape[1])
    target = np.sqrt(np.mean(like * like, axis=1))[:, None, None]
    current = np.sqrt(np.maximum(np.mean(parts * parts, axis=2, keepdims=True), np.float32(least)))
    return (parts * (target / current)).reshape(x.shape)


def signed_sqrt(x, *, least):
    """y = x / |x| * sqrt(max(|x|, least)), 0 for 0."""
    return np.sign(x) * np.sqrt(np.maximum(np.abs(x), np.float32(least)))


def balance(x, *, times, eps):
    """Sinkhorn normalisation of matrices: x [T, S * S] -> y: softmax of each matrix row plus eps; then columns and rows
    in turn are divided by their sums plus eps, columns first and last, `times` times; then transposed."""
    size = math.isqrt(x.shape[1])
    y, eps = x.reshape(len(x), size, size), np.float32(eps)
    y = np.exp(y - y.max(axis=2, keepdims=True))
    y = y / y.sum(axis=2, keepdims=True) + eps
    for iteration in range(2 * times - 1):
        y = y / (y.sum(axis=1 + iteration % 2, keepdims=True) + eps)
    return y.transpose(0, 2, 1).reshape(x.shape)


def mix(base, x, gates, *, parts, plus=0.0):
    """Part i of y = part i of base + sum over j of (gates[t, i * J + j] + plus) * part j of x; base, y [T, I * D]."""
    tokens, width = len(x), base.shape[1] // parts
    gates = (gates + np.float32(plus)).reshape(tokens, parts, gates.shape[1] // parts)
    return base + (gates @ x.reshape(tokens, x.shape[1] // width, width)).reshape(base.shape)


def softcap(x, *, cap):
    """y = cap * tanh(x / cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def clamp(x, *, limit):
    """y = min(max(x, -limit), limit)."""
    return np.clip(x, np.float32(-limit), np.float32(limit))


def softplus(x, bias=None, *, least, most):
    """y = min(max(log(1 + exp(x + bias)), least), most)."""
    return np.clip(np.logaddexp(np.float32(0), x if bias is None else x + bias), np.float32(least), np.float32(most))


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


def xielu(x, positive, negative, beta, eps):
    """positive * x^2 for x > 0, else negative * (exp(min(x, eps)) - 1 - x); plus beta * x."""
    return np.where(x > 0, positive * x * x, negative * (np.expm1(np.minimum(x, eps)) - x)) + beta * x


def swiglu_clamp(gate, up, limit, alpha):
    """g * sigmoid(alpha * g) * (u + 1), with g = min(gate, limit) and u = clip(up, -limit, limit)."""
    gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    return gate * sigmoid(np.float32(alpha) * gate) * (up + 1)


_ACT = {"relu": relu, "relu2": relu2, "gelu": gelu, "gelu_tanh": gelu_tanh, "gelu_quick": gelu_quick, "silu": silu,
        "sigmoid": sigmoid, "tanh": np.tanh, "exp": np.exp}
