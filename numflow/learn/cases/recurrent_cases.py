"""Cases of recurrent ops: every form of decay and update of their states."""

import numpy as np

from numflow.learn.cases.build import CaseBuilder as Builder

SCHEDULE = (((0, 3), (1, 1), (2, 19)), ((2, 14), (0, 14)), ((1, 1), (0, 1)))  # across boundaries of blocks of 16


def recurrent_cases():
    """Cases of `linear_attention` (with the steps that models have before it), `gated_recurrence` and `wkv`."""
    for suffix, heads, key_heads, k_dim, v_dim, options in (
            ("delta", 4, 2, 16, 16, {"delta": True}), ("delta-tiled", 6, 3, 20, 40, {"delta": True, "tiled": True}),
            ("delta-by-column", 3, 3, 16, 17, {"delta": True, "by_column": True}),
            ("delta-one-column", 2, 1, 16, 1, {"delta": True}),
            ("scaled", 6, 2, 16, 24, {"scaled": True, "skip": True}),
            ("scaled-wide", 1, 1, 33, 70, {"scaled": True}),
            ("scan", 40, 1, 8, 1, {"scaled": True, "skip": True, "column_rates": True}),
            ("scan-wide", 5, 1, 20, 1, {"scaled": True, "column_rates": True}),
            ("fixed", 4, 4, 20, 20, {"fixed": True})):
        yield _case(f"linear_attention-{suffix}", heads, key_heads, k_dim, v_dim, **options)
    b = Builder("gated_recurrence")
    x, entry, fade = b.inputs(60, 60, 60, spread=2.0)
    y, weights = b.buffer(60), {role: b.weight(role, b.normal(60)) for role in ("rate", "entry_bias", "fade_bias")}
    b.step("gated_recurrence", (x, entry, fade), (y,), weights, state=b.state(60))
    yield b.case(y, SCHEDULE)
    b = Builder("wkv")
    k, v = b.inputs(60, 60, spread=2.0)
    y, weights = b.buffer(60), {"decay": b.weight("decay", -np.exp(b.normal(60))),
                                "first": b.weight("first", b.normal(60))}
    b.step("wkv", (k, v), (y,), weights, state=b.state(3, 60))
    yield b.case(y, SCHEDULE)


def _case(name, heads, key_heads, k_dim, v_dim, delta=False, tiled=False, by_column=False, scaled=False, skip=False,
          column_rates=False, fixed=False):
    b = Builder(name)
    width = key_heads * k_dim
    q, k, v, steps, beta = b.inputs(width, width, heads * v_dim, heads * (k_dim if by_column else 1), heads)
    length = b.weight("length", np.full(k_dim, k_dim ** -0.5, np.float32))
    for view in (q, k):
        b.step("rms_norm", (view,), (view,), {"weight": length}, eps=1e-6, groups=key_heads)
    b.step("softplus", (steps,), (steps,), {"bias": b.weight("bias", b.normal(steps.width))}, least=0.01, most=3.0)
    b.step("act", (beta,), (beta,), kind="sigmoid")
    b.step("scale", (beta,), (beta,), scale=2.0)
    weights = {"rate": b.weight("rate", -np.exp(b.normal(heads * (k_dim if column_rates else 1))))}
    if skip:
        weights["skip"] = b.weight("skip", b.normal(heads))
    y = b.buffer(heads * v_dim)
    inputs = (q, k, v) if fixed else (q, k, v, steps, beta) if delta else (q, k, v, steps)
    b.step("linear_attention", inputs, (y,), weights, state=b.state(heads, k_dim, v_dim), heads=heads,
           key_heads=key_heads, tiled=tiled, scaled=scaled)
    return b.case(y, SCHEDULE)
