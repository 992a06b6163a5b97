"""Matrix states of every type: the same bits however a sequence is cut, close to the recurrence, or refused."""

import numpy as np
import pytest

from numflow.cpu.program import Program as CpuProgram
from numflow.cuda.program import Program as CudaProgram
from numflow.errors import RequestError
from numflow.learn.cases.build import CaseBuilder
from numflow.learn.cases.cases import CASES
from numflow.network.windows import STATE
from numflow.ops import Batch
from numflow.quant.state import STATE_TYPES
from numflow.reference.program import Program as Reference

BY_NAME = {case.name.removeprefix("linear_attention-"): case for case in CASES}
TOKENS = np.random.default_rng(5).integers(0, 97, 75).astype(np.int32)
NEAR = {"f32": 1e-5, "f16": 2e-3, "bf16": 0.02, "q8": 0.04}  # relative to the standard deviation of float32 results
BESIDE = np.arange(30, dtype=np.int32)


def run(program, *pieces):
    """Outputs of the first of several sequences: (ids, first position, slot)."""
    ids = [piece[0] for piece in pieces]
    batch = Batch(np.concatenate(ids), np.concatenate([at + np.arange(len(own)) for own, at, _ in pieces]),
                  np.cumsum([0, *map(len, ids)]), np.zeros((len(pieces), 1), int), np.arange(len(ids[0])),
                  slots=np.array([slot for *_, slot in pieces]))
    return np.array(program.run(batch))


def opened(case, program_class, **options):
    program = program_class(case.network, case.weights, activations="f32", **options)
    program.reserve(0, windows={STATE: 3})
    return program


@pytest.mark.parametrize(("name", "dtype"), [
    *(("delta-tiled", dtype) for dtype in STATE_TYPES), ("delta-by-column", "bf16"), ("scaled-wide", "q8"),
    ("fixed", "f32"), ("scan", "f32")])
@pytest.mark.merge
def test_bits_do_not_depend_on_the_cut(name, dtype):
    case = BY_NAME[name]
    one, two = (opened(case, CpuProgram, threads=n, state_type=dtype) for n in (1, 2))
    whole = run(one, (TOKENS, 0, 1))
    for size in (1, 7, 64):
        found = [run(two, (TOKENS[at:at + size], at, 0), (BESIDE[at % 16:], at % 16, 2))
                 for at in range(0, len(TOKENS), size)]
        np.testing.assert_array_equal(np.concatenate(found), whole)
    found = np.concatenate([run(two, (TOKENS[:37], 0, 1)), run(two, (TOKENS[37:], 37, 1), (BESIDE, 0, 2))])
    np.testing.assert_array_equal(found, whole)
    exact, rounded = (run(opened(case, Reference, state_type=kind), (TOKENS, 0, 1)) for kind in ("f32", dtype))
    for truth in (exact, rounded):
        assert np.abs(whole - truth).max() < NEAR[dtype] * exact.std()
    if dtype != "f32":  # the types do differ
        assert np.abs(whole - exact).max() > 1e-5 * exact.std()
        assert two.window_bytes[STATE] < opened(case, CpuProgram, threads=1).window_bytes[STATE]


