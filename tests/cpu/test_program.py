"""The CPU program with a tiny decoder: bits, caches, growth, refusals, binding and compilation."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cpu.attention import attention as attention_op
from numflow.cpu.attention.attention import bias_by_distance
from numflow.cpu.measure.clock import Stamps
from numflow.cpu.program import Program
from numflow.cpu.runtime.kernel import on_compile
from numflow.cpu.sample.sample import pick_tokens
from numflow.errors import RequestError
from numflow.learn.cases.build import VOCABULARY, error
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.network.passes.grouping import done_by
from numflow.ops import Batch
from numflow.reference.program import Program as Reference

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 48, 6, 2, 20


def decoder(window=0):
    """Norm, attention with rotary position embeddings, and a head."""
    b = Builder("decoder")
    x, z = b.buffer(WIDTH), b.buffer(WIDTH)
    q, k, v = (b.buffer(n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    mixed, angles = b.buffer(HEADS * HEAD_DIM), b.buffer(HEAD_DIM)
    b.step("embed", (), (x,), {"table": b.weight("table", b.normal(VOCABULARY, WIDTH))})
    inv_freq = (1000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
    b.step("rope_angles", (), (angles,), {"inv_freq": b.weight("inv_freq", inv_freq)})
    b.step("rms_norm", (x,), (z,), {"weight": b.weight("norm", 1 + b.normal(WIDTH))}, eps=1e-5)
    for y in (q, k, v):
        b.step("linear", (z,), (y,), {"weight": b.weight("weight", b.normal(y.width, WIDTH) / 4)})
    for y, heads in ((q, HEADS), (k, KV_HEADS)):
        b.step("rope", (y, angles), (y,), heads=heads, head_dim=HEAD_DIM)
    cache = b.cache(kv_heads=KV_HEADS, k_dim=HEAD_DIM)
    b.step("cache_write", (k, v), (), cache=cache)
    b.step("attention", (q,), (mixed,), cache=cache, heads=HEADS, scale=HEAD_DIM**-0.5, window=window)
    b.step("linear", (mixed,), (z,), {"weight": b.weight("weight", b.normal(WIDTH, mixed.width) / 4)})
    b.step("add", (x, z), (x,))
    last, logits = b.buffer(WIDTH, "logits"), b.buffer(VOCABULARY, "logits")
    b.step("select_rows", (x,), (last,))
    b.step("linear", (last,), (logits,), {"weight": b.weight("weight", b.normal(VOCABULARY, WIDTH) / 4)})
    case = b.case(logits)
    return replace(case.network, outputs={"hidden": last, "logits": logits}), case.weights


def program(window=0, **options):
    made = Program(*decoder(window), **options)
    made.reserve(60)
    return made


def batch(*parts, rows=None, seed=0, first_block=0):
    """One sequence per part (first position, tokens); sequence b has every third block from b on."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCABULARY, (len(parts), 4096), dtype=np.int32)
    total = sum(n for _, n in parts)
    return Batch(
        tokens=np.concatenate([text[b, p:p + n] for b, (p, n) in enumerate(parts)]),
        positions=np.concatenate([np.arange(p, p + n) for p, n in parts]).astype(np.int32),
        starts=np.cumsum([0] + [n for _, n in parts]).astype(np.int32),
        blocks=(np.arange(20) * 3 + np.arange(len(parts))[:, None] + first_block).astype(np.int32)[:, ::-1].copy(),
        logit_rows=np.arange(total, dtype=np.int32) if rows is None else np.array(rows, np.int32))


@pytest.mark.parametrize("threads", [1, 2])
def test_picked_tokens_are_the_first_of_the_largest(threads):
    made = program(threads=threads)
    made.run(batch((0, 5)))
    logits = made._ctx.buffers.columns(made.network.outputs["logits"], 5)
    logits[:] = np.random.default_rng(1).normal(0, 1, logits.shape)
    logits[1, [3, VOCABULARY - 1]] = logits[1].max() + 1
    logits[2, VOCABULARY - 1], logits[3, 5], logits[4] = np.nan, np.inf, -np.inf
    logits[0, :7] = -np.inf
    found = np.zeros(5, np.int32)
    call = pick_tokens(made._ctx, made.network.outputs["logits"], found, False)
    for thread in range(threads):
        call(thread, threads)
    assert found.tolist() == [int(logits[0].argmax()), 3, -1, -1, -1]


