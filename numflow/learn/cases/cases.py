"""The list of op cases, `CASES`: one or more for every row of OPS. All executors run the same cases (`run_case`).

The cases are part of the package, not of `tests`, because the labs use them.
"""

import numpy as np

from numflow.learn.cases.attention_cases import attention_cases
from numflow.learn.cases.build import VOCABULARY
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.recurrent_cases import recurrent_cases

ONE, FIVE = (((0, 1),),), (((0, 5),),)
RAGGED = (((0, 3), (1, 1), (2, 9)),)


def _embed():
    for name, width, scale, schedule in (("embed", 64, 1.0, RAGGED), ("embed-scaled-odd", 60, 7.5, ONE)):
        b = Builder(name)
        y = b.buffer(width)
        b.step("embed", (), (y,), {"table": b.weight("table", b.normal(97, width))}, scale=scale)
        yield b.case(y, schedule)
    b = Builder("embed-some-rows")
    y = b.buffer(60)
    b.step("embed", (), (y,), {"table": b.weight("table", b.normal(48, 60))}, scale=7.5, first=30, vocabulary=97)
    yield b.case(y, RAGGED)
    for name, op, params, types in (("embed_position", "embed_position", {}, False),
                                    ("embed_position-offset-2", "embed_position", {"offset": 2}, False),
                                    ("embed_type", "embed_type", {}, True),
                                    ("embed_type-without-types", "embed_type", {}, False)):
        b = Builder(name)
        (x,) = b.inputs(60)
        b.step(op, (x,), (x,), {"table": b.weight("table", b.normal(2 if op == "embed_type" else 40, 60))}, **params)
        yield b.case(x, (((0, 3), (1, 1)), ((1, 4), (0, 2))), types=types)


def _ngrams():
    """Cases of `ngram_ids` and `embed_ids`. The sixth token of the first batch is a separator."""
    several = (((0, 3), (1, 1), (2, 9)), ((2, 1), (0, 1)), ((1, 7), (0, 2), (2, 1)), ((0, 5),))
    for name, size, sizes, width, part in (
            ("embed_ids-of-3-grams", 3, (41, 37, 31, 44, 29, 40), 20, {}),
            ("embed_ids-of-4-grams", 4, (41, 37, 31), 36, {}),
            ("embed_ids-of-2-grams-some-rows", 2, (41, 37, 31), 32, {"first": 30, "vocabulary": 109})):
        b = Builder(name)
        ids, y = b.buffer(len(sizes), dtype="i32"), b.buffer(len(sizes) * width)
        separator = np.random.default_rng(len(name)).integers(0, VOCABULARY, 13, dtype=np.int32)[5].item()
        b.step("ngram_ids", (), (ids,), state=b.state(size - 1), sizes=sizes, separator=separator,
               multipliers=tuple(b.rng.integers(1 << 55, size=size).tolist()))
        table = b.normal(50 if part else sum(sizes), width)
        b.step("embed_ids", (ids,), (y,), {"table": b.weight("table", table)}, **part)
        yield b.case(y, several)


def _norm():
    for op in ("rms_norm", "layer_norm"):
        for suffix, width, groups, weight, eps in (("", 64, 1, 64, 1e-5), ("-odd-width", 60, 1, 60, 1e-6),
                                                   ("-plain", 64, 1, 0, 1e-5), ("-heads", 60, 3, 20, 1e-6),
                                                   ("-heads-own-weights", 128, 4, 128, 1e-5),
                                                   ("-wide", 1000, 1, 1000, 1e-5)):
            b = Builder(op + suffix)
            x, _ = b.inputs(width, 8, spread=3.0)
            weights = {role: b.weight(role, 1 + b.normal(weight)) for role in ("weight", "bias")
                       if weight and (role == "weight" or op == "layer_norm")}
            y = x if suffix == "-heads" else b.buffer(width)  # once in place
            b.step(op, (x,), (y,), weights, eps=eps, groups=groups)
            yield b.case(y, RAGGED)
    b = Builder("rms_norm-tiny-values")
    (x,) = b.inputs(64, spread=1e-4)
    b.step("rms_norm", (x,), (x,), {"weight": b.weight("weight", b.normal(64))}, eps=1e-5)
    yield b.case(x)


