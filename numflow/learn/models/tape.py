"""Reverse-mode automatic differentiation in NumPy: each function computes its result and records its backward pass.

A Value is an array and, after `Tape.backward`, its gradient. The functions have the names and formulas of
numflow/ops.py. Shapes: B texts, T tokens, D width, H query heads, G key heads, E head size.
"""

from collections.abc import Callable, Iterable

import numpy as np

f32 = np.float32


class Value:
    """An array and the gradient of the loss with respect to it; the gradient is None until a term is added."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.grad: np.ndarray | None = None

    def add(self, grad: np.ndarray) -> None:
        """Add a term of the gradient."""
        self.grad = grad if self.grad is None else self.grad + grad


class Tape:
    """The steps of a computation in order. `backward` runs them in reverse."""

    def __init__(self):
        self.steps: list[tuple[Value, Callable]] = []

    def keep(self, data: np.ndarray, back) -> Value:
        """Record a result. back(gradient of the result) adds to the gradients of the step's inputs."""
        made = Value(data)
        self.steps.append((made, back))
        return made

    def backward(self) -> None:
        """Compute the gradients of all values from the gradients of the last results."""
        for made, back in reversed(self.steps):
            if made.grad is not None:
                back(made.grad)
                made.grad = None

    def linear(self, x: Value, w: Value, bias: Value | None = None) -> Value:
        """y = x W^T + b; x [..., K], W [N, K]."""
        def back(dy):
            flat = dy.reshape(-1, dy.shape[-1])
            w.add(flat.T @ x.data.reshape(-1, x.data.shape[-1]))
            x.add(dy @ w.data)
            if bias is not None:
                bias.add(flat.sum(0))

        y = x.data @ w.data.T
        return self.keep(y if bias is None else y + bias.data, back)

    def embed(self, table: Value, ids: np.ndarray) -> Value:
        """Rows of a table [V, D] by ids [...]."""
        def back(dy):
            sums = np.zeros_like(table.data)
            np.add.at(sums, ids.ravel(), dy.reshape(-1, dy.shape[-1]))
            table.add(sums)

        return self.keep(table.data[ids], back)

    def add(self, a: Value, b: Value) -> Value:
        """a + b of equal shapes, or with a row b."""
        def back(dy):
            a.add(dy)
            b.add(dy if b.data.ndim == dy.ndim else dy.reshape(-1, dy.shape[-1]).sum(0))

        return self.keep(a.data + b.data, back)

    def mul(self, a: Value, b: Value) -> Value:
        """a * b, where b may have a last axis of length 1 or be a row."""
        def back(dy):
            a.add(dy * b.data)
            db = dy * a.data
            if b.data.ndim < db.ndim:
                db = db.reshape(-1, db.shape[-1]).sum(0)
            b.add(db if db.shape == b.data.shape else db.sum(-1, keepdims=True))

        return self.keep(a.data * b.data, back)

    def scale(self, x: Value, by: float) -> Value:
        """x times a number."""
        return self.keep(x.data * f32(by), lambda dy: x.add(dy * f32(by)))

    def take(self, x: Value, columns) -> Value:
        """Columns of the last axis: a slice, or distinct indices."""
        def back(dy):
            whole = np.zeros_like(x.data)
            whole[..., columns] = dy
            x.add(whole)

        return self.keep(x.data[..., columns], back)

    def join(self, parts: Iterable[Value], axis: int) -> Value:
        """Concatenation along the axis of tokens (1) or of columns (-1)."""
        parts = tuple(parts)
        ends = np.cumsum([part.data.shape[axis] for part in parts])[:-1]

        def back(dy):
            for part, grad in zip(parts, np.split(dy, ends, axis), strict=True):
                part.add(grad)

        return self.keep(np.concatenate([part.data for part in parts], axis), back)

    def later(self, x: Value) -> Value:
        """Rows of x [B, T, D] shifted by one token: row 0 is zeros, the last row of x is dropped."""
        def shifted(data, ahead):
            return np.pad(data, ((0, 0), (ahead, 1 - ahead), (0, 0)))[:, 1 - ahead:data.shape[1] + 1 - ahead]

        return self.keep(shifted(x.data, 1), lambda dy: x.add(shifted(dy, 0)))

    def act(self, x: Value, kind: str) -> Value:
        """An activation function, by its name in numflow."""
        y, slope = ACTS[kind](x.data)
        return self.keep(y, lambda dy: x.add(dy * slope))

    def rms_norm(self, x: Value, weight: Value, eps: float, groups: int = 1, offset: float = 0.0) -> Value:
        """y = x / sqrt(mean(x^2) + eps) * (offset + weight), over each of the groups of the last axis."""
        shape = x.data.shape
        grouped = x.data.reshape(*shape[:-1], groups, -1)
        r = 1 / np.sqrt(np.mean(grouped * grouped, -1, keepdims=True) + f32(eps))
        n, w = grouped * r, weight.data + f32(offset)

        def back(dy):
            dy = dy.reshape(n.shape)
            weight.add((dy * n).reshape(-1, n.shape[-1]).sum(0))
            dn = dy * w
            x.add((r * (dn - n * np.mean(dn * n, -1, keepdims=True))).reshape(shape))

        return self.keep((n * w).reshape(shape), back)

    def layer_norm(self, x: Value, weight: Value, eps: float) -> Value:
        """y = (x - mean) / sqrt(variance + eps) * weight."""
        centred = x.data - x.data.mean(-1, keepdims=True)
        r = 1 / np.sqrt(np.mean(centred * centred, -1, keepdims=True) + f32(eps))
        n = centred * r

        def back(dy):
            weight.add((dy * n).reshape(-1, n.shape[-1]).sum(0))
            dn = dy * weight.data
            x.add(r * (dn - dn.mean(-1, keepdims=True) - n * np.mean(dn * n, -1, keepdims=True)))

        return self.keep(n * weight.data, back)

    def l2_norm(self, x: Value, groups: int, eps: float = 1e-6) -> Value:
        """Each group of the last axis scaled to length 1."""
        shape = x.data.shape
        grouped = x.data.reshape(*shape[:-1], groups, -1)
        r = 1 / np.sqrt(np.sum(grouped * grouped, -1, keepdims=True) + f32(eps))
        n = grouped * r

        def back(dy):
            dy = dy.reshape(n.shape)
            x.add((r * (dy - n * np.sum(dy * n, -1, keepdims=True))).reshape(shape))

        return self.keep(n.reshape(shape), back)

    def rope(self, x: Value, heads: int, base: float, dims: int | None = None) -> Value:
        """Rotary positions, pairing "half", on the first `dims` columns of each head; x [B, T, heads * E]."""
        b, t, width = x.data.shape
        dims = dims or width // heads
        cos, sin = angles(t, dims, base)

        def turn(data, sign):
            y = data.reshape(b, t, heads, -1).copy()
            first, second = y[..., :dims // 2].copy(), y[..., dims // 2:dims].copy()
            y[..., :dims // 2] = first * cos - sign * second * sin
            y[..., dims // 2:dims] = second * cos + sign * first * sin
            return y.reshape(data.shape)

        return self.keep(turn(x.data, 1), lambda dy: x.add(turn(dy, -1)))

    def attention(self, q: Value, k: Value, v: Value, heads: int, *, scale: float, causal: bool = True,
                  bias: tuple[Value, np.ndarray] | None = None, hidden: np.ndarray | None = None,
                  sees: np.ndarray | None = None) -> Value:
        """softmax(scale q k^T + bias) v; q [B, T, H * E], k, v [B, L, G * E].

        bias: a table [buckets, H] and the bucket of each pair [T, L]. hidden [B, L]: mask of padding keys.
        sees [T, L]: mask of the keys that each token sees, instead of the causal mask.
        """
        size = q.data.shape[-1] // heads
        split = [_by_head(x.data, size) for x in (q, k, v)]
        share = heads // split[1].shape[1]
        qs, ks, vs = split[0], *(np.repeat(x, share, 1) for x in split[1:])
        s = f32(scale) * (qs @ ks.transpose(0, 1, 3, 2))
        if bias is not None:
            s += bias[0].data[bias[1]].transpose(2, 0, 1)
        if sees is not None:
            s += np.where(sees, f32(0), f32(-np.inf))
        elif causal:
            s += np.triu(np.full(s.shape[2:], -np.inf, f32), 1)
        if hidden is not None:
            s += np.where(hidden, f32(-np.inf), f32(0))[:, None, None]
        p = softmax(s)

        def back(dy):
            dy = _by_head(dy, size)
            dv, dp = p.transpose(0, 1, 3, 2) @ dy, dy @ vs.transpose(0, 1, 3, 2)
            ds = p * (dp - np.sum(dp * p, -1, keepdims=True))
            if bias is not None:
                sums = np.zeros_like(bias[0].data)
                np.add.at(sums, bias[1].ravel(), ds.sum(0).transpose(1, 2, 0).reshape(-1, heads))
                bias[0].add(sums)
            ds *= f32(scale)
            q.add(_together(ds @ ks))
            for x, dx in ((k, ds.transpose(0, 1, 3, 2) @ qs), (v, dv)):
                x.add(_together(dx.reshape(len(dx), -1, share, *dx.shape[2:]).sum(2)))

        return self.keep(_together(p @ vs), back)

    def conv(self, x: Value, taps: Value) -> Value:
        """silu of y[t, c] = sum over j of taps[c, j] x[t - K + 1 + j, c]; x [B, T, C], taps [C, 1, K]."""
        w, t = taps.data[:, 0], x.data.shape[1]
        count = w.shape[1]
        padded = np.pad(x.data, ((0, 0), (count - 1, 0), (0, 0)))
        y, slope = ACTS["silu"](sum(padded[:, j:j + t] * w[:, j] for j in range(count)))

        def back(dy):
            dy = dy * slope
            dx = np.zeros_like(padded)
            for j in range(count):
                dx[:, j:j + t] += dy * w[:, j]
            x.add(dx[:, count - 1:])
            taps.add(np.stack([np.sum(dy * padded[:, j:j + t], (0, 1)) for j in range(count)], 1)[:, None])

        return self.keep(y, back)

    def delta_rule(self, q: Value, k: Value, v: Value, log_decay: Value, beta: Value) -> Value:
        """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; y = S^T q. q, k, v [B, T, H * E], g, beta [B, T, H]."""
        heads = beta.data.shape[-1]
        qs, ks, vs = (x.data.reshape(*x.data.shape[:2], heads, -1) for x in (q, k, v))
        decay, states = np.exp(log_decay.data), []
        s = np.zeros((*ks.shape[:1], *ks.shape[2:], vs.shape[-1]), f32)
        y, missing = np.empty_like(vs), np.empty_like(vs)
        for t in range(ks.shape[1]):
            states.append(s)
            s = s * decay[:, t, :, None, None]
            missing[:, t] = vs[:, t] - _read(s, ks[:, t])
            s = s + ks[:, t, :, :, None] * (beta.data[:, t, :, None] * missing[:, t])[:, :, None]
            y[:, t] = _read(s, qs[:, t])

        def back(dy):
            dy = dy.reshape(vs.shape)
            dq, dk, dv = np.empty_like(qs), np.empty_like(ks), np.empty_like(vs)
            dg, dbeta, ds = np.empty_like(decay), np.empty_like(decay), np.zeros_like(s)
            for t in reversed(range(ks.shape[1])):
                faded, b = states[t] * decay[:, t, :, None, None], beta.data[:, t, :, None]
                after = faded + ks[:, t, :, :, None] * (b * missing[:, t])[:, :, None]
                dq[:, t] = _read(after.swapaxes(2, 3), dy[:, t])
                ds = ds + qs[:, t, :, :, None] * dy[:, t, :, None]
                du = _read(ds, ks[:, t])
                dbeta[:, t] = np.sum(du * missing[:, t], -1)
                dv[:, t] = b * du
                dk[:, t] = _read(ds.swapaxes(2, 3), b * missing[:, t]) - _read(faded.swapaxes(2, 3), dv[:, t])
                ds = ds - ks[:, t, :, :, None] * dv[:, t, :, None]
                dg[:, t] = np.sum(ds * faded, (2, 3))
                ds = ds * decay[:, t, :, None, None]
            for x, dx in ((q, dq), (k, dk), (v, dv)):
                x.add(dx.reshape(x.data.shape))
            log_decay.add(dg)
            beta.add(dbeta)

        return self.keep(y.reshape(v.data.shape), back)

    def gates(self, logits: Value, chosen: int) -> Value:
        """Softmax over the `chosen` best experts of each token, 0 for the others; logits [..., X]."""
        worst = np.partition(logits.data, -chosen, -1)[..., -chosen, None]
        p = softmax(np.where(logits.data >= worst, logits.data, f32(-np.inf)))
        return self.keep(p, lambda dy: logits.add(p * (dy - np.sum(dy * p, -1, keepdims=True))))

    def loss(self, logits: Value, targets: np.ndarray, counts: np.ndarray | None = None) -> float:
        """Mean cross-entropy in nats; also sets the gradient of the logits.

        targets: ids [B, T] or probabilities [B, T, V]. counts [B, T]: mask of the targets that count; None: all.
        """
        p = softmax(logits.data)
        weight = np.ones(p.shape[:2], f32) if counts is None else counts.astype(f32)
        if targets.ndim == p.ndim:
            missed = -np.sum(targets * np.log(p + f32(1e-30)), -1)
            p -= targets
        else:
            index = (*np.indices(targets.shape, sparse=True), targets)
            missed = -np.log(p[index] + f32(1e-30))
            p[index] -= 1
        found = float(np.sum(weight * missed) / weight.sum())
        logits.add(p * (weight / weight.sum())[..., None])
        return found


def _by_head(x, size):
    """[B, T, H * E] -> [B, H, T, E]"""
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def _together(x):
    """[B, H, T, E] -> [B, T, H * E]"""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _read(state, key):
    """S^T k of each head: state [B, H, Ek, Ev], key [B, H, Ek] -> [B, H, Ev]"""
    return (key[:, :, None] @ state)[:, :, 0]


def angles(tokens: int, dims: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, 1, dims / 2]."""
    angle = np.arange(tokens, dtype=f32)[:, None] * (base ** (-np.arange(0, dims, 2) / dims)).astype(f32)
    return np.cos(angle)[:, None], np.sin(angle)[:, None]


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x) / sum(exp(x)) over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    return e


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _silu(x):
    s = _sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def _relu(x):
    return np.maximum(x, 0), (x > 0).astype(f32)


def _gate(x):
    s = _sigmoid(x)
    return s, s * (1 - s)


def _exp(x):
    e = np.exp(x)
    return e, e


def _softplus(x):
    return np.logaddexp(x, f32(0)), _sigmoid(x)


def _gelu(x):
    """x times the normal distribution function. erf by Abramowitz and Stegun 7.1.26, with an error of 1.5e-7."""
    z = np.abs(x) * f32(2**-0.5)
    t = 1 / (1 + f32(0.3275911) * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    share = 0.5 * (1 + np.sign(x) * (1 - poly * np.exp(-z * z)))
    return (x * share).astype(x.dtype), (share + x * np.exp(-0.5 * x * x) * (2 * np.pi) ** -0.5).astype(x.dtype)


# Activation functions: x -> (y, dy / dx).
ACTS = {"silu": _silu, "relu": _relu, "gelu": _gelu, "sigmoid": _gate, "softplus": _softplus, "exp": _exp}
