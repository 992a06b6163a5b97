"""Attention of the reference executor against loops over rows, heads and keys."""

import math

import numpy as np
import pytest

from numflow.learn.cases.build import error, run_case
from numflow.learn.cases.cases import CASES
from numflow.ops import param
from numflow.reference.program import Program

ATTENTION = [case for case in CASES if any(s.op == "attention" and s.inputs[1:] == () and not param(s, "entries")
                                           for s in case.network.entries["main"])]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
@pytest.mark.thin(3)
def test_attention_against_loops(case):
    for actual, expected in zip(run_case(case, Program, block_size=4), _loops(case), strict=True):
        assert error(actual, expected) < 1e-5


def _loops(case):
    """Attention of a case by loops over rows, heads and keys, with the caches as dicts of rows by entry."""
    writes = {entry: next((step for step in steps if step.op == "cache_write"), None)
              for entry, steps in case.network.entries.items()}
    step = next(step for step in case.network.entries["main"] if step.op == "attention")
    weights = {role: case.weights.f32(name).astype(np.float64) for role, name in step.weights.items()}
    shape = case.network.caches[step.params["cache"]]
    memory, results = {"encode": {}, "main": {}}, []
    for run in case.runs(4):
        table = case.weights.f32(case.network.entries[run.entry][0].weights["table"]).astype(np.float64)
        x, write = table[run.batch.tokens], writes[run.entry]
        rows = [(run.sequences[b], t) for b in range(len(run.sequences))
                for t in range(run.batch.starts[b], run.batch.starts[b + 1])]
        for s, t in rows if write else ():
            memory[run.entry].setdefault(s, {})[int(run.batch.positions[t])] = tuple(
                _columns(x, v)[t].reshape(shape.kv_heads, -1) for v in write.inputs)
        if run.entry == "main":
            q = _columns(x, step.inputs[0])
            results.append(np.array([_row(step, weights, q[t], int(run.batch.positions[t]), *(
                memory[entry].get(s, {}) for entry in ("main", "encode")), shape) for s, t in rows]))
    return results


def _columns(x, view):
    return x[:, view.start:view.start + view.width]


def _row(step, weights, q, at, own, others, shape):
    """own: keys of the sequence. others: keys of the encoder, without masks and biases."""
    heads, out = param(step, "heads"), []
    for h in range(heads):
        g = h // (heads // shape.kv_heads)
        query, scores, values = q.reshape(heads, -1)[h], [], []
        for is_own, (position, (k, *v)) in ((mine, item) for mine, keys in ((True, own), (False, others))
                                            for item in keys.items()):
            distance = position - at
            hidden = param(step, "causal") and distance > 0
            far = param(step, "window") and abs(distance) >= param(step, "window")
            chunk = param(step, "chunk")
            if is_own and (hidden or far or (chunk and position // chunk != at // chunk)):
                continue
            score = param(step, "scale") * float(query @ k[g])
            if param(step, "softcap"):
                score = param(step, "softcap") * math.tanh(score / param(step, "softcap"))
            if is_own and "slopes" in weights:
                score -= weights["slopes"][h] * abs(distance)
            if is_own and "buckets" in weights:
                score += weights["buckets"][_bucket(distance, 8, 16, param(step, "causal")), h]
            scores.append(score)
            values.append(v[0][g] if v else k[g][:shape.prefix])
        extra = math.exp(weights["sinks"][h]) if "sinks" in weights else 0.0
        total = math.fsum(map(math.exp, scores)) + extra
        out.append(sum(math.exp(s) / total * v for s, v in zip(scores, values, strict=True)))
    return np.concatenate(out)


def _bucket(distance, count, furthest, causal):
    """T5's bucket of one relative position."""
    first = 0
    if not causal:
        count //= 2
        first = count if distance > 0 else 0
    back = max(-distance, 0) if causal else abs(distance)
    exact = count // 2
    if back < exact:
        return first + back
    steps = 0  # number of logarithmic borders exact * (furthest / exact)^(i / n) that are at or below `back`
    while steps < count - exact - 1 and back >= exact * (furthest / exact) ** ((steps + 1) / (count - exact)) - 1e-9:
        steps += 1
    return first + exact + steps