def _linear():
    for n, k, bias, tokens in ((64, 64, False, 5), (60, 20, True, 1), (37, 112, True, 3), (1, 60, False, 4),
                               (130, 256, False, 33), (64, 576, True, 1), (48, 100, False, 17)):
        b = Builder(f"linear-{n}x{k}{'-bias' * bias}-{tokens}-rows")
        x, _ = b.inputs(k, 4)
        y = b.buffer(n)
        weights = {"weight": b.weight("weight", b.normal(n, k))}
        if bias:
            weights["bias"] = b.weight("bias", b.normal(n))
        b.step("linear", (x,), (y,), weights)
        yield b.case(y, (((0, tokens),),))
    b = Builder("linear-on-wanted-rows")
    (x,) = b.inputs(64)
    last, y = b.buffer(64, "logits"), b.buffer(97, "logits")
    b.step("select_rows", (x,), (last,))
    b.step("linear", (last,), (y,), {"weight": b.weight("weight", b.normal(97, 64))})
    yield b.case(y, RAGGED, rows=(2, 3, 12))


def _head_linear():
    for heads, n, k, schedule in ((3, 20, 12, RAGGED), (4, 16, 64, ONE), (2, 37, 20, FIVE), (5, 64, 32, (((0, 19),),))):
        b = Builder(f"head_linear-{heads}x{n}x{k}")
        x, _ = b.inputs(heads * k, 4)
        y, weight = b.buffer(heads * n), b.weight("weight", b.normal(heads * n, k), groups=heads)
        b.step("head_linear", (x,), (y,), {"weight": weight}, heads=heads)
        yield b.case(y, schedule)


def _rope():
    for suffix, heads, head_dim, rotated, pairing, start, scale in (
            ("half", 4, 16, 16, "half", 0, 1.0), ("half-head-20", 3, 20, 20, "half", 0, 1.0),
            ("adjacent", 4, 16, 16, "adjacent", 0, 1.0), ("adjacent-partial", 2, 64, 32, "adjacent", 0, 1.0),
            ("half-partial", 3, 20, 8, "half", 0, 1.0), ("half-tail", 2, 48, 16, "half", 32, 1.19),
            ("adjacent-tail", 1, 24, 8, "adjacent", 16, 1.0)):
        for in_place in (True, False):
            b = Builder(f"rope-{suffix}{'-in-place' * in_place}")
            x, _ = b.inputs(heads * head_dim, 8)
            angles = b.buffer(rotated)
            inv_freq = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).astype(np.float32)
            b.step("rope_angles", (), (angles,), {"inv_freq": b.weight("inv_freq", inv_freq)}, scale=scale)
            y = x if in_place else b.buffer(x.width)
            b.step("rope", (x, angles), (y,), heads=heads, head_dim=head_dim, pairing=pairing, start=start)
            yield b.case(y, (((0, 3), (1, 1)), ((0, 30),)))
    b = Builder("rope_angles")
    angles = b.buffer(24)
    freq = b.weight("inv_freq", (0.5 ** np.arange(12)).astype(np.float32))
    b.step("rope_angles", (), (angles,), {"inv_freq": freq}, scale=0.7)
    yield b.case(angles, (((0, 50),),))
    b = Builder("rope_angles-of-others-before")
    angles = b.buffer(24)
    freq = b.weight("inv_freq", (0.5 ** np.arange(12)).astype(np.float32))
    b.step("rope_angles", (), (angles,), {"inv_freq": freq}, offset=-7)
    yield b.case(angles, (((0, 20),), ((0, 1),)))
    for name, params, limits in (("long", {}, (10, 11, 12)), ("long-as-far-as-known", {}, ()),
                                 ("stretched", {"stretch": 4.0}, (10, 11, 35))):
        b = Builder(f"rope_angles-{name}")
        plain, angles = b.buffer(24), b.buffer(24)
        weights = {"inv_freq": b.weight("inv_freq", (0.5 ** np.arange(12)).astype(np.float32))}
        if not params:
            weights["long"] = b.weight("long", (0.4 ** np.arange(12)).astype(np.float32))
        b.step("rope_angles", (), (plain,), {"inv_freq": weights["inv_freq"]})
        b.step("rope_angles", (), (angles,), weights, scale=0.7, border=10, long_scale=1.3, **params)
        b.step("add", (angles, plain), (angles,))
        yield b.case(angles, (((0, 3), (1, 1), (2, 9)), ((2, 2), (0, 7))), limits=limits)


