"""`embed`, `fill-mask` and `translate` with tiny models, from the command line to the kernels and back."""

import json

import numpy as np
import pytest

from numflow.engine.load import load
from tests.engine.published import write_case
from tests.engine.translators import write_translator

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "large", "."]


@pytest.fixture
def encoder(tmp_path):
    folder = write_case("bert", tmp_path)
    (folder / "vocab.txt").write_text("\n".join([*WORDS, *(f"word{i}" for i in range(203 - len(WORDS)))]) + "\n")
    return folder


def test_embed_by_a_model_that_was_not_made_for_it(run, tmp_path):
    done = run("embed", "-m", write_case("gpt2", tmp_path), "--device", "reference", "Paris is large.")
    assert (done.code, done.out) == (1, "")
    assert "gpt2 does not say how embeddings are pooled" in done.err and done.err.count("\n") == 1


def test_embed(run, encoder):
    done = run("embed", "-m", encoder, "--device", "reference", "--pooling", "cls", stdin="Paris is large.\nParis\n")
    assert done.code == 0
    found = np.array([[float(value) for value in line.split()] for line in done.out.splitlines()])
    with load(encoder, backend="reference") as model:
        np.testing.assert_allclose(found, model.embed(["Paris is large.", "Paris"], pooling="cls"), rtol=1e-4)


def test_fill_mask(run, encoder):
    done = run("fill-mask", "-m", encoder, "--device", "reference", "Paris is [MASK].", "--top-k", "2", "--json")
    with load(encoder, backend="reference") as model:
        expected = model.fill_mask("Paris is [MASK].", 2)
    assert json.loads(done.out) == [[filling._asdict() for filling in gap] for gap in expected]
    assert "write [MASK]" in run("fill-mask", "-m", encoder, "--device", "reference", "Paris").err


def test_translate(run, tmp_path):
    folder = write_translator(tmp_path, ("__en__", "__fr__"), max_length=9)
    common = ("translate", "-m", folder, "--device", "reference")
    done = run(*common, "--from", "en", "--to", "fr", "w0 w1", "w2")
    with load(folder, backend="reference") as model:
        assert done.out.splitlines() == [g.text for g in model.translate(["w0 w1", "w2"], "en", "fr")]
    beams = json.loads(run(*common, "--from", "en", "--to", "fr", "w0", "-n", "3", "--num-beams", "2", "--json").out)
    assert len(beams[0]["ids"]) <= 3
    done = run(*common, "--from", "en", "--to", "xx", "w0")
    assert (done.code, done.err) == (1, "error: the model has no language 'xx'; known: en, fr\n")
    assert "give source and target: the model has en, fr" in run(*common, "w0").err
