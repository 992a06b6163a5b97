"""Linear attention as a single op, with usual head sizes, in pieces of several lengths."""

import numpy as np

from numflow.cpu.measure.roofline import measure_limits
from numflow.cpu.program import Program
from numflow.learn.cases.build import CaseBuilder
from numflow.network.windows import STATE
from numflow.ops import Batch
from numflow.quant.state import STATE_BLOCK

# heads, key heads, dk, dv, inputs beside q, k and v; multiply-adds of a token by the recurrence: 3 or 2 dk dv a head
FORMS = {"gated delta rule": (16, 16, 128, 128, "delta"), "decay for each column": (16, 16, 128, 128, "columns"),
         "state space": (48, 1, 128, 64, "scaled"), "fixed decay": (16, 16, 128, 128, "fixed")}
PIECES = (1, 4, 16, 64, 512)


def rates(rounds: int, quick: bool) -> dict:
    """10^9 operations per second of each form and size of pieces, and of the machine; one thread, best of rounds."""
    pieces = PIECES[1:3] if quick else PIECES
    return {"peak": measure_limits(1, 1 << 24).f32_gop_s, "pieces": pieces,
            "forms": {name: [_rate(sizes, piece, 2 if quick else 20 * rounds) for piece in pieces]
                      for name, sizes in FORMS.items()}}


def _rate(sizes, tokens: int, repeat: int) -> float:
    """Of whole blocks in the middle of a text, counted as the recurrence would compute them."""
    heads, _, k_dim, v_dim, kind = sizes
    case = _case(*sizes)
    with_state = Program(case.network, case.weights, activations="f32", threads=1, rows=tokens)
    with_state.reserve(0, windows={STATE: 1})
    seconds, whole = 0.0, max(tokens, STATE_BLOCK)
    for first in range(64, 64 + whole, tokens):
        positions = first + np.arange(tokens, dtype=np.int32)
        batch = Batch(positions % 97, positions, np.array([0, tokens]), np.zeros((1, 1), np.int32), np.array([0]),
                      slots=np.array([0]))
        seconds += min(row.microseconds for _ in range(repeat) for row in with_state.trace(batch)
                       if row.op == "linear_attention") / 1e6
    with_state.close()
    return 2e-9 * (3 if kind in ("delta", "columns") else 2) * heads * k_dim * v_dim * whole / seconds


def _case(heads, key_heads, k_dim, v_dim, kind):
    b = CaseBuilder(kind)
    steps = heads * (k_dim if kind == "columns" else 1)
    q, k, v, decay, beta = b.inputs(key_heads * k_dim, key_heads * k_dim, heads * v_dim, steps, heads, spread=0.1)
    b.step("softplus", (decay,), (decay,), least=0.01, most=3.0)
    b.step("act", (beta,), (beta,), kind="sigmoid")
    y, rate = b.buffer(heads * v_dim), b.weight("rate", -np.exp(b.normal(heads)))
    inputs = {"fixed": (q, k, v), "scaled": (q, k, v, decay)}.get(kind, (q, k, v, decay, beta))
    b.step("linear_attention", inputs, (y,), {"rate": rate}, state=b.state(heads, k_dim, v_dim), heads=heads,
           key_heads=key_heads, scaled=kind == "scaled")
    return b.case(y)