def _elementwise():
    for kind in ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh", "exp"):
        b = Builder(f"act-{kind}")
        (x,) = b.inputs(60, spread=4.0)
        b.step("act", (x,), (x,), kind=kind)
        yield b.case(x)
    b = Builder("act-xielu")
    (x,) = b.inputs(60, spread=4.0)
    b.step("act", (x,), (x,), kind="xielu", positive=0.7, negative=1.1, beta=0.5, eps=-1e-6)
    yield b.case(x)
    for kind in ("relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid", "tanh", "exp",
                 "swiglu_clamp", "silu_clamp"):
        b = Builder(f"act_mul-{kind}")
        gate, up = b.inputs(60, 60, spread=4.0)
        params = {"swiglu_clamp": {"limit": 7.0, "alpha": 1.702}, "silu_clamp": {"limit": 2.0}}.get(kind, {})
        y = gate if kind == "silu" else b.buffer(60)  # once in place
        b.step("act_mul", (gate, up), (y,), kind=kind, **params)
        yield b.case(y)
    for op, params in (("scale", {"scale": 0.3}), ("softcap", {"cap": 3.0}), ("clamp", {"limit": 1.5}),
                       ("signed_sqrt", {"least": 0.5}), ("copy", {})):
        for in_place in (False, True) if op != "copy" else (False,):
            b = Builder(op + "-in-place" * in_place)
            x, _ = b.inputs(60, 8, spread=4.0)
            y = x if in_place else b.buffer(60)
            b.step(op, (x,), (y,), **params)
            yield b.case(y)
    for name, in_place in (("mul", False), ("mul-in-place", True)):
        b = Builder(name)
        x, z = b.inputs(60, 60)
        y = z if in_place else b.buffer(60)
        b.step("mul", (x, z), (y,))
        yield b.case(y, RAGGED)
    for name, scale, in_place in (("add", 1.0, True), ("add-scaled", 0.22, False)):
        b = Builder(name)
        x, z = b.inputs(60, 60)
        y = x if in_place else b.buffer(60)
        b.step("add", (x, z), (y,), scale=scale)
        yield b.case(y, ONE if in_place else RAGGED)
    b = Builder("scale-columns")
    x, _ = b.inputs(60, 8)
    y = b.buffer(60)
    b.step("scale", (x,), (y,), {"weight": b.weight("weight", b.normal(60))}, scale=0.3)
    yield b.case(y, RAGGED)
    for weighted in (True, False):
        b = Builder("scale-shifted" + "-alone" * (not weighted))
        x, _ = b.inputs(60, 8)
        weights = {"weight": b.weight("weight", b.normal(60))} if weighted else {}
        b.step("scale", (x,), (x,), {**weights, "shift": b.weight("shift", b.normal(60))}, scale=0.3)
        yield b.case(x, RAGGED)
    b = Builder("permute")
    x, _ = b.inputs(60, 8)
    y = b.buffer(60)
    b.step("permute", (x,), (y,), {"order": b.weight("order", np.roll(np.arange(60)[::-1], 7).astype(np.float32))})
    yield b.case(y, RAGGED)
    for smooth, name in enumerate(("", "-in-place", "-power")):
        b = Builder("scale_by_position" + name)
        x, _ = b.inputs(60, 8)
        y = x if smooth else b.buffer(60)
        b.step("scale_by_position", (x,), (y,), scale=0.1, length=4, offset=int(smooth > 0), smooth=smooth)
        yield b.case(y, (((0, 3), (1, 1)), ((0, 30), (1, 2))))
    b = Builder("softcap-on-wanted-rows")
    (x,) = b.inputs(64, spread=20.0)
    y = b.buffer(64, "logits")
    b.step("select_rows", (x,), (y,))
    b.step("softcap", (y,), (y,), cap=30.0)
    yield b.case(y, RAGGED, rows=(12, 0))
    for suffix, parts, plain in (("", 1, False), ("-parts", 3, False), ("-plain", 3, True), ("-wide-parts", 2, False)):
        b = Builder(f"gate_rows{suffix}")
        x, gate = b.inputs(64 if suffix == "-wide-parts" else 60, parts, spread=3.0)
        b.step("gate_rows", (x, gate), (x,), plain=plain)
        yield b.case(x, RAGGED)
    for name, heads, width, shared in (("head_concat", 3, 8, False), ("head_concat-shared", 3, 8, True)):
        b = Builder(name)
        x, z = b.inputs(heads * 20, width if shared else heads * width)
        y = b.buffer(heads * (20 + width))
        b.step("head_concat", (x, z), (y,), heads=heads)
        yield b.case(y, RAGGED)
    b = Builder("select_rows")
    x, _ = b.inputs(60, 4)
    yield b.case(x, RAGGED, rows=(2, 3, 12))