def in_pieces(made, total, sizes):
    """Logits of one sequence of `total` tokens, run in pieces of these sizes, repeated."""
    results, at, i = [], 0, 0
    while at < total:
        size = min(sizes[i % len(sizes)], total - at)
        results.append(made.run(batch((at, size))))
        at, i = at + size, i + 1
    return np.concatenate(results)


@pytest.mark.parametrize("kv", ["f32", "f16", "q4"])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.thin(6)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(kv, window):
    """1100 tokens are nine spans of the attention; with pieces of one token, several threads share the spans."""
    whole = in_pieces(program(window, kv_k=kv, kv_v=kv, threads=1), 1100, [1100])
    for threads, sizes in ((1, [512]), (2, [64, 1, 13]), (3, [1, 300])):
        np.testing.assert_array_equal(in_pieces(program(window, kv_k=kv, kv_v=kv, threads=threads), 1100, sizes), whole)


def test_few_tiles_are_taken_apart(monkeypatch):
    """The same bits with and without memory for partial results, at a long context."""
    expected = in_pieces(program(threads=3), 1200, [1190, 1])
    monkeypatch.setattr(attention_op, "MAX_SLOTS", 1)
    np.testing.assert_array_equal(in_pieces(program(threads=3), 1200, [1190, 1]), expected)


def test_long_contexts_against_the_reference():
    expected = Reference(*decoder(), block_size=64)
    expected.reserve(60)
    wanted = in_pieces(expected, 1150, [1150])
    assert error(in_pieces(program(threads=2), 1150, [500, 7]), wanted) < 1e-5
    assert error(in_pieces(program(threads=2, kv_k="f16", kv_v="f16"), 1150, [500]), wanted) < 1e-2


def test_bits_do_not_depend_on_the_neighbours():
    alone = program(threads=2)
    expected = [alone.run(batch((0, 90)))[-1]]
    expected.append(alone.run(batch((90, 1)))[-1])
    together = program(threads=2)
    first = together.run(batch((0, 90), (0, 17), (0, 200)))
    np.testing.assert_array_equal(first[89], expected[0])
    np.testing.assert_array_equal(together.run(batch((90, 1), (17, 1), (200, 1)))[0], expected[1])


@pytest.mark.parametrize(("kv", "activations"), [
    ("f32", "int8"), ("q3h", "f32"), pytest.param("q3h", "int8", marks=pytest.mark.merge)])
def test_what_is_left_in_a_block_does_no_harm(kv, activations):
    """Blocks are reused: the content of an earlier sequence may be anything, such as NaN."""
    options = {"threads": 1, "kv_k": kv, "kv_v": kv, "activations": activations}
    expected = in_pieces(program(**options), 70, [70, 1])
    dirty = program(**options)
    for cache in dirty._caches.values():
        for array in cache._arrays:
            array[:] = 255
    np.testing.assert_array_equal(in_pieces(dirty, 70, [70, 1]), expected)


def test_reserve_keeps_what_is_cached():
    expected = in_pieces(program(), 130, [100, 30])
    made = program()
    first = made.run(batch((0, 100)))
    before = made.kv_bytes
    made.reserve(100)
    assert made.kv_bytes == before * 100 // 60
    made.reserve(60)
    np.testing.assert_array_equal(np.concatenate([first, made.run(batch((100, 30)))]), expected)


