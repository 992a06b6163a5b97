"""Calibration on text that the model generates: computed once, cached, useful, skipped without effect."""

import os

import numpy as np
import pytest

import numflow
from numflow import formats, network
from numflow.engine.calibration import own_text
from numflow.engine.load import model_of
from numflow.errors import FormatError
from numflow.network.quantise import kept as kept_tensors
from numflow.registry.progress import Silent
from tests.engine.published import write_case
from tests.quant.small import write_model

IDS = np.random.default_rng(1).integers(0, 256, 64).tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source"))


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where quantised tensors and calibrations are kept."""
    monkeypatch.setenv("NUMFLOW_PREPARED", "1")
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tensors, "SMALLEST", 1)
    monkeypatch.setattr(own_text, "LENGTH", 32)
    return tmp_path / "cache" / "quantised"


@pytest.fixture
def runs(monkeypatch):
    """How often a model has written a text to be calibrated on."""
    calls, written = [], own_text.generated_texts
    monkeypatch.setattr(own_text, "generated_texts", lambda *arguments: calls.append(1) or written(*arguments))
    return calls


def logits(path, **options):
    with numflow.load(path, backend="reference", **options) as model:
        return model.logits(IDS)


@pytest.mark.merge
def test_it_is_made_once_for_all_schemes_of_few_bits(source, folder, runs, capfd):
    plain = logits(source, weights="q4", calibration=False)
    capfd.readouterr()
    first = logits(source, weights="q4")
    told = capfd.readouterr().err
    assert "texts to calibrate on" in told and told.index("calibrating on them") < told.index("quantising to q4, kept")
    assert len(runs) == 1 and not np.array_equal(plain, first)
    np.testing.assert_array_equal(logits(source, weights="q4"), first)  # from what is kept, no calibration being read
    logits(source, weights="q3")
    assert len(runs) == 1
    exact = logits(source)
    assert np.square(first - exact).sum() < np.square(plain - exact).sum()
    for name in os.listdir(folder):
        os.remove(folder / name)
    np.testing.assert_array_equal(logits(source, weights="q4"), first)  # made anew, to the same bits
    assert len(runs) == 2


@pytest.mark.parametrize("options", [{"weights": "q8"}, {"weights": "Q4_0"}, {"weights": "q3", "calibration": False}])
def test_what_it_has_no_effect_on_does_not_pay_for_it(source, folder, runs, options):
    logits(source, **options)
    assert not runs


def test_an_encoder_stays_plain_and_says_so(tmp_path, folder, runs, capfd):
    bert = write_case("bert", tmp_path)
    with numflow.load(bert, backend="reference", weights="q4") as model:
        found = model.hidden([1, 2, 3])
    told = capfd.readouterr().err
    with numflow.load(bert, backend="reference", weights="q4", calibration=False) as model:
        np.testing.assert_array_equal(model.hidden([1, 2, 3]), found)
    assert not runs and "quantised without calibration: it writes no text" in told


def test_a_model_that_computes_nan_is_left_to_the_quantiser(tmp_path, folder, capfd):
    name = "model.layers.1.mlp.up_proj.weight"
    bad = write_model(tmp_path / "bad", change=lambda tensors: tensors[name].__setitem__((3, 5), np.nan))
    with pytest.raises(FormatError, match="row 3, column 5 is nan"):
        logits(bad, weights="q4")
    assert "without calibration: running it fails" in capfd.readouterr().err


def test_texts_are_of_several_kinds_and_fit(source, monkeypatch):
    checkpoint = formats.open_checkpoint(source)
    spec = network.choose_spec(checkpoint)
    monkeypatch.setattr(own_text, "LENGTH", 24)
    with model_of(checkpoint, spec, "reference") as model:
        texts = own_text.generated_texts(model, 240, Silent())
        opening = model.tokenizer.encode(own_text.OPENINGS[0], parse_special=False)[:23]
    assert len(texts) == 10 and all(1 < len(ids) <= 24 for ids in texts)
    assert opening in [ids[:len(opening)] for ids in texts] and len({tuple(ids) for ids in texts}) == 10


def test_little_memory(source, monkeypatch):
    checkpoint = formats.open_checkpoint(source)
    built = network.build(network.choose_spec(checkpoint), checkpoint, fuse=False)
    assert own_text.obstacle(built) == ""
    monkeypatch.setattr(own_text, "free_memory", lambda: 100_000)
    assert "no memory" in own_text.obstacle(built)
    monkeypatch.setattr(own_text, "free_memory", lambda: 280_000)  # its matrices one by one, and no second moments
    monkeypatch.setattr(own_text, "FOR_COLUMN", 4)
    found = own_text.own_calibration(model_of, checkpoint, network.choose_spec(checkpoint), "reference", keep=False)
    assert found.importances and not found.moments and "temperatures 0.7, 1, 1.3" in found.facts["text"]


def test_second_moments_need_tokens(source, monkeypatch):
    """Of inputs of 64 columns there are enough, of those of 96 not."""
    monkeypatch.setattr(own_text, "LENGTH", 32)
    monkeypatch.setattr(own_text, "MOST", 64 * own_text.FOR_MOMENTS)
    checkpoint = formats.open_checkpoint(source)
    found = own_text.own_calibration(model_of, checkpoint, network.choose_spec(checkpoint), "reference", keep=False)
    down = "model.layers.0.mlp.down_proj.weight"
    assert {moment.shape for moment in found.moments.values()} == {(64, 64)}
    assert found.moment(down) is None and found.importance(down).shape == (96,)


def test_large_models_read_less():
    def tokens(width, rows):
        return own_text.tokens_for(network_of(width, rows))
    assert tokens(64, 64) == 1024 and tokens(2048, 1 << 14) == own_text.MOST
    assert own_text.LEAST <= tokens(8192, 1 << 20) < own_text.MOST and tokens(16384, 1 << 23) == own_text.LEAST


def network_of(width, rows):
    """One matrix."""
    from numflow.ops import Buffer, Network, Part, Step, View, Weight

    step = Step("linear", (View("x", 0, width),), (View("y", 0, rows),), {"weight": "w"})
    buffers = {name: Buffer(name, "tokens", size) for name, size in (("x", width), ("y", rows))}
    return Network("n", {"main": (step,)}, buffers, {"w": Weight("w", (rows, width), (Part("w"),))}, {}, {}, {})
