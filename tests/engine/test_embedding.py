"""Embeddings: by hand on a network that is one table, and a real model against published code."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.tasks.embedding_recipe import Dense, EmbeddingRecipe
from numflow.errors import RequestError
from numflow.learn.cases.build import VOCABULARY
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.reference.program import Program
from numflow.tokenizer.wrapping import around
from tests.conftest import real_model
from tests.engine.fake import used_blocks

CLS, SEP, WIDTH = 90, 91, 6
TOKENIZER = SimpleNamespace(  # letters are tokens
    wrapping=around(CLS, SEP), encode=lambda text, add_special: [ord(c) % 32 for c in text])


def table_model(recipe=None, context=20, type="encoder"):
    """A model whose hidden state is a row of its table. Returns (model, table)."""
    b = Builder("table")
    hidden = b.buffer(WIDTH, "logits")
    (x,) = b.inputs(WIDTH)
    b.step("select_rows", (x,), (hidden,))
    case = b.case(hidden)
    network = replace(case.network, outputs={"hidden": hidden},
                      facts={"type": type, "vocabulary": VOCABULARY, "context": context})
    recipe = recipe or EmbeddingRecipe(("mean",))
    model = Model(network, Program(network, case.weights), lambda: TOKENIZER, recipe=lambda: recipe)
    return model, next(iter(case.weights.arrays.values())).astype(np.float64)


def rows(table, text):
    return table[[CLS, *TOKENIZER.encode(text, False), SEP]]


@pytest.mark.parametrize(("pooling", "expected"), [
    ("cls", lambda y: y[0]), ("last", lambda y: y[-1]), ("max", lambda y: y.max(0)), ("mean", lambda y: y.mean(0)),
    ("mean_sqrt_len", lambda y: y.sum(0) / len(y) ** 0.5),
    ("weighted_mean", lambda y: sum((i + 1) * row for i, row in enumerate(y)) / sum(range(1, len(y) + 1)))])
def test_poolings(pooling, expected):
    for recipe, option in ((EmbeddingRecipe((pooling,)), None), (EmbeddingRecipe(("max",)), pooling)):
        model, table = table_model(recipe)
        for text in ("abc", ""):
            y = model.embed(text, normalize=False, pooling=option)
            assert y.dtype == np.float32
            np.testing.assert_allclose(y, expected(rows(table, text)), rtol=1e-6)
            np.testing.assert_allclose(np.linalg.norm(model.embed(text, pooling=option)), 1, rtol=1e-6)
    assert used_blocks(model) == 0


def test_several_poolings_are_joined():
    model, table = table_model(EmbeddingRecipe(("cls", "mean")))
    y = rows(table, "abc")
    np.testing.assert_allclose(model.embed("abc", False), [*y[0], *y.mean(0)], rtol=1e-6)


def test_layers_after_the_pooling():
    weight = np.arange(12, dtype=np.float32).reshape(2, 6) / 10
    dense = Dense(weight, None, "Tanh")
    model, table = table_model(EmbeddingRecipe(("mean",), ("normalize", dense)))
    mean = rows(table, "abc").mean(0)
    plain = np.tanh(weight @ (mean / np.linalg.norm(mean)))
    np.testing.assert_allclose(model.embed("abc", None), plain, rtol=1e-6)
    np.testing.assert_allclose(model.embed("abc"), plain / np.linalg.norm(plain), rtol=1e-6)
    np.testing.assert_allclose(model.embed("abc", False), np.tanh(weight @ mean), rtol=1e-6)
    assert model.embed([]).shape == (0, 2)
    model, _ = table_model(EmbeddingRecipe(("mean", "max"), (Dense(np.ones((2, 12), np.float32), None, "Identity"),)))
    with pytest.raises(RequestError, match="needs 12 columns: pooling 'cls' alone"):
        model.embed("abc", pooling="cls")


def test_normalising_as_the_files_say():
    for layers in ((), ("normalize",)):
        model, table = table_model(EmbeddingRecipe(("mean",), layers))
        length = 1.0 if layers else np.linalg.norm(rows(table, "abc").mean(0))
        np.testing.assert_allclose(np.linalg.norm(model.embed("abc", normalize=None)), length, rtol=1e-6)


def test_one_text_or_several():
    model, _ = table_model()
    texts = ["a", "bcd", "", "a" * 18] * 40
    together = model.embed(texts)
    assert together.shape == (160, WIDTH)
    for text, y in zip(texts[:4], together[:4], strict=True):
        assert model.embed(text).shape == (WIDTH,)
        np.testing.assert_array_equal(model.embed(text), y)
    assert model.embed([]).shape == (0, WIDTH)


def test_long_texts_are_cut_only_when_asked():
    model, _ = table_model(EmbeddingRecipe(("mean",), max_tokens=8, limit_from="limits.json"))
    with pytest.raises(RequestError, match="text 2 has 9 tokens; the model's limit in limits.json is 8.*truncate"):
        model.embed(["abcdef", "abcdefg"])
    np.testing.assert_array_equal(model.embed("abcdefg", truncate=True), model.embed("abcdef"))
    model, _ = table_model(EmbeddingRecipe(("mean",), max_tokens=500), context=10)
    with pytest.raises(RequestError, match="text 1 has 14 tokens; the model's limit is 10"):
        model.embed("a" * 12)
    assert model.embed("a" * 12, truncate=True).shape == (WIDTH,)


def test_prompts():
    recipe = EmbeddingRecipe(("mean",), prompts={"query": "q: ", "none": ""}, prompt="query", strip=True, lower=True)
    model, table = table_model(recipe)
    np.testing.assert_allclose(model.embed("ABC ", False), rows(table, "q: abc").mean(0), rtol=1e-6)
    np.testing.assert_allclose(model.embed("abc", False, prompt="none"), rows(table, "abc").mean(0), rtol=1e-6)
    with pytest.raises(RequestError, match="has no prompt 'querry'; did you mean 'query'"):
        model.embed("abc", prompt="querry")
    model, table = table_model(replace(recipe, pool_prompt=False))
    np.testing.assert_allclose(model.embed("abc", False), rows(table, "q: abc")[3:].mean(0), rtol=1e-6)


def test_the_first_numbers_alone():
    """Matryoshka: of an embedding that is as long as 1 they are made so again."""
    model, table = table_model()
    whole = rows(table, "abc").mean(0)
    np.testing.assert_allclose(model.embed("abc", dimensions=4), whole[:4] / np.linalg.norm(whole[:4]), rtol=1e-6)
    np.testing.assert_allclose(model.embed(["abc"], normalize=False, dimensions=4), whole[None, :4], rtol=1e-6)
    np.testing.assert_array_equal(model.embed("abc", dimensions=WIDTH), model.embed("abc"))
    assert model.embed([], dimensions=3).shape == (0, 3)
    for bad in (0, WIDTH + 1, 2.0, True, "3"):
        with pytest.raises(RequestError, match=f"dimensions.*from 1 to {WIDTH}"):
            model.embed("abc", dimensions=bad)
    named, _ = table_model(EmbeddingRecipe(("mean",), dimensions=(2, 4)))
    assert named.embed("abc", dimensions=4).shape == (4,) and named.embed("abc", dimensions=WIDTH).shape == (WIDTH,)
    with pytest.raises(RequestError, match="may have 2, 4 numbers, not 3"):
        named.embed("abc", dimensions=3)


def test_instructions():
    recipe = EmbeddingRecipe(("cls", "last"), prompts={"plain": "p", "query": "Instruct: find it\nQuery:", "other":
                                                       "Instruct: find it\nText: "})
    model, table = table_model(recipe, context=99)
    for prompt, rest in ((None, "Query:"), ("query", "Query:"), ("other", "Text: ")):
        np.testing.assert_array_equal(
            model.embed("abc", normalize=False, pooling="mean", prompt=prompt, instruction="sort"),
            rows(table, f"Instruct: sort\n{rest}abc").mean(0).astype(np.float32))
    for bad, said in ((EmbeddingRecipe(("mean",)), "has no prompt that begins with 'Instruct:'"),
                      (recipe, "prompt 'plain' of .* does not begin")):
        with pytest.raises(RequestError, match=f"instruction.*{said}"):
            table_model(bad)[0].embed("abc", instruction="sort", prompt="plain" if bad is recipe else None)
    with pytest.raises(RequestError, match="instruction 'sort' is for texts"):
        model.embed([1, 2], instruction="sort")


def test_what_cannot_be_embedded():
    model, _ = table_model(EmbeddingRecipe())
    with pytest.raises(RequestError, match="table does not say how embeddings are pooled.*one of cls, max, mean"):
        model.embed("abc")
    assert model.embed("abc", pooling="mean").shape == (WIDTH,)
    with pytest.raises(RequestError, match="no pooling 'meen'; did you mean 'mean'"):
        model.embed("abc", pooling="meen")
    for texts in (["abc", 3], [[1, 2], "abc"], [[1, 2.5]], [[True]], [3, [1]]):
        with pytest.raises(RequestError, match="embed needs a text or a list of texts"):
            model.embed(texts, pooling="mean")


def test_ids_run_as_they_are():
    model, _ = table_model(EmbeddingRecipe(pooling=("mean",)))
    texts = ["abc", "b"]
    ids = [[CLS, *TOKENIZER.encode(text, False), SEP] for text in texts]
    np.testing.assert_array_equal(model.embed(ids), model.embed(texts))
    np.testing.assert_array_equal(model.embed(ids[0]), model.embed("abc"))
    with pytest.raises(RequestError, match="99999"):
        model.embed([[1, 99999]])
    with pytest.raises(RequestError, match="prompt 'query' is for texts"):
        model.embed(ids, prompt="query")


EXPECTED = Path(__file__).parent / "expected" / "embeddings.json"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.merge
def test_a_real_model_gives_published_embeddings(backend):
    cases = json.loads(EXPECTED.read_text(encoding="utf-8"))
    texts = [case["text"] for case in cases]
    first, lengths = np.array([case["first"] for case in cases]), np.array([case["norm"] for case in cases])
    with load(real_model("all-MiniLM-L6-v2"), backend=backend) as model:
        with pytest.raises(RequestError, match="text 10 has 402 tokens; the model's limit in sentence_bert_config"):
            model.embed(texts)
        y = model.embed(texts, normalize=False, truncate=True)
        assert np.abs(y[:, :16] - first).max() < 1e-5
        np.testing.assert_allclose(np.linalg.norm(y, axis=1), lengths, rtol=1e-6)
        for i in (0, 2, 7):
            alone = model.embed(texts[i], normalize=False)
            np.testing.assert_allclose(alone, y[i], rtol=0, atol=0 if backend == "cpu" else 1e-5)
            for normalize in (True, None):
                np.testing.assert_allclose(model.embed(texts[i], normalize), alone / np.linalg.norm(alone), atol=1e-7)