def test_an_empty_memory_gives_zeros():
    """Cross-attention to an encoder memory without tokens: nothing is read, and no output is NaN."""
    b = Builder("empty")
    cache = b.cache(kv_heads=2, k_dim=16, kind="cross")
    (q,) = b.inputs(64)
    y = b.buffer(64)
    b.step("attention", (q,), (y,), cache=cache, heads=4, scale=0.25, causal=False)
    case = b.case(y)
    made = Program(case.network, case.weights, threads=2)
    made.reserve(0, 1)
    x = replace(batch((0, 3)), cross_blocks=np.zeros((1, 1), np.int32), cross_lengths=np.array([0]))
    np.testing.assert_array_equal(made.run(x), np.zeros((3, 64)))
    with pytest.raises(RequestError, match="cross_lengths of the batch should give 1 numbers"):
        made.run(replace(x, cross_lengths=None))
    with pytest.raises(RequestError, match="70 tokens need 2 encoder blocks, the table has 1"):
        made.run(replace(x, cross_lengths=np.array([70])))


def test_buffers_grow_with_the_batch():
    small = program(rows=4)
    np.testing.assert_array_equal(in_pieces(small, 150, [3, 50, 97]), in_pieces(program(), 150, [150]))


def test_results_belong_to_the_caller():
    made = program()
    first = made.run(batch((0, 5)))
    kept = first.copy()
    made.run(batch((0, 5), seed=1))
    np.testing.assert_array_equal(first, kept)


def test_outputs():
    made = program(threads=1)
    x = batch((0, 9), rows=(2, 8))
    assert made.run(x, output="hidden").shape == (2, WIDTH)
    assert made.run(x).shape == (2, VOCABULARY)
    assert made.run(x, output=None) is None
    with pytest.raises(RequestError, match="no 'logit'; did you mean 'logits'"):
        made.run(x, output="logit")
    with pytest.raises(RequestError, match="no entry 'mian'; did you mean 'main'"):
        made.run(x, entry="mian")


@pytest.mark.parametrize(("change", "message"), [
    ({"tokens": np.array([1, VOCABULARY, 3])}, r"token id 97 is out of range: it should be in 0 \.\. 96"),
    ({"tokens": np.array([1, -1, 3])}, "token id -1"),
    ({"positions": np.array([0, 1, 3])}, "rise by one"),
    ({"positions": np.array([-1, 0, 1])}, "position -1 is out of range"),
    ({"positions": np.array([0, 1])}, "3 tokens has 2 positions"),
    ({"positions": np.array([1279, 1280, 1281])}, "1282 tokens need 21 KV blocks, the table has 20"),
    ({"starts": np.array([0, 2])}, "starts of a batch should rise from 0 to 3"),
    ({"starts": np.array([0, 4, 3])}, "starts of a batch"),
    ({"logit_rows": np.array([3])}, "logit row 3"),
    ({"blocks": np.array([[60]])}, r"KV block 60 is out of range: it should be in 0 \.\. 59"),
    ({"blocks": np.array([[-1]])}, "KV block -1"),
    ({"blocks": np.array([[1], [2]])}, "should have 1 rows"),
    ({"types": np.array([0])}, "1 types"),
    ({"tokens": np.array([], np.int32)}, "without tokens")])
def test_batches_that_would_read_outside_memory_are_refused(change, message):
    made = program(threads=1)
    with pytest.raises(RequestError, match=message):
        made.run(replace(batch((0, 3)), **change))
    assert np.isfinite(made.run(batch((0, 3)))).all()


@pytest.mark.parametrize(("options", "message"), [
    ({"activations": "int4"}, "activations should be one of int8, int16, auto, bf16, f32"),
    ({"kv_k": "f8"}, "kv_k should be one of auto, f32, f16, bf16, q8"),
    ({"kv_v": "Q4"}, "kv_v should be one of auto, f32, f16, bf16, q8"),
    ({"block_size": 48}, "multiple of 64")])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        Program(*decoder(), **options)


@pytest.mark.parametrize(("quantised", "options", "kinds"), [
    (False, {}, ("f32", "f32")), (True, {}, ("bf16", "bf16")), (True, {"activations": "int16"}, ("f16", "f16")),
    (True, {"activations": "f32"}, ("f32", "f32")),
    pytest.param(True, {"kv_v": "q3h"}, ("bf16", "q3h"), marks=pytest.mark.merge)])
