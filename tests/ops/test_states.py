"""States of sequences: the convolution against loops, and slots that are copied, saved and loaded."""

import math

import numpy as np
import pytest

from numflow.cpu.program import Program as CpuProgram
from numflow.cuda.program import Program as CudaProgram
from numflow.errors import NetworkError, RequestError
from numflow.learn.cases.build import CaseBuilder
from numflow.network import check_step
from numflow.network.windows import STATE
from numflow.ops import Batch, State
from numflow.reference import act, convolution
from numflow.reference.program import Program as Reference
from numflow.reference.state import StateMemory

TAPS, WIDTH = 3, 6
PROGRAMS = {"reference": Reference, "cpu": lambda *what: CpuProgram(*what, activations="f32", threads=2),
            "cuda": lambda *what: CudaProgram(*what, activations="f32", gpu="simulator")}


def rng(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def batch(counts, starts, slots, first=3):
    """Rows of several sequences, from given positions, with equal tokens. first: first token of the last sequence."""
    positions = [at + np.arange(n) for at, n in zip(starts, counts, strict=True)]
    tokens = np.concatenate([*(3 + own for own in positions[:-1]), first + positions[-1]])
    return Batch(tokens, np.concatenate(positions), np.cumsum([0, *counts]), np.zeros((len(counts), 1), int),
                 np.arange(len(tokens)), slots=slots)


@pytest.mark.parametrize(("bias", "kind"), [(True, "silu"), (False, "none")])
def test_the_convolution_against_loops(bias, kind):
    """Two sequences in several runs, each continuing; at the end the first sequence starts again."""
    w, b = rng(WIDTH, TAPS, seed=1), rng(WIDTH, seed=2) if bias else None
    texts, memory = [rng(9, WIDTH, seed=3), rng(5, WIDTH, seed=4)], StateMemory(State("tail", (TAPS - 1, WIDTH), 1))
    memory.resize(5)
    memory.array[...] = 7  # of earlier sequences
    done = [0, 0]
    for counts in ((4, 0), (1, 3), (0, 1), (4, 1), (3, 0)):
        done[0] %= 9
        x = np.concatenate([text[at:at + n] for text, at, n in zip(texts, done, counts, strict=True)])
        y, row = convolution.causal_conv(x, w, b, batch=batch(counts, done, [4, 1]), state=memory, kind=kind), 0
        for text, at, n in zip(texts, done, counts, strict=True):
            for t in range(at, at + n):
                for c in range(WIDTH):
                    past = [float(text[t - j, c]) * float(w[c, TAPS - 1 - j]) for j in range(TAPS) if t >= j]
                    total = math.fsum(past) + (float(b[c]) if bias else 0.0)
                    expected = total / (1 + math.exp(-total)) if kind == "silu" else total
                    assert y[row, c] == pytest.approx(expected, abs=1e-5)
                row += 1
        done = [at + n for at, n in zip(done, counts, strict=True)]
    np.testing.assert_array_equal(act.mul(rng(2, 3), rng(2, 3, seed=1)), rng(2, 3) * rng(2, 3, seed=1))


def case(**params):
    b = CaseBuilder("states")
    (x,) = b.inputs(WIDTH)
    y, weight = b.buffer(WIDTH), b.weight("weight", b.normal(WIDTH, TAPS))
    b.step("causal_conv", (x,), (y,), {"weight": weight}, **{"state": b.state(TAPS - 1, WIDTH, axis=1)} | params)
    return b.case(y)


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def program(request):
    made = PROGRAMS[request.param](case().network, case().weights)
    yield made
    made.close()


def test_slots_are_copied_saved_and_loaded(program):
    size = program.window_bytes[STATE]
    assert size >= 4 * (TAPS - 1) * WIDTH and program.block_bytes == 0
    program.reserve(0, windows={STATE: 4})
    assert program.kv_bytes == 4 * size
    program.run(batch([5], [0], [3]))
    after = program.run(batch([2], [5], [3]))
    program.run(batch([5, 4], [0, 0], [3, 1], 40))  # the same again, beside another sequence
    program.copy_blocks([3], [0], STATE)
    saved = program.save_blocks([3], STATE)
    assert saved.shape == (1, size) and saved.any()
    np.testing.assert_array_equal(program.run(batch([2], [5], [0])), after)
    program.reserve(0, windows={STATE: 6})
    program.load_blocks([5], saved, STATE)
    np.testing.assert_array_equal(program.run(batch([2], [5], [5])), after)
    np.testing.assert_array_equal(program.run(batch([5, 2], [0, 5], [5, 3]))[5:], after)
    other = program.run(batch([2], [5], [1]))
    assert not np.array_equal(other, after)
    assert program.save_blocks([], STATE).shape == (0, size)


def test_slots_that_cannot_be(program):
    program.reserve(0, windows={STATE: 2})
    for slots, message in (([2], r"state slot 2 is out of range: it should be in 0 \.\. 1"),
                           ([0, 1], "slots of the batch should give the state slots of 1 sequences")):
        with pytest.raises(RequestError, match=message):
            program.run(batch([3], [0], slots))
    with pytest.raises(RequestError, match=r"should have state slots of their own, have \[1, 1\]"):
        program.run(batch([1, 2], [0, 0], [1, 1]))
    assert program.run(batch([1, 2], [0, 0], None)).shape == (3, WIDTH)  # sequence b in slot b
    with pytest.raises(RequestError, match=r"state slot 2 is out of range: it should be in 0 \.\. 1"):
        program.save_blocks([2], STATE)


@pytest.mark.parametrize(("params", "message"), [
    ({"kind": "gelu"}, "kind should be one of none, silu, is 'gelu'"),
    ({"state": "stat.0"}, "no state named 'stat.0'; did you mean 'state.0'?")])
def test_steps_that_cannot_be(params, message):
    if "state" in params:
        network = case().network
        step = next(step for step in network.entries["main"] if step.op == "causal_conv")
        wrong = type(step)(step.op, step.inputs, step.outputs, step.weights, {**step.params, **params}, step.label)
        with pytest.raises(NetworkError) as found:
            check_step(wrong, network)
    else:
        with pytest.raises(NetworkError) as found:
            case(**params)
    assert message in str(found.value)
