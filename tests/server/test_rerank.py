"""Relevance scores over HTTP: from a reranker, from embeddings, from a classifier."""

import httpx
import numpy as np
import pytest

from tests.engine.classifiers import classifier
from tests.server.processes import ServerProcess

DOCUMENTS = ["is large .", "word5 word6", "paris"]


@pytest.fixture(scope="module")
def ranking(tmp_path_factory, model_folders):
    """A service of a reranker, a classifier and an encoder; the reranker and the classifier in this process."""
    import numflow

    root = tmp_path_factory.mktemp("ranking")
    folders = {"encoder": model_folders["encoder"]}
    for name, labels in (("reranker", 1), ("classifier", 3)):
        (root / name).mkdir()
        folders[name], _ = classifier(root / name, labels)
    config = root / "service.toml"
    config.write_text('[engine]\nbackend = "reference"\n' + "".join(
        f'[models.{name}]\npath = "{folders[name]}"\n' for name in ("reranker", "classifier", "encoder")))
    with ServerProcess("-c", str(config)) as server, numflow.load(folders["reranker"], backend="reference") as first, \
            numflow.load(folders["classifier"], backend="reference") as second, \
            httpx.Client(base_url=server.url, timeout=60) as http:
        yield http, first, second


def test_documents_are_ranked(ranking):
    http, model, _ = ranking
    expected = model.rerank("paris", DOCUMENTS)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking"):
        found = http.post(path, json={"query": "paris", "documents": DOCUMENTS}).json()
        assert [one["index"] for one in found["results"]] == [one.index for one in expected]
        np.testing.assert_allclose([one["relevance_score"] for one in found["results"]],
                                   [one.score for one in expected], rtol=1e-5)
        assert found["model"] == "reranker" and found["usage"]["total_tokens"] > 9 and "document" not in str(found)
    named = [{"text": DOCUMENTS[0], "id": 7}, *DOCUMENTS[1:]]
    best, = http.post("/v1/rerank", json={"query": "paris", "documents": named, "top_n": 1,
                                          "return_documents": True}).json()["results"]
    assert best["document"] == {"text": expected[0].text} and best["index"] == expected[0].index
    plain = http.post("/rerank", json={"query": "paris", "texts": DOCUMENTS, "return_text": True}).json()
    assert [(one["index"], one["text"]) for one in plain] == [(one.index, one.text) for one in expected]
    assert http.post("/rerank", json={"query": "paris", "documents": []}).json()["results"] == []
    assert http.get("/v1/models/reranker").json()["capabilities"] == ["rerank", "classify"]


def test_scores_of_pairs(ranking):
    http, model, _ = ranking
    expected = model.scores([("paris", document) for document in DOCUMENTS], probabilities=True)[:, -1]
    for first in ("paris", ["paris"], ["paris"] * 3):
        found = http.post("/v1/score", json={"text_1": first, "text_2": DOCUMENTS}).json()
        np.testing.assert_allclose([one["score"] for one in found["data"]], expected, rtol=1e-5)
    assert len(http.post("/score", json={"text_1": "paris", "text_2": "is"}).json()["data"]) == 1


def test_embeddings_rank_by_cosine(ranking):
    http, *_ = ranking
    body = {"model": "encoder", "query": "paris", "documents": DOCUMENTS}
    reply = http.post("/v1/rerank", json=body)
    assert reply.status_code == 200, reply.text
    scores = {one["index"]: one["relevance_score"] for one in reply.json()["results"]}
    vectors = np.array([one["embedding"] for one in http.post("/v1/embeddings", json={
        "model": "encoder", "input": ["paris", *DOCUMENTS]}).json()["data"]])
    np.testing.assert_allclose([scores[at] for at in range(3)], vectors[1:] @ vectors[0], atol=1e-6)
    assert scores[2] == pytest.approx(1, abs=1e-6)


def test_labels(ranking):
    http, _, model = ranking
    found = http.post("/v1/classify", json={"model": "classifier", "input": ["paris", "is large ."]}).json()
    expected = model.scores(["paris", "is large ."], probabilities=True)
    np.testing.assert_allclose([one["probs"] for one in found["data"]], expected, rtol=1e-5)
    assert [one["label"] for one in found["data"]] == [model.score_head.labels[at] for at in expected.argmax(1)]
    assert found["data"][0]["num_classes"] == 3


@pytest.mark.parametrize("path, body, said", [
    ("/v1/rerank", {"query": "a"}, "documents"), ("/v1/rerank", {"documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": [""]}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "classifier"}, "3 labels"),
    ("/v1/rerank", {"query": "a", "documents": ["large " * 600], "truncate": False}, "limit"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "as many"),
    ("/v1/classify", {"input": "a", "model": "encoder"}, "score head")])
def test_what_is_refused(ranking, path, body, said):
    http, *_ = ranking
    reply = http.post(path, json=body)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
