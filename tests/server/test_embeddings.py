"""Embeddings over HTTP: prompts from the model's files, another instruction, fewer dimensions."""

import base64
import json
import shutil

import httpx
import numpy as np
import pytest

from tests.server.processes import ServerProcess

PROMPTS = {"query": "Instruct: word5 word6\nword7 ", "document": "word8 "}
POOLING = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory, model_folders):
    """A service of an encoder with sentence-transformers files; the same encoder in this process, with mean pooling."""
    import numflow

    folder = tmp_path_factory.mktemp("embedding") / "sentences"
    shutil.copytree(model_folders["encoder"], folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "modules.json").write_text(json.dumps([
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    config = folder.parent / "service.toml"
    config.write_text(f'[engine]\nbackend = "reference"\n[models.sentences]\npath = "{folder}"\n')
    with (ServerProcess("-c", str(config)) as server,
          httpx.Client(base_url=server.url, timeout=60) as http,
          numflow.load(model_folders["encoder"], backend="reference") as model):
        def mean(text: str) -> np.ndarray:
            ids = model.tokenizer.encode(text)
            return model.hidden(ids).mean(axis=0)

        yield http, mean


def vectors(http, texts, **more) -> np.ndarray:
    reply = http.post("/v1/embeddings", json={"input": texts, **more})
    assert reply.status_code == 200, reply.text
    return np.array([one["embedding"] for one in reply.json()["data"]])


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("more, text", [
    ({}, "paris"), ({"prompt": "document"}, "word8 paris"), ({"prompt": "query"}, PROMPTS["query"] + "paris"),
    ({"instruction": "is large"}, "Instruct: is large\nword7 paris"),
    ({"prompt": "query", "instruction": "is"}, "Instruct: is\nword7 paris")])
def test_prompts_and_instructions(served, more, text):
    http, mean = served
    np.testing.assert_allclose(vectors(http, "paris", **more)[0], unit(mean(text)), atol=1e-5)


def test_the_first_numbers_alone(served):
    http, mean = served
    expected = mean("paris")
    for count in (1, 5, len(expected)):
        found = vectors(http, ["paris", "is"], dimensions=count)
        np.testing.assert_allclose(found[0], unit(expected[:count]), atol=1e-5)
    np.testing.assert_allclose(vectors(http, "paris", dimensions=5, normalize=False)[0], expected[:5], atol=1e-4)
    coded = http.post("/v1/embeddings", json={"input": "paris", "dimensions": 5, "encoding_format": "base64"}).json()
    found = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(found, unit(expected[:5]), atol=1e-5)


@pytest.mark.parametrize("body, said", [({"prompt": "querry"}, "query"), ({"dimensions": 0}, "dimensions"),
                                        ({"prompt": "document", "instruction": "a"}, "Instruct")])
def test_what_is_refused(served, body, said):
    reply = served[0].post("/v1/embeddings", json={"input": "paris", **body})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text