def test_kv_type_follows_the_weights(quantised, options, kinds):
    network, weights = decoder()
    if quantised:
        network = replace(network, weights={n: replace(w, types=("Q8_0",)) for n, w in network.weights.items()})
    assert [cache.kinds for cache in Program(network, weights, **options)._caches.values()] == [kinds]


def test_trace_names_every_step_and_its_kernel():
    made = program()
    rows = made.trace(batch((0, 3)))
    assert [row.op for row in rows] == [step.op for step in made.network.entries["main"]]
    assert rows[3].shapes == f"[3, {WIDTH}] -> [3, {HEADS * HEAD_DIM}]"
    assert all(row.kernel.startswith("numflow/cpu/") and row.microseconds > 0 for row in rows)
    np.testing.assert_array_equal(made.run(batch((3, 1))), program().run(batch((0, 4)))[3:])


def test_trace_says_which_step_does_another_and_waits_for_sleeping_threads_first():
    made = program()
    rows, within = made.trace(batch((0, 3))), done_by(made.groups())
    assert within and {row.index: row.within for row in rows if row.within is not None} == within
    first, second = Stamps(made._bound["main"].table, made._bound["main"].ends).table[:2]
    assert (first[0], first[1], first[2], second[2]) == (second[0], second[1], 1, 0)  # a barrier, then a time stamp


def test_an_operand_is_made_once_for_all_its_matrices():
    made = program()
    names = [call.kernel.name for call in made._bound["main"].calls]
    assert names.count("rms_norm_to_f32") == 1  # for q, k and v together
    assert names.count("to_f32") == 2  # for the output, and for the head
    assert sum("linear" in name for name in names) == 5


def test_barriers_stand_only_where_a_step_needs_another():
    bound = program(fused=False)._bound["main"]
    barrier = {}
    for (step, _), end in zip(bound.steps, bound.ends, strict=True):
        barrier[step.label] = bool(bound.table[end - 1, 2])
    # embed angles | norm | operand | q | k v rope(q) | rope(k) | write | attention | linear | add | select | head
    free = [label for label, follows in barrier.items() if not follows]
    assert free == ["main.0", "main.4", "main.5", "main.13"]
    # embed angles | norm's operand | q | k v rope(q) | rope(k) | write | attention | operand | linear, add | ...
    assert program()._bound["main"].table[:, 2].sum() == bound.table[:, 2].sum() - 2


def test_kernels_are_compiled_once():
    made, seen = program(threads=2), []
    on_compile.append(lambda name, seconds, loaded: seen.append(name))
    try:
        for threads, kv in ((1, "f32"), (2, "f16"), (3, "f32")):
            program(window=5, threads=threads, kv_k=kv, kv_v=kv)
        first = list(seen)
        program(window=9, kv_k="f16", kv_v="f16")
    finally:
        on_compile.pop()
    assert len(first) == len(set(first))
    assert first == seen
    assert len(made.kernels) == 9


def test_progress_counts_weights_and_kernels():
    seen = []
    program(progress=lambda *args: seen.append(args))
    weights = len(decoder()[0].weights)
    assert [args for args in seen if args[0] == "weights"] == [("weights", i + 1, weights) for i in range(weights)]
    kernels = [args for args in seen if args[0] == "kernels"]
    assert kernels[-1] == ("kernels", 10, 10) and kernels == sorted(kernels)


def test_bias_by_distance_ends_in_constants():
    bias = bias_by_distance(np.arange(16, dtype=np.float32).reshape(8, 2), 16, causal=True)
    assert bias.shape == (2, 65)
    assert bias[0, :17].tolist() == [14.0] * 17  # the last bucket from distance -32 to -16
    assert bias[1, 32:].tolist() == [1.0] * 33   # bucket 0 for the key itself, and for all after


def test_a_closed_program_drops_its_memory():
    made = program()
    made.close()
    with pytest.raises(RequestError, match="closed"):
        made.run(batch((0, 3)))
