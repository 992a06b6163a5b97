"""Every tiny checkpoint of the reference material against the results of its published class, also in batches.

Encoders and classifiers of 2025-26 run by default; generating families, also older ones, are slow tests.
"""

import json
from itertools import cycle, islice

import numpy as np
import pytest

from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.errors import RequestError
from tests.conftest import SHARED, shared
from tests.specs.case import relative_error

TOLERANCE = 1e-4
ENCODERS = ["modernbert", "qwen3_embedding", "xlm_roberta_classifier"]
OTHERS = {*ENCODERS, "bert_base_multilingual_cased", "m2m100_418m"}
CAUSAL = sorted((group, path.name) for group in ("fixtures", "fixtures_2026")
                for path in SHARED.glob(f"{group}/*") if path.is_dir() and path.name not in OTHERS)
NEW = 12


def fixture(group, name):
    folder = shared(group, name)
    with np.load(folder / "expected.npz") as file:
        return folder, json.loads((folder / "case.json").read_text()), dict(file)


def all_logits(folder, prompts, **options):
    with load(folder, activations="f32", **options) as model:
        return [np.concatenate([rows for _, rows in model.iter_logits(ids)]) for ids in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), CAUSAL)
def test_published_logits_and_greedy_texts_for_any_cut(group, name):
    """Batched with the other prompts; on the CPU the logits are also bit-identical however prompts are split."""
    folder, case, expected = fixture(group, name)
    wanted = [expected[f"logits_{at}"] for at in range(len(case["prompts"]))]
    for backend in ("reference", "cpu"):
        whole = all_logits(folder, case["prompts"], backend=backend)
        for chunk in (1, 7, 64):
            cut = all_logits(folder, case["prompts"], backend=backend, chunk=chunk)
            assert max(map(relative_error, cut, wanted)) < TOLERANCE
            assert backend == "reference" or all(map(np.array_equal, cut, whole))
        assert max(map(relative_error, whole, wanted)) < TOLERANCE
        with load(folder, backend=backend, activations="f32") as model:
            texts = model.generate_batch(case["prompts"], max_tokens=NEW, ignore_eos=True)
            assert [list(text.ids) for text in texts] == case["greedy"]


def facts(generation):
    return generation.ids, [one.logprob for one in generation.logprobs]


def least_memory(model, tokens):
    """The smallest size in bytes of caches and states in which a sequence of so many tokens runs alone."""
    for blocks in range(1, 40):
        with Engine(model, kv_memory=blocks * model.runner.unit) as engine:
            try:
                engine.submit([1] * (tokens - NEW), max_tokens=NEW, ignore_eos=True).cancel()
                return blocks * model.runner.unit
            except RequestError:
                continue
    raise AssertionError("40 blocks are too few")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), CAUSAL)
def test_the_same_bits_beside_others_behind_a_prefix_and_after_preemption(group, name):
    folder, case, _ = fixture(group, name)
    settings = {"max_tokens": NEW, "ignore_eos": True, "logprobs": 0, "temperature": 0.0}
    with load(folder, activations="f32") as model:
        base = case["prompts"][1]
        texts = [list(islice(cycle(base[shift:] + base[:shift]), count)) for shift, count in
                 ((0, 61), (3, 60), (5, 59), (7, 62))]  # each comes to need a second block of 64 tokens
        texts = [text[:model.context - NEW] for text in texts]
        long = list(islice(cycle(base), min(100, model.context - NEW)))
        alone = [facts(model.generate(text, **settings)) for text in (*texts, long)]
    with load(folder, activations="f32") as model, Engine(model) as engine:
        for _ in range(2):
            handles = [engine.submit(text, **settings) for text in (*texts, long)]
            assert [facts(handle.result()) for handle in handles] == alone
        assert engine.stats["prefix_tokens"] >= 64 or len(long) < 65
    with load(folder, activations="f32") as model:
        memory = least_memory(model, max(map(len, texts)) + NEW)
    for preemption in ("swap", "recompute"):
        found = 0
        for more in (0, 1):
            with load(folder, activations="f32") as model, \
                    Engine(model, kv_memory=memory + more * model.runner.unit, preemption=preemption) as engine:
                first = engine.submit(texts[0], **settings)
                next(iter(first))  # it is running when another one goes before it
                handles = [first, *(engine.submit(text, priority=1, **settings) for text in texts[1:])]
                assert [facts(handle.result()) for handle in handles] == alone[:-1]
                found += engine.stats["swaps" if preemption == "swap" else "preemptions"]
        assert found > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_embeddings_and_scores(name, backend):
    folder, case, expected = fixture("fixtures_2026", name)
    with load(folder, backend=backend, activations="f32") as model:
        for i, ids in enumerate(case["prompts"]):
            assert relative_error(model.hidden(ids), expected[f"hidden_{i}"]) < TOLERANCE
            if case["kind"] == "classifier":
                np.testing.assert_allclose(model.scores(ids), expected[f"logits_{i}"], atol=TOLERANCE)
            else:
                assert relative_error(model.logits(ids), expected[f"logits_{i}"]) < TOLERANCE
            if case["kind"] == "embedding":
                assert relative_error(model.embed(ids), expected[f"embedding_{i}"]) < TOLERANCE
