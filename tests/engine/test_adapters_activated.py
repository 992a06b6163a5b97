"""Adapters with invocation tokens (aLoRA): results of PEFT, the base's bits before the invocation, shared KV blocks."""

import json
from pathlib import Path

import numpy as np
import pytest

import numflow
from numflow.errors import FormatError, RequestError
from tests.engine.make_activated import INVOCATION, STEP, TEXTS, write_activated
from tests.engine.published import write_case
from tests.formats.peft import PREFIX, pair, write_adapter
from tests.specs.case import load_case

EXPECTED = json.loads((Path(__file__).parent / "expected" / "activated.json").read_text(encoding="utf-8"))
STARTS = [2, 6, None, 0, 3]  # of TEXTS
Q = "model.layers.0.self_attn.q_proj"
BEFORE = [20 + i * i % 97 for i in range(150)]  # the first two blocks of 64 tokens and a part of the third
ANSWER = {"max_tokens": 9, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Two with invocation tokens, and one that has an effect on all tokens."""
    place = tmp_path_factory.mktemp("adapters")
    return {"one": write_activated(place / "one"), "two": write_activated(place / "two", 5),
            "all": write_activated(place / "all", alora_invocation_tokens=None)}


@pytest.fixture(scope="module")
def model(base, adapters):
    with numflow.load(base, activations="f32", threads=1, adapters=adapters) as model:
        yield model


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_results_are_those_of_peft(base, adapters, backend):
    with numflow.load(base, backend, activations="f32", adapters=adapters) as model:
        for ids, expected in zip(TEXTS, EXPECTED, strict=True):
            wanted = np.array(expected["logits"])
            found = model.logits(ids, adapter="one")[:, ::STEP]
            assert np.abs(found - wanted).max() < 1e-4 * wanted.std()
            generated = model.generate(ids, max_tokens=12, ignore_eos=True, adapter="one", prompt_logprobs=0)
            assert generated.ids == expected["greedy"]
            rows = model.logits(ids, adapter="one")
            chosen = rows[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(rows[:-1]).sum(1))
            assert [token.logprob for token in generated.prompt_logprobs[1:]] == pytest.approx(chosen, abs=1e-4)


def test_rows_before_the_invocation_have_the_bits_of_the_base_in_any_batch(base, adapters, model):
    alone = {name: [model.logits(ids, adapter=name) for ids in TEXTS] for name in ("one", "two", "all", None)}
    for bare, found, start in zip(alone[None], alone["one"], STARTS, strict=True):
        same = len(bare) if start is None else start
        assert np.array_equal(found[:same], bare[:same])
        assert not (found[same:] == bare[same:]).all(axis=1).any()
    names = ["two", "one", None, "all", "one"]
    for order in (names, names[::-1]):
        found = model.logits_batch(TEXTS, adapters=order)
        for index, (name, rows) in enumerate(zip(order, found, strict=True)):
            assert np.array_equal(rows, alone[name][index])
    for chunk in (1, 3):  # single tokens continue the last batch, in which the adapter has no effect yet
        with numflow.load(base, activations="f32", threads=2, chunk=chunk, adapters=adapters) as parts:
            for index, (ids, start) in enumerate(zip(TEXTS, STARTS, strict=True)):
                number = -1 if start is None else parts.adapters["one"].number
                with parts.runner.open(len(ids), adapter=number, adapter_start=start or 0) as sequence:
                    rows = np.concatenate([some for _, some in sequence.rows(np.array(ids, np.int32))])
                assert np.array_equal(rows, alone["one"][index])


@pytest.mark.parametrize("devices", ["0;1", "0&1"])
@pytest.mark.merge
def test_several_devices(base, adapters, model, devices):
    texts = [*TEXTS, BEFORE + INVOCATION + BEFORE]
    with numflow.load(base, activations="f32", devices=devices, adapters=adapters) as several:
        for ids, rows in zip(texts, several.logits_batch(texts, adapters=["one"] * 6), strict=True):
            expected = model.logits(ids, adapter="one")
            assert np.abs(rows - expected).max() < 1e-4 * expected.std()


def results(engine, wanted):
    """The results of (ids, adapter), one after the other."""
    return [engine.submit(ids, adapter=name, **ANSWER).result(60) for ids, name in wanted]


def test_texts_share_only_the_blocks_before_the_invocation(model):
    text = [*BEFORE, *INVOCATION, *BEFORE[:50]]
    twice = [*BEFORE, *INVOCATION, *INVOCATION, *BEFORE[:50]]
    wanted = [(BEFORE, None), (text, "one"), (text, None), (text, "two"), (text, "one"), (twice, "one"), (text, "all"),
              ([*text, 7, 70, 71], "one"), ([*text, *INVOCATION, 70], "one"), (INVOCATION * 9, "one")]
    cached = [0, 128, 128, 128, 192, 128, 0, 192, 192, 0]  # 192 without an adapter for the last but one
    alone = [model.generate(ids, adapter=name, **ANSWER) for ids, name in wanted]
    assert len({str(each.ids) for each in alone[1:5]}) == 3
    with numflow.Engine(model) as engine:
        found = results(engine, wanted)
        assert [each.stats["cached_tokens"] for each in found] == cached
        again = results(engine, wanted[::-1])[::-1]
    for one, two, expected in zip(found, again, alone, strict=True):
        assert (one.ids, one.logprobs) == (two.ids, two.logprobs) == (expected.ids, expected.logprobs)
    with numflow.Engine(model, max_batch=20, kv_memory=12 * model.program.block_bytes) as engine:
        for order in (wanted, wanted[::-1]):
            handles = [engine.submit(ids, adapter=name, **ANSWER) for ids, name in order]
            for handle, pair_of in zip(handles, order, strict=True):
                result, expected = handle.result(120), alone[wanted.index(pair_of)]
                assert (result.ids, result.logprobs) == (expected.ids, expected.logprobs)


def test_sessions_hold_texts_of_the_base_alone(base, adapters, tmp_path):
    text = [*BEFORE, *INVOCATION, *BEFORE]
    with numflow.load(base, activations="f32", adapters=adapters) as model, numflow.Engine(model) as engine:
        results(engine, [(text, "one")])
        with pytest.raises(RequestError, match="text of an adapter"):
            engine.save_session(tmp_path / "one.session")
        assert engine._sessions.save_cache(tmp_path / "cache", 1 << 30) == 128
        assert engine.stats["kv_blocks_cached"] == 4
    with numflow.load(base, activations="f32", adapters=adapters) as model, numflow.Engine(model) as engine:
        assert engine._sessions.load_cache(tmp_path / "cache") == 128
        assert [each.stats["cached_tokens"] for each in results(engine, [(text, "one"), (text, None)])] == [128, 128]


def test_what_is_refused(base, adapters, model, tmp_path):
    with pytest.raises(FormatError, match="cannot be merged"):
        numflow.load(base, "reference", adapters=adapters, merge="one")
    with pytest.raises(RequestError, match="context_shift does not go with"):
        model.generate(TEXTS[0], adapter="one", context_shift=True)
    activated = {"alora_invocation_tokens": INVOCATION}
    table = pair("model.embed_tokens", (32, 264), kind="lora_embedding_{}")
    saved = {f"{PREFIX}lm_head.weight": np.zeros((264, 32), np.float32)}
    for tensors in (table, pair(Q, (32, 32)) | saved):
        with pytest.raises(FormatError, match="alora_invocation_tokens is set.*tokens before"):
            model.adapters.load("three", write_adapter(tmp_path, tensors, **activated))
    for tokens in ([], [7, -1], "ab", [1.0]):
        with pytest.raises(FormatError, match="alora_invocation_tokens: expected token ids"):
            model.adapters.load("three", write_adapter(tmp_path, pair(Q, (32, 32)), alora_invocation_tokens=tokens))
    case = load_case("bert")
    name, shape = next((name.removesuffix(".weight"), shape) for name, shape in case.tensors.items()
                       if name.endswith("query.weight"))
    adapter = write_adapter(tmp_path / "bert", pair(name, shape), **activated)
    with pytest.raises(RequestError, match="for decoders only"):
        numflow.load(write_case("bert", tmp_path), adapters={"one": adapter})
