"""Fused steps: the same results as separate steps, and the number of launches of a layer."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Simulated
from numflow.cuda.linear.linear import FEW
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.lab.shapes import Shape, random_network
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import error, run_case
from numflow.network import WeightSource
from numflow.ops import Batch, View
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import stored, stored_as, values

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them

ACTS = {"act": {"kind": "gelu"}, "act_mul": {"kind": "silu"}, "clamped": {"kind": "swiglu_clamp", "limit": 1.5,
                                                                         "alpha": 1.7}}


def produced(op: str, kind: str, width: int, tokens: int, kept: bool = False):
    """A step whose output is read by a matrix of `kind`, then an add. kept: a second network output includes the step's
    output."""
    b = Builder(f"{op}-{kind}-{width}-{tokens}")
    x, up, a = b.inputs(width, width, 16, spread=2.0)
    hidden, product, y = b.buffer(width), b.buffer(16), b.buffer(16)
    if "norm" in op:
        roles = ("weight", "bias") if op == "layer_norm" else ("weight",)
        b.step(op, (x,), (hidden,), {role: b.weight(role, 1 + b.normal(width)) for role in roles}, eps=1e-5)
    else:
        b.step("act" if op == "act" else "act_mul", (x,) if op == "act" else (x, up), (hidden,), **ACTS[op])
    rows = stored(kind, 16, width) if kind not in ("F16", "BF16") else None
    matrix = b.normal(16, width) if rows is None else values(kind, rows, width)
    name = b.weight("weight", matrix)
    b.step("linear", (hidden,), (product,), {"weight": name})
    b.step("add", (a, product), (y,), scale=0.5)
    case = b.case(y, (((0, tokens),),))
    if rows is None:
        rows = {"F16": matrix.astype(np.float16), "BF16": (matrix.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        rows = rows.view(np.uint8)
    case = stored_as(case, {name: (kind, rows)})
    if kept:
        network = replace(case.network, outputs={**case.network.outputs, "hidden": View(hidden.buffer, 0, width)})
        case = replace(case, network=network)
    return case


def both(case, **options):
    """The outputs with and without fusion."""
    return [run_case(case, Program, fused=fused, gpu=Simulated(seed=seed), **options)[0]
            for seed, fused in enumerate((True, False))]


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", *ACTS])
@pytest.mark.parametrize(("kind", "tokens"), [("q4", 2), ("q4", 9), ("F16", 2), ("BF16", 9)])
def test_operands_made_by_what_comes_before(op, kind, tokens):
    fused, plain = both(produced(op, kind, 96, tokens))
    assert error(fused, plain) < (1e-5 if tokens == 2 else 2e-3)


@pytest.mark.parametrize("width", [2080, 4128])
def test_a_row_of_a_thousand_threads(width):
    fused, plain = both(produced("rms_norm", "q4", width, 1))
    assert error(fused, plain) < 1e-5


@pytest.mark.parametrize(("kind", "behind"), [
    ("q4", "q4"), ("q3h", "q3h"), ("Q6_K", "q4"), ("q4", "F16"), ("q3h", "q6+1%")])
@pytest.mark.parametrize("spread", [1.0, 400.0])
def test_gate_and_up_of_several_tokens(kind, behind, spread):
    """The product's epilogue computes the activation. If it exceeds the float16 range, the next product is repeated
    with a scale; kernels that cannot do so get a scaled operand."""
    b = Builder(f"gates-{kind}-{behind}-{spread}")
    (x,) = b.inputs(256, spread=spread)
    pair, hidden, y = b.buffer(1024), b.buffer(512), b.buffer(16)
    steps = (((x,), pair, 1024, 256), ((hidden,), y, 16, 512))
    matrices = {}
    for inputs, output, n, k in steps:
        kind = kind if n == 1024 else behind
        plain = kind == "F16"
        rows = b.normal(n, k).astype(np.float16).view(np.uint8) if plain else stored(kind, n, k)
        name = b.weight("weight", rows.view(np.float16).astype(np.float32) if plain else values(kind, rows, k))
        b.step("linear", inputs, (output,), {"weight": name})
        if n == 1024:
            b.step("act_mul", (View(pair.buffer, 0, 512), View(pair.buffer, 512, 512)), (hidden,), kind="silu")
        matrices[name] = kind, rows
    case = stored_as(b.case(y, (((0, 9),),)), matrices)
    fused, plain = both(case)
    assert error(fused, plain) < 2e-3
    (expected,) = run_case(case, Reference)
    assert error(fused, expected) < 1e-2
    assert spread == 1 or np.abs(expected).max() > 1e6


def test_rows_that_somebody_else_wants_are_kept():
    case = produced("rms_norm", "q4", 64, 2, kept=True)
    for output in ("logits", "hidden"):
        found = []
        for fused in (True, False):
            program = Program(case.network, case.weights, fused=fused, gpu=Simulated())
            program.run(case.runs(64)[0].batch)
            found.append(program._download(case.network.outputs[output], 2))
            program.close()
        np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def model(layers: int, kind: str, **options) -> Program:
    """A plain decoder with random weights."""
    network, checkpoint = random_network(Shape(layers, 64, 2, 1, 96, 40, 64), kind)
    return Program(network, WeightSource(network, checkpoint), **options)


@pytest.mark.parametrize(("kind", "kv_type"), [("q4", "f16"), ("F16", "f32")])
def test_a_decoder(kind, kv_type):
    """A prompt of 3 tokens, a prompt of 10 for tensor cores, and single tokens of both."""
    found = []
    for fused in (True, False):
        program = model(2, kind, kv_type=kv_type, gpu=Simulated(seed=1), fused=fused)
        program.reserve(3)
        logits, rng = [], np.random.default_rng(0)
        for sequence, begin, count in ((0, 0, 3), (1, 0, 10), (0, 3, 1), (1, 10, 1)):
            logits.append(program.run(Batch(rng.integers(0, 40, count), np.arange(begin, begin + count),
                                            np.array([0, count]), np.array([[2 - sequence]]), np.array([count - 1]))))
        program.close()
        found.append(np.concatenate(logits))
    assert error(*found) < 2e-2
    assert np.array_equal(found[0].argmax(1), found[1].argmax(1))


def test_as_many_sequences_as_one_launch_serves():
    """One token of each sequence. The last layer computes logit rows only, for as many rows as there is memory for."""
    found = []
    for fused in (True, False):
        program = model(1, "F16", gpu=Simulated(seed=2), fused=fused)
        program.reserve(FEW)
        ids = np.arange(FEW)
        found.append(program.run(Batch(ids + 3, np.zeros(FEW, int), np.arange(FEW + 1), ids[:, None], ids)))
        program.close()
    assert error(*found) < 2e-2


@pytest.mark.parametrize(("kind", "alone", "neighbours", "units"), [("q4", 18, 10, 7), ("F16", 14, 9, 6)])
def test_launches_of_a_layer(kind, alone, neighbours, units):
    """One token without parts of keys: the launches that a third layer adds (the last layer continues with logit rows
    only)."""
    for options, expected in (({"fused": False}, alone), ({"units": False}, neighbours), ({}, units)):
        counts = []
        for layers in (2, 3):
            program = model(layers, kind, gpu=Notebook(), **options)
            counts.append(len(program.launches(Sizes((1,) * 4, 40))))
            program.close()
        assert counts[1] - counts[0] == expected