@pytest.mark.parametrize(("key_heads", "tiled", "delta"), [(1, False, False), (2, True, True)])
def test_heads_share_the_keys_of_their_tail(key_heads, tiled, delta):
    """Threads at different blocks of a sequence, reused slots, and a first block that is whole in the batch or not."""
    heads, rng = 6, np.random.default_rng(3)
    b = CaseBuilder("shared")
    q, k, v, steps, beta = b.inputs(key_heads * 16, key_heads * 16, heads * 24, heads, heads, spread=0.1)
    b.step("softplus", (steps,), (steps,), least=0.01, most=3.0)
    b.step("act", (beta,), (beta,), kind="sigmoid")
    inputs, y = (q, k, v, steps, beta) if delta else (q, k, v, steps), b.buffer(heads * 24)
    b.step("linear_attention", inputs, (y,), {"rate": b.weight("rate", -np.exp(b.normal(heads)))},
           state=b.state(heads, 16, 24), heads=heads, key_heads=key_heads, tiled=tiled, scaled=not delta)
    case = b.case(y)
    whole = run(opened(case, CpuProgram, threads=1), (TOKENS, 0, 1))
    exact = run(opened(case, Reference), (TOKENS, 0, 1))
    assert np.abs(whole - exact).max() < 1e-5 * exact.std()
    shared = opened(case, CpuProgram, threads=3)
    assert shared.window_bytes[STATE] < 3 * heads * 4 * (16 * 32 + 16 * 32 + 16 * 16 + 4 * 16)  # one tail per head
    (states,) = shared._states.values()
    states.load(np.arange(3), np.frombuffer(np.ones(3 * states.block_bytes // 4, np.float32), np.uint8).reshape(3, -1))
    for turn in range(12):
        found, at = [], 0
        while at < len(TOKENS):
            size = int(rng.choice((1, 3, 16, 40))) if at or turn % 2 else (5, 16)[turn // 2 % 2]
            beside = (BESIDE[at % 16:], at % 16, 2)
            found.append(run(shared, (TOKENS[at:at + size], at, turn % 2), *([beside] if turn % 3 else [])))
            at += size
        np.testing.assert_array_equal(np.concatenate(found), whole)


@pytest.mark.slow  # run by .ci/cuda
@pytest.mark.parametrize(("name", "dtype"), [
    ("delta", "f32"), ("delta-tiled", "f16"), ("delta-by-column", "bf16"), ("delta-by-column", "q8"),
    ("scaled-wide", "q8"), ("fixed", "bf16"), ("scan-wide", "f32")])
def test_a_gpu_keeps_the_types_too(name, dtype):
    case, tokens = BY_NAME[name], TOKENS[:40]
    one, two = (opened(case, CudaProgram, gpu="simulator", state_type=dtype) for _ in range(2))
    whole = run(one, (tokens, 0, 1))
    found = [run(two, (tokens[at:at + size], at, 0), (BESIDE[at % 16:][:3], at % 16, 2))
             for at, size in ((0, 1), (1, 6), (7, 20), (27, 5), (32, 1), (33, 7))]
    np.testing.assert_array_equal(np.concatenate(found), whole)
    exact, rounded = (run(opened(case, Reference, state_type=kind), (tokens, 0, 1)) for kind in ("f32", dtype))
    for truth in (exact, rounded):
        assert np.abs(whole - truth).max() < NEAR[dtype] * exact.std()
    if dtype != "f32":  # the types do differ
        assert np.abs(whole - exact).max() > 1e-5 * exact.std()
        assert one.window_bytes[STATE] < opened(case, CudaProgram, gpu="simulator").window_bytes[STATE]


@pytest.mark.parametrize("own", [{}, pytest.param({"gpu": "simulator"}, marks=pytest.mark.slow)], ids=["cpu", "cuda"])
def test_keys_that_are_nearly_equal(own):
    """The hard case of the triangular system: almost no decay, and new rows negate old ones."""
    b, rng = CaseBuilder("alike"), np.random.default_rng(1)
    views = b.inputs(16, 16, 24, 1, 1)
    (table,) = b.arrays.values()
    keys = 1 + 0.01 * rng.standard_normal((len(table), 16))
    for view, values in zip((views[1], *views[3:]), (keys / np.linalg.norm(keys, axis=1, keepdims=True), 1e-3, 1.9)):
        table[:, view.start:view.start + view.width] = values
    y = b.buffer(24)
    b.step("linear_attention", tuple(views), (y,), {"rate": b.weight("rate", np.full(1, -1, np.float32))},
           state=b.state(1, 16, 24), heads=1, key_heads=1)
    programs = ((CudaProgram if own else CpuProgram, own), (Reference, {}))
    found, exact = (run(opened(b.case(y), program, **options), (TOKENS, 0, 1)) for program, options in programs)
    assert np.abs(found - exact).max() < 5e-5 * exact.std()


def test_states_that_cannot_be_stored_so():
    for program_class in (CpuProgram, Reference, CudaProgram):
        own = {"gpu": "simulator"} if program_class is CudaProgram else {}
        with pytest.raises(RequestError, match="state_type should be one of auto, f32, f16, bf16, q8, is 'q4'"):
            opened(BY_NAME["delta"], program_class, state_type="q4", **own)
        with pytest.raises(RequestError, match="state_type='f16' is for states of heads that are matrices; .* has"):
            opened(BY_NAME["scan"], program_class, state_type="f16", **own)