def _rows():
    """Cases of ops that combine the columns of a row."""
    for width, in_place in ((60, True), (1000, False)):
        b = Builder(f"sparsify-{width}")
        x, _ = b.inputs(width, 8, spread=3.0)
        y = x if in_place else b.buffer(width)
        b.step("sparsify", (x,), (y,), deviations=1.2)
        yield b.case(y, RAGGED)
    for name, parts, width, spread in (("match_rms", 3, 20, 3.0), ("match_rms-tiny-values", 1, 64, 1e-4)):
        b = Builder(name)
        x, like = b.inputs(parts * width, width, spread=spread)
        b.step("match_rms", (x, like), (x,), least=1e-5)
        yield b.case(x, RAGGED)
    for name, parts, sources, plus in (("mix", 3, 3, 0.0), ("mix-one-source", 4, 1, 1.0)):
        b = Builder(name)
        base, x, gates = b.inputs(parts * 20, sources * 20, parts * sources)
        y = base if sources == 1 else b.buffer(parts * 20)  # once in place
        b.step("mix", (base, x, gates), (y,), parts=parts, plus=plus)
        yield b.case(y, RAGGED)


def _balance():
    """Cases of `balance`: matrices that are scaled until their rows and columns sum to 1."""
    for size, times, eps in ((4, 20, 1e-6), (3, 1, 0.01), (1, 2, 0.0)):
        b = Builder(f"balance-{size}-{times}-times")
        (x,) = b.inputs(size ** 2, spread=3.0)
        y = b.buffer(size ** 2)
        b.step("balance", (x,), (y,), times=times, eps=eps)
        yield b.case(y, RAGGED, bound=2e-5)


def _route():
    """Cases of `moe_route`. The output has the gate of each expert x: its matrix copies the input to column x."""
    for suffix, experts, chosen, params, bias in (
            ("softmax", 8, 2, {"normalize": True}, False), ("softmax-not-normalized", 6, 3, {"scale": 2.5}, False),
            ("softmax_topk", 4, 2, {"score": "softmax_topk"}, False),
            ("sigmoid_topk", 8, 3, {"score": "sigmoid_topk", "normalize": True, "least_sum": 1.6, "scale": 1.5}, True),
            ("least-sum", 8, 2, {"normalize": True, "least_sum": 0.6}, False),
            ("sigmoid-bias", 16, 4, {"score": "sigmoid", "normalize": True, "scale": 2.5}, True),
            ("groups", 16, 4, {"score": "sigmoid", "groups": 4, "top_groups": 2, "normalize": True}, True),
            ("softmax-groups", 12, 3, {"groups": 3, "top_groups": 1}, False),
            ("groups-by-their-best", 16, 4, {"groups": 4, "top_groups": 2, "group_best": 1}, False),
            ("groups-that-tie", 16, 4, {"score": "sigmoid", "groups": 8, "top_groups": 3, "group_best": 1}, False),
            ("groups-below-zero", 8, 6, {"score": "sigmoid", "groups": 4, "top_groups": 3}, True),
            ("groups-that-tie-by-sums", 16, 4, {"groups": 4, "top_groups": 2}, False),
            ("sparsemixer", 8, 2, {"score": "sparsemixer", "jitter": 0.3}, False),
            ("sparsemixer-scales", 6, 3, {"score": "sparsemixer", "jitter": 0.1, "normalize": True}, False),
            ("scales", 8, 2, {"normalize": True}, True),
            ("sqrt-softplus", 8, 3,
             {"score": "sqrt_softplus", "normalize": True, "scale": 1.5, "least_sum": 1e-20}, True),
            ("given", 9, 3, {"score": "sqrt_softplus", "normalize": True, "least_sum": 1e-20}, False),
            ("given-softmax", 5, 4, {"scale": 2.0, "least_sum": 1e-20}, False),
            ("one-expert", 4, 1, {"score": "sigmoid"}, False), ("all-experts", 3, 3, {"normalize": True}, False)):
        b = Builder(f"moe_route-{suffix}")
        (logits,) = b.inputs(experts, spread=2.0)
        if "tie" in suffix:  # logits of three values only
            b.arrays["table.0"][:] = np.sign(np.trunc(b.arrays["table.0"]))
        one = b.buffer(experts)
        b.step("act", (logits,), (one,), kind="relu")
        b.step("scale", (one,), (one,), scale=0.0)
        b.step("embed_type", (one,), (one,), {"table": b.weight("ones", np.ones((1, experts), np.float32))})
        ids, gates = b.buffer(chosen, dtype="i32"), b.buffer(chosen)
        weights = {"bias": b.weight("bias", b.normal(experts) - 3 * ("below-zero" in suffix))} if bias else {}
        if "scales" in suffix:
            weights["scales"] = b.weight("scales", b.normal(experts))
        given = ()
        if "given" in suffix:
            given = (b.buffer(chosen),)
            table = b.rng.permuted(np.tile(np.arange(experts), (97, 1)), axis=1)[:, :chosen]
            b.step("embed", (), given, {"table": b.weight("experts", table.astype(np.float32))})
        b.step("moe_route", (logits, *given), (ids, gates), weights, **params)
        routed, y = b.buffer(experts, "routes"), b.buffer(experts)
        pick = np.zeros((experts, experts, experts), np.float32)
        pick[np.arange(experts), np.arange(experts), :] = 1 / experts
        name = b.weight("pick", pick.reshape(-1, experts), groups=experts)
        b.step("expert_linear", (one, ids), (routed,), {"weight": name})
        b.step("expert_combine", (routed, gates), (y,))
        yield b.case(y, RAGGED)


