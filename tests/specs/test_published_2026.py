"""Tiny checkpoints of families of 2025-26 with the numbers of their published classes (reference material)."""

import json

import numpy as np
import pytest

from numflow.engine.load import load
from tests.conftest import shared
from tests.specs.case import relative_error

TOLERANCE = 1e-4
CAUSAL = ["afmoe", "apertus", "bitnet", "cwm", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe",
          "gemma3n_text", "gemma4_moe", "gemma4_text", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "jais2",
          "llama4_text", "minimax_m2", "ministral3", "nanochat", "phimoe", "solar_open", "vaultgemma"]
ENCODERS = ["modernbert", "qwen3_embedding", "xlm_roberta_classifier"]


def fixture(name):
    folder = shared("fixtures_2026", name)
    with np.load(folder / "expected.npz") as file:
        return folder, json.loads((folder / "case.json").read_text()), dict(file)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [512, 64, 7, 1])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_and_greedy_texts(name, backend, chunk):
    folder, case, expected = fixture(name)
    with load(folder, backend=backend, activations="f32", chunk=chunk) as model:
        for i, ids in enumerate(case["prompts"]):
            logits = np.concatenate([rows for _, rows in model.iter_logits(ids)])
            assert relative_error(logits, expected[f"logits_{i}"]) < TOLERANCE
        texts = model.generate_batch(case["prompts"], max_tokens=len(case["greedy"][0]), ignore_eos=True)
        assert [list(text.ids) for text in texts] == case["greedy"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_embeddings_and_scores(name, backend):
    folder, case, expected = fixture(name)
    with load(folder, backend=backend, activations="f32") as model:
        for i, ids in enumerate(case["prompts"]):
            assert relative_error(model.hidden(ids), expected[f"hidden_{i}"]) < TOLERANCE
            if case["kind"] == "classifier":
                np.testing.assert_allclose(model.scores(ids), expected[f"logits_{i}"], atol=TOLERANCE)
            else:
                assert relative_error(model.logits(ids), expected[f"logits_{i}"]) < TOLERANCE
            if case["kind"] == "embedding":
                assert relative_error(model.embed(ids), expected[f"embedding_{i}"]) < TOLERANCE
