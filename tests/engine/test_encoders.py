"""Encoders and encoder-decoders: a hand-made network, and the published fixtures."""

import json
from dataclasses import replace

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.warmup import warm_up
from numflow.errors import RequestError
from numflow.learn.cases.build import VOCABULARY
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.reference.program import Program
from tests.conftest import shared
from tests.engine.fake import fake_model, used_blocks


def translator(facts=None):
    """The decoder looks at the encoder's rows through one cross attention; context 40."""
    b = Builder("translator")
    cache = b.cache(kv_heads=2, k_dim=8, kind="cross")
    k, v = b.inputs(16, 16, entry="encode")
    b.step("cache_write", (k, v), (), entry="encode", cache=cache)
    memory = b.buffer(16, "logits")
    b.step("select_rows", (v,), (memory,), entry="encode")
    (x,) = b.inputs(32)
    attended, hidden, logits = b.buffer(32), b.buffer(32, "logits"), b.buffer(VOCABULARY, "logits")
    b.step("attention", (x,), (attended,), cache=cache, heads=4, scale=0.5, causal=False)
    b.step("add", (x, attended), (x,))
    b.step("select_rows", (x,), (hidden,))
    b.step("linear", (hidden,), (logits,), {"weight": b.weight("head", b.normal(VOCABULARY, 32))})
    case = b.case(logits)
    network = replace(
        case.network, outputs={"encoder_hidden": memory, "hidden": hidden, "logits": logits},
        facts={"type": "encoder-decoder", "vocabulary": VOCABULARY, "context": 40, "decoder_start_token": 3,
               "forced_bos_token": None, **(facts or {})})
    return Model(network, Program(network, case.weights, block_size=4))


def test_the_decoder_reads_the_encoder():
    model = translator()
    one, other = (model.logits([3, 5], encoder_ids=ids) for ids in ([1, 2, 9], [1, 2, 8]))
    assert one.shape == (2, VOCABULARY)
    assert np.abs(one - other).max() > 0.01
    assert model.hidden([1, 2, 9]).shape == (3, 16)
    assert model.hidden([3, 5], encoder_ids=[1, 2, 9]).shape == (2, 32)
    with pytest.raises(RequestError, match="needs encoder_ids"):
        next(model.iter_logits([3, 5]))
    assert used_blocks(model) == 0


@pytest.mark.parametrize(("facts", "options", "prefix"), [
    ({}, {}, [3]), ({"forced_bos_token": 7}, {}, [3, 7]), ({}, {"decoder_ids": [4, 5, 6]}, [4, 5, 6])])
def test_generation_starts_from_the_decoders_own_tokens(facts, options, prefix):
    model, source, new = translator(facts), list(range(20, 33)), []
    for _ in range(6):
        new.append(int(model.logits([*prefix, *new], encoder_ids=source)[-1].argmax()))
    assert model.generate(source, max_tokens=6, **options).ids == new
    assert used_blocks(model) == 0


def test_a_long_source_beside_a_short_one():
    model = translator()
    short, long = [1, 2], list(range(40))
    alone = translator().generate(short, max_tokens=5).ids
    stream = model.generate(short, max_tokens=5, stream=True)
    ids = [next(stream).id]
    model.generate(long, max_tokens=5)  # grows the memory while the short one waits
    assert ids + [piece.id for piece in stream][:-1] == alone


def test_what_is_missing_is_said():
    model = translator()
    with pytest.raises(RequestError, match="translator needs encoder_ids"):
        model.logits([3])
    with pytest.raises(RequestError, match="encoder_ids has 41 tokens; the model's context is 40"):
        model.logits([3], encoder_ids=[1] * 41)
    with pytest.raises(RequestError, match="has no token types"):
        model.hidden([3], token_type_ids=[0])
    with pytest.raises(RequestError, match="names no decoder start token"):
        translator({"decoder_start_token": None}).generate([1])


def relative(actual, expected):
    return np.abs(actual - expected).max() / expected.std()


def test_published_encoder():
    path = shared("fixtures", "bert_base_multilingual_cased")
    case, expected = json.loads((path / "case.json").read_text()), np.load(path / "expected.npz")
    with load(path, backend="reference") as model:
        for i, prompt in enumerate(case["prompts"]):
            types = case["token_type_ids"][i]
            assert relative(model.logits(prompt, token_type_ids=types), expected[f"logits_{i}"]) < 1e-4
            assert relative(model.hidden(prompt, types), expected[f"hidden_{i}"]) < 1e-4
        with pytest.raises(RequestError, match=r"token_type_ids should be 2 whole numbers 0 \.\. 1"):
            model.logits([1, 2], token_type_ids=[0, 2])


def test_published_encoder_decoder():
    path = shared("fixtures", "m2m100_418m")
    case, expected = json.loads((path / "case.json").read_text()), np.load(path / "expected.npz")
    with load(path, backend="reference", chunk=3) as model:
        for i, source in enumerate(case["encoder_inputs"]):
            prefix = case["greedy_prefix"][i]
            assert relative(model.hidden(source), expected[f"encoder_hidden_{i}"]) < 1e-4
            logits = model.logits(case["decoder_prefixes"][i], encoder_ids=source)
            assert relative(logits, expected[f"logits_{i}"]) < 1e-4
            result = model.generate(source, max_tokens=12, ignore_eos=True, decoder_ids=prefix)
            assert result.ids == case["greedy"][i]
        assert used_blocks(model) == 0


@pytest.mark.parametrize("facts", [{}, {"decoder_start_token": None}])
def test_warming_up_runs_encoder_and_decoder(facts, monkeypatch):
    model, ran = translator(facts), []
    run = Program.run
    monkeypatch.setattr(Program, "run", lambda self, batch, entry="main", output="logits": ran.append(
        (entry, len(batch.tokens))) or run(self, batch, entry, output))
    warm_up(model)
    assert {("encode", 1), ("encode", 38), ("main", 1)} <= set(ran)
    assert used_blocks(model) == 0


@pytest.mark.parametrize(("outputs", "wanted"), [(("hidden",), "hidden"), (("logits", "hidden"), "logits")])
def test_warming_up_an_encoder_reads(outputs, wanted, monkeypatch):
    model, read = fake_model(type="encoder", outputs=outputs), []
    for name in ("hidden", "logits"):
        monkeypatch.setattr(Model, name, lambda self, ids, name=name: read.append((name, len(ids))))
    warm_up(model)
    assert read == [(wanted, 1), (wanted, 62)]
