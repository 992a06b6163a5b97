"""Lab 13: choosing experts.

A layer of a mixture of experts (MoE) has X feed-forward networks, the experts. Each token is processed by S of them. A
router gives each token a logit for every expert. `moe_route` turns the logits of a token into the ids of its experts
and their gates, the factors that the experts' results are multiplied with.

1. Scores: a softmax over the experts ("softmax"), the sigmoid of each logit ("sigmoid"), or the logits themselves
   ("softmax_topk").
2. The values for the choice are the scores plus the bias [X], if there is one. The bias balances the load of the
   experts. It changes the choice only, not the gates.
3. Groups: the experts form `groups` groups of neighbours, of equal size. If top_groups < groups, the value of a group
   is the sum of its `group_best` largest values. Only experts of the `top_groups` best groups may be chosen.
4. The S = `width` experts with the largest values are chosen. Among equal values the lower id comes first, also among
   groups.
5. The gates are the scores, without bias, of the chosen experts. For "softmax_topk" they are a softmax over the S
   chosen logits. `normalize` divides the gates of a token by their sum. At the end they are multiplied by `scale`.

Write `moe_route`. ids are int32, gates float32.

    numflow learn check 13       numflow learn hint 13       numflow learn bench 13
"""

import numpy as np

LAB = {
    "number": 13, "title": "Choosing experts", "minutes": 30, "functions": ["moe_route"], "grader": "reference",
    "cases": ["moe_route-softmax", "moe_route-softmax-not*", "moe_route-softmax_topk", "moe_route-*",
              "moe-feed-forward*"],
    "hints": [
        "Draw a row of 8 scores in 4 groups of 2. Circle the group with the largest sum, then its best expert.",
        "Ties are the hard part: np.argsort(-values, kind=\"stable\") keeps the order of equal values, "
        "argsort(values)[::-1] reverses it.",
        "ids = np.argsort(-choice, axis=1, kind=\"stable\")[:, :width]; gates = np.take_along_axis(scores, ids, "
        "axis=1). For groups: choice.reshape(T, groups, -1), np.sort(...)[:, :, -group_best:].sum(axis=2)."],
}


def moe_route(logits, bias=None, *, width, score, normalize, scale, groups, top_groups, group_best):
    """logits [T, X], bias [X] or None -> ids i32 [T, width], gates f32 [T, width]."""
    scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_topk": lambda x: x}[score](logits)
    choice = scores if bias is None else scores + bias
    if top_groups < groups:
        grouped = choice.reshape(len(choice), groups, -1)
        values = np.sort(grouped, axis=2)[:, :, -group_best:].sum(axis=2)
        choice = _within(grouped, values, top_groups)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :width]
    gates = np.take_along_axis(scores, ids, axis=1)
    if score == "softmax_topk":
        gates = _softmax(gates)
    if normalize:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), gates * np.float32(scale)


def _within(grouped, values, count, outside=-np.inf, order=lambda values: np.argsort(-values, axis=1, kind="stable")):
    chosen = np.zeros(values.shape, bool)
    np.put_along_axis(chosen, order(values)[:, :count], True, axis=1)
    return np.where(chosen[:, :, None], grouped, outside).reshape(len(grouped), -1)


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _routed(logits, bias, given, group_value=None, outside=-np.inf,
            order=lambda values: np.argsort(-values, axis=1, kind="stable")):
    """The solution with another value of a group, another value of experts outside the best groups, or another order.
    """
    scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_topk": lambda x: x}[given["score"]](logits)
    choice = scores if bias is None else scores + bias
    if given["top_groups"] < given["groups"]:
        grouped = choice.reshape(len(choice), given["groups"], -1)
        of_group = np.sort(grouped, axis=2)[:, :, -given["group_best"]:].sum(axis=2)
        values = group_value(grouped) if group_value else of_group
        choice = _within(grouped, values, given["top_groups"], outside, order)
    ids = order(choice)[:, :given["width"]]
    gates = np.take_along_axis(scores, ids, axis=1)
    if given["score"] == "softmax_topk":
        gates = _softmax(gates)
    if given["normalize"]:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return ids.astype(np.int32), gates * np.float32(given["scale"])


def moe_route__not_normalized(logits, bias=None, **given):
    """gates that are not normalised although normalize is True"""
    return moe_route(logits, bias, **{**given, "normalize": False})


def moe_route__always_normalized(logits, bias=None, **given):
    """gates that are normalised although normalize is False"""
    return moe_route(logits, bias, **{**given, "normalize": True})


def moe_route__no_scale(logits, bias=None, **given):
    """gates that are not multiplied by scale"""
    return moe_route(logits, bias, **{**given, "scale": 1.0})


def moe_route__scaled_first(logits, bias=None, **given):
    """gates that are normalised after the multiplication by scale, which cancels the scale"""
    return moe_route(logits, bias, **{**given, "scale": 1.0 if given["normalize"] else given["scale"]})


