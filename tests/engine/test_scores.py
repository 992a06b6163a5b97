"""Scores of texts: heads of classifiers and rerankers, single texts and pairs, and errors."""

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.errors import FormatError, RequestError, SpecError
from tests.engine.classifiers import classifier
from tests.engine.published import write_case


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_head_of_bert(tmp_path, backend):
    folder, tensors = classifier(tmp_path, 3, id2label={"0": "bad", "1": "good", "2": "odd"})
    with load(folder, backend=backend, activations="f32") as model:
        first = model.hidden([2, 5, 6, 7, 3])[0]
        pooled = np.tanh(tensors["bert.pooler.dense.weight"] @ first + tensors["bert.pooler.dense.bias"])
        expected = tensors["classifier.weight"] @ pooled + tensors["classifier.bias"]
        found = model.scores([2, 5, 6, 7, 3])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert model.score_head.labels == ("bad", "good", "odd")
        np.testing.assert_array_equal(model.scores("Paris is large"), found)
        several = model.scores(["Paris is large", [2, 5, 3]])
        assert several.shape == (2, 3)
        np.testing.assert_allclose(several[0], found, rtol=1e-5)
        shares = model.scores("Paris is large", probabilities=True)
        np.testing.assert_allclose(shares, np.exp(expected) / np.exp(expected).sum(), rtol=1e-4)
        with pytest.raises(RequestError, match="has 3 labels: a reranker has one"):
            model.rerank("paris", ["large"])
        with pytest.raises(RequestError, match="cannot generate text; it is for scores of texts"):
            model.generate([2, 5])


def test_pairs_have_types_and_are_ranked(tmp_path):
    folder, _ = classifier(tmp_path)
    with load(folder, backend="reference") as model:
        ids, types = model.tokenizer.encode_pair("paris", "is large .")
        assert types == [0, 0, 0, 1, 1, 1, 1]
        score = model.scores(("paris", "is large ."))
        np.testing.assert_allclose(score, model.score_head(model.hidden(ids, types)), rtol=1e-5)
        assert np.abs(score - model.score_head(model.hidden(ids))).max() > 1e-4
        documents = ["is large .", "word5 word6", "paris"]
        ranked = model.rerank("paris", documents)
        assert sorted(one.index for one in ranked) == [0, 1, 2]
        assert [one.text for one in ranked] == [documents[one.index] for one in ranked]
        assert ranked == sorted(ranked, key=lambda one: -one.score)
        one = next(one for one in ranked if one.index == 0)
        assert one.score == pytest.approx(1 / (1 + np.exp(-float(score[0]))), rel=1e-5)
        assert model.rerank("paris", documents, top_n=1) == ranked[:1]
        assert model.rerank("paris", []) == []


def test_long_texts(tmp_path):
    folder, _ = classifier(tmp_path)
    with load(folder, backend="reference") as model:
        long = "large " * model.context
        with pytest.raises(RequestError, match=r"text 1 has \d+ tokens; the model's limit is"):
            model.scores(("paris", long))
        kept = "large " * (model.context - 4)
        np.testing.assert_array_equal(model.scores(("paris", long), truncate=True), model.scores(("paris", kept)))


@pytest.mark.parametrize(("case", "family"), [
    ("qwen3", "Qwen3"), ("exaone4", "Exaone4"), ("jamba", "Jamba"), ("ministral3", "Ministral3"),
    ("gemma3", "Gemma3Text")])
def test_a_decoder_is_scored_by_its_last_token(tmp_path, case, family):
    folder, tensors = classifier(tmp_path, 2, case, {"score.weight": (2, 64)}, f"{family}ForSequenceClassification")
    with load(folder, backend="reference") as model:
        expected = tensors["score.weight"] @ model.hidden([5, 6, 7])[-1]
        np.testing.assert_allclose(model.scores([5, 6, 7]), expected, rtol=1e-4, atol=1e-6)
        assert model.score_head.labels == ("LABEL_0", "LABEL_1")


def test_what_is_refused(tmp_path):
    (plain := tmp_path / "plain").mkdir()
    with load(write_case("bert", plain), backend="reference") as model, \
            pytest.raises(RequestError, match="bert has no score head: it is neither a classifier nor a reranker"):
        model.scores([2, 5])
    (narrow := tmp_path / "narrow").mkdir()
    classifier(narrow, head={"classifier.weight": (2, 5)})
    with pytest.raises(SpecError, match=r"tensor 'classifier.weight' is \[2, 5\], but spec 'bert' expects 64 columns"):
        load(narrow, backend="reference")
    (named := tmp_path / "named").mkdir()
    folder, _ = classifier(named, id2label=[1])
    with pytest.raises(FormatError, match="id2label: expected an object of numbers and names"):
        load(folder, backend="reference")
    (right := tmp_path / "right").mkdir()
    folder, _ = classifier(right)
    with load(folder, backend="reference") as model:
        for texts in ([5, "a"], [("a", "b", "c")], [["a", "b"]], 7):
            with pytest.raises(RequestError, match="a text, a pair of texts"):
                model.scores(texts)
        with pytest.raises(RequestError, match="top_n"):
            model.rerank("a", ["b"], top_n=0)