def _experts():
    """Cases of a whole MoE feed-forward layer: route, gate and up, multiply, down, combine."""
    for name, width, inner, experts, chosen, bias, schedule in (
            ("moe-feed-forward", 64, 32, 4, 2, False, RAGGED), ("moe-feed-forward-bias-odd", 60, 20, 5, 3, True, FIVE),
            ("moe-feed-forward-one-token", 64, 48, 8, 2, False, ONE),
            ("moe-feed-forward-one-route", 32, 32, 4, 1, True, (((0, 19),),)),
            ("moe-feed-forward-gated-inputs", 36, 20, 5, 2, False, RAGGED),
            ("moe-feed-forward-one-gated-input", 64, 32, 4, 1, False, RAGGED)):
        b = Builder(name)
        x, logits = b.inputs(width, experts)
        ids, gates = b.buffer(chosen, dtype="i32"), b.buffer(chosen)
        b.step("moe_route", (logits,), (ids, gates), normalize=True)
        gate_up, y = b.buffer(2 * inner, "routes"), b.buffer(width)
        down = b.buffer(width, "routes")
        gated = "gated" in name
        if gated:
            x, token = b.buffer(width, "routes"), x
            b.step("expert_scale", (token, gates), (x,))
        _expert_linear(b, x, ids, gate_up, experts, bias)
        gate, up = (type(gate_up)(gate_up.buffer, start, inner) for start in (0, inner))
        b.step("act_mul", (gate, up), (gate,), kind="silu")
        _expert_linear(b, gate, ids, down, experts, bias)
        b.step("expert_combine", (down, gates), (y,), **({"weighted": False} if gated else {}))
        yield b.case(y, schedule)


def _expert_linear(b, x, ids, y, experts, bias):
    weights = {"weight": b.weight("experts", b.normal(experts * y.width, x.width), groups=experts)}
    if bias:
        weights["bias"] = b.weight("bias", b.normal(experts, y.width))
    b.step("expert_linear", (x, ids), (y,), weights)


def _causal_conv():
    several = (((0, 3), (1, 1), (2, 9)), ((2, 1), (0, 1)), ((1, 7), (0, 2), (2, 1)), ((0, 5),))
    for name, width, taps, bias, kind, schedule in (
            ("causal_conv", 64, 3, False, "none", several), ("causal_conv-bias-silu", 60, 4, True, "silu", several),
            ("causal_conv-two-taps", 100, 2, True, "none", RAGGED),
            ("causal_conv-many-taps", 20, 9, False, "silu", several),
            ("causal_conv-one-token", 200, 4, True, "silu", ONE),
            ("causal_conv-long", 48, 4, False, "none", (((0, 70),),))):
        b = Builder(name)
        x, _ = b.inputs(width, 4)
        y = b.buffer(width)
        weights = {"weight": b.weight("weight", b.normal(width, taps))}
        if bias:
            weights["bias"] = b.weight("bias", b.normal(width))
        state = b.state(taps - 1, width, axis=1)
        b.step("causal_conv", (x,), (y,), weights, state=state, kind=kind)
        yield b.case(y, schedule)


CASES = [*_embed(), *_ngrams(), *_norm(), *_linear(), *_head_linear(), *_rope(), *_elementwise(), *_rows(), *_balance(),
         *_route(), *_experts(), *_causal_conv(), *attention_cases(), *recurrent_cases()]