def moe_route__always_softmax(logits, bias=None, **given):
    """a softmax over all experts although `score` is not "softmax\""""
    return moe_route(logits, bias, **{**given, "score": "softmax"})


def moe_route__no_bias(logits, bias=None, **given):
    """a choice without the bias"""
    return moe_route(logits, None, **given)


def moe_route__bias_in_gates(logits, bias=None, **given):
    """gates that contain the bias: the bias is for the choice only"""
    ids, gates = moe_route(logits, bias, **{**given, "normalize": False, "scale": 1.0})
    gates = gates if bias is None else gates + bias[ids]
    if given["normalize"]:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return ids, gates * np.float32(given["scale"])


def moe_route__no_groups(logits, bias=None, **given):
    """a choice among the experts of all groups: choose among those of the top_groups best groups only"""
    return moe_route(logits, bias, **{**given, "groups": 1, "top_groups": 1})


def moe_route__best_of_group(logits, bias=None, **given):
    """groups that are ranked by their best expert: rank them by the sum of their group_best largest values"""
    return moe_route(logits, bias, **{**given, "group_best": 1})


def moe_route__whole_groups(logits, bias=None, **given):
    """groups that are ranked by the sum of all their experts: sum the group_best largest values only"""
    return moe_route(logits, bias, **{**given, "group_best": logits.shape[1] // given["groups"]})


def moe_route__least_of_group(logits, bias=None, **given):
    """groups that are ranked by the sum of their smallest values: sum the group_best largest values"""
    best = given["group_best"]
    return _routed(logits, bias, given, lambda grouped: np.sort(grouped, axis=2)[:, :, :best].sum(axis=2))


def moe_route__zero_outside(logits, bias=None, **given):
    """values of 0 for experts outside the best groups: experts with negative values then lose to them; use -inf"""
    return _routed(logits, bias, given, outside=0)


def moe_route__reversed_order(logits, bias=None, **given):
    """a reversed sort, which puts the last of equal experts first: sort -values with kind="stable\""""
    return _routed(logits, bias, given, order=lambda values: np.argsort(values, axis=1)[:, ::-1])


def moe_route__softmax_of_softmax(logits, bias=None, **given):
    """a softmax of probabilities: "softmax_topk" is one softmax, over the logits of the chosen experts"""
    if given["score"] == "softmax_topk":
        logits = _softmax(logits)
    return moe_route(logits, bias, **given)


def moe_route__last_of_equal(logits, bias=None, **given):
    """the higher id among equal experts or groups: the lower id comes first"""
    ids, gates = moe_route(logits[:, ::-1], None if bias is None else bias[::-1], **given)
    return (logits.shape[1] - 1 - ids).astype(np.int32), gates


def moe_route__worst(logits, bias=None, **given):
    """the experts with the smallest scores"""
    ids, _ = moe_route(-logits, None if bias is None else -bias, **{**given, "score": "softmax_topk"})
    everything = moe_route(logits, bias, **{**given, "width": logits.shape[1], "normalize": False, "groups": 1,
                                            "top_groups": 1})
    scores = np.zeros(logits.shape, np.float32)
    np.put_along_axis(scores, everything[0], everything[1], axis=1)
    gates = np.take_along_axis(scores, ids, axis=1)
    return ids, gates / gates.sum(axis=1, keepdims=True) if given["normalize"] else gates


def moe_route__over_tokens(logits, bias=None, **given):
    """a softmax over the tokens instead of the experts of each token"""
    if given["score"] != "softmax":
        return moe_route(logits, bias, **given)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = e / e.sum(axis=0, keepdims=True)
    value = scores if bias is None else scores + bias
    ids = np.argsort(-value, axis=1, kind="stable")[:, :given["width"]].astype(np.int32)
    gates = np.take_along_axis(scores, ids, axis=1)
    if given["normalize"]:
        gates = gates / gates.sum(axis=1, keepdims=True)
    return ids, (gates * np.float32(given["scale"])).astype(np.float32)


def moe_route__scaled_twice(logits, bias=None, **given):
    """gates that are multiplied by scale twice"""
    ids, gates = moe_route(logits, bias, **given)
    return ids, gates * np.float32(given["scale"])


def moe_route__sigmoid_upside_down(logits, bias=None, **given):
    """1 / (1 + exp(logits)): the sigmoid has exp(-logits)"""
    return moe_route(-logits if given["score"] == "sigmoid" else logits, bias, **given)


def bench(functions):
    """Times for 256 tokens and 128 experts in 8 groups, with 8 experts per token."""
    from numflow.learn.graders.reference import bars

    def build(b):
        (logits,) = b.inputs(128)
        ids, gates = b.buffer(8, dtype="i32"), b.buffer(8)
        b.step("moe_route", (logits,), (ids, gates), score="sigmoid", normalize=True, groups=8, top_groups=4)
        return gates

    return bars(functions, LAB, build, 256)
