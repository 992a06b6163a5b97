"""Mixture of experts: routing, products, weighted sum (ops `moe_route`, `expert_scale`, `expert_linear`,
`expert_combine`)."""

import numpy as np

from numflow.reference.act import sigmoid


def moe_route(logits, bias=None, scales=None, *, width, score, normalize, scale, groups, top_groups, group_best,
              jitter=0.0, least_sum=0.0, experts=None):
    """The best S = `width` experts of each token: logits [T, X], bias, scales [X] -> ids i32 [T, S], gates f32 [T, S].

    The bias affects the choice, not the gates. Experts form `groups` equal groups; only experts of the `top_groups`
    groups with the largest sum of their `group_best` best scores are chosen. Of equal scores the lower id comes first.
    With experts [T, S], these ids are chosen, clipped to 0 .. X - 1.
    """
    if score == "sparsemixer":
        ids, gates = _sparsemixer(logits, width, np.float32(2 * jitter))
    else:
        ids, gates = _top_k(logits, experts, bias, width, score, groups, top_groups, group_best)
    if normalize:
        gates = gates / np.maximum(np.sum(gates, axis=1, keepdims=True), np.float32(least_sum))
    gates = gates * np.float32(scale)
    return ids.astype(np.int32), gates if scales is None else gates * scales[ids]


def _top_k(logits, experts, bias, width, score, groups, top_groups, group_best):
    """Top-k experts by score. Gates are the scores, or the activation of the chosen logits for "..._topk"."""
    scores = {"softmax": softmax, "sigmoid": sigmoid, "softmax_topk": lambda x: x,
              "sqrt_softplus": lambda x: np.sqrt(np.logaddexp(np.float32(0), x)),
              "sigmoid_topk": lambda x: x}[score](logits)
    choice = scores if bias is None else scores + bias
    if top_groups < groups:
        choice = _mask_groups(choice, groups, top_groups, group_best)
    ids = _best(choice, width) if experts is None else _clipped(experts, logits.shape[1])
    gates = np.take_along_axis(scores, ids, axis=1)
    return ids, {"softmax_topk": softmax, "sigmoid_topk": sigmoid}.get(score, lambda x: x)(gates)


def _clipped(ids, experts):
    """Ids clipped to 0 .. X - 1; 0 for NaN."""
    return np.fmin(np.fmax(ids, 0), experts - 1).astype(np.int64)


def _sparsemixer(logits, width, reach):
    """SparseMixer: choose the largest remaining logit l, `width` times; its gate is the softmax over the remaining
    logits with (l - logit) / max(|logit|, l) <= reach."""
    left, ids, gates = logits.copy(), [], []
    for _ in range(width):
        ids.append(_best(left, 1))
        top = np.take_along_axis(left, ids[-1], axis=1)
        near = np.where(top - logits > reach * np.maximum(np.abs(logits), top), -np.inf, left)
        gates.append(np.take_along_axis(softmax(near), ids[-1], axis=1))
        np.put_along_axis(left, ids[-1], -np.inf, axis=1)
    return np.concatenate(ids, axis=1), np.concatenate(gates, axis=1)


def expert_scale(x, gates):
    """y[(t, s)] = gates[t, s] * x[t]; x [T, D], gates [T, S] -> y [T * S, D]."""
    return (gates[:, :, None] * x[:, None]).reshape(-1, x.shape[1])


def expert_linear(x, ids, weight, bias=None, *, groups, first=0):
    """y[(t, s)] = weight[ids[t, s]] @ x row + bias[ids[t, s]]; weight [X * N, K], bias [X, N] -> y [T * S, N].

    x [T, K] is shared by the S routes of its token, x [T * S, K] has a row per route. groups: X. The weight has the
    experts from id `first` on; rows of routes to other experts are zeros.
    """
    weight = weight.reshape(groups, -1, weight.shape[1])
    experts = ids.ravel() - first
    if len(x) == len(ids):
        x = np.repeat(x, ids.shape[1], axis=0)
    y = np.zeros((len(experts), weight.shape[1]), np.float32)
    for expert in np.unique(experts[(experts >= 0) & (experts < groups)]):
        rows = experts == expert
        y[rows] = x[: len(experts)][rows] @ weight[expert].T
        if bias is not None:
            y[rows] += bias.reshape(groups, -1)[expert]
    return y


def expert_combine(x, gates, *, weighted=True):
    """y[t] = sum over s of gates[t, s] * x[(t, s)]; x [T * S, D], gates [T, S] -> y [T, D]. Gates are 1 if not
    weighted."""
    tokens, routes = gates.shape
    x = x[: tokens * routes].reshape(tokens, routes, x.shape[1])
    return np.sum(gates[:, :, None] * x if weighted else x, axis=1)


def softmax(x):
    """exp(x) / sum(exp(x)) over the last axis."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def _best(scores, count):
    """Columns of the `count` largest of each row, best first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _mask_groups(choice, groups, top_groups, group_best):
    """-inf for every expert outside the best `top_groups` groups of its token."""
    grouped = choice.reshape(len(choice), groups, -1)
    value = np.sum(np.sort(grouped, axis=2)[:, :, -group_best:], axis=2)
    masked = np.full_like(grouped, -np.inf)
    rows = np.arange(len(choice))[:, None]
    best = _best(value, top_groups)
    masked[rows, best] = grouped[rows, best]
    return masked.reshape(choice.shape)
