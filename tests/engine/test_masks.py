"""Fill-mask."""

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.errors import RequestError
from tests.engine.fake import fake_model
from tests.engine.published import write_case

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "the", "capital", "of", "france", ".", "##s"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_case("bert", tmp_path_factory.mktemp("bert"))
    (folder / "vocab.txt").write_text("\n".join([*WORDS, *(f"word{i}" for i in range(203 - len(WORDS)))]) + "\n")
    with load(folder, backend="reference") as ready:
        yield ready


def test_the_most_probable_tokens(model):
    (fillings,) = model.fill_mask("Paris is [MASK].", top_k=203)
    logits = model.logits([2, 5, 6, 4, 11, 3])[3].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert [f.id for f in fillings] == np.argsort(-probabilities).tolist()
    np.testing.assert_allclose([f.probability for f in fillings], np.sort(probabilities)[::-1], rtol=1e-5)
    assert sum(f.probability for f in fillings) == pytest.approx(1)
    by_id = {f.id: f for f in fillings}
    assert (by_id[8].token, by_id[8].text) == ("capital", "paris is capital.")
    assert by_id[12].text == "paris iss."
    best = model.fill_mask("Paris is [MASK].")
    assert best == [fillings[:5]]


def test_every_gap_is_filled_on_its_own(model):
    first, second = model.fill_mask("[MASK] is the capital of [MASK]", top_k=2)
    assert [f.text for f in first] == [f"{f.token} is the capital of [MASK]" for f in first]
    assert [f.text for f in second] == [f"[MASK] is the capital of {f.token}" for f in second]
    logits = model.logits([2, 4, 6, 7, 8, 9, 4, 3])
    assert [first[0].id, second[0].id] == logits[[1, 6]].argmax(1).tolist()


def test_what_cannot_be_filled(model, tmp_path):
    with pytest.raises(RequestError, match=r"the text has no gap; write \[MASK\] where a word is missing"):
        model.fill_mask("Paris is large.")
    for top_k in (0, 204, 1.5, True):
        with pytest.raises(RequestError, match="top_k should be a whole number 1 .. 203"):
            model.fill_mask("[MASK]", top_k=top_k)
    with pytest.raises(RequestError, match="fake is no masked language model"):
        fake_model().fill_mask("[MASK]")
    headless = write_case("minilm", tmp_path)
    (headless / "vocab.txt").write_text("\n".join([*WORDS, *(f"word{i}" for i in range(203 - len(WORDS)))]) + "\n")
    with load(headless, backend="reference") as encoder, pytest.raises(RequestError, match="computes no logits"):
        encoder.fill_mask("[MASK]")
    (tmp_path / "maskless").mkdir()
    maskless = write_case("bert", tmp_path / "maskless")
    (maskless / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", *(f"word{i}" for i in range(201))]) + "\n")
    with load(maskless, backend="reference") as encoder, pytest.raises(RequestError, match="has no mask token"):
        encoder.fill_mask("word1")
