"""Tiny models of every family against transformers' results (see make_transformers_cases.py)."""

from functools import cache
from importlib import import_module

import numpy as np
import pytest

from numflow import network
from numflow.engine.tasks.scores import read_score_head
from numflow.network import WeightSource
from tests.specs.case import Case, gguf_checkpoint, gguf_names, load_case, memory_checkpoint, names, relative_error, run

TOLERANCE = 1e-4


@cache
def network_of(name: str, form: int | str):
    """The case's network and checkpoint.

    form: index of the form of config.json, or "gguf".
    """
    case = load_case(name)
    checkpoint = gguf_checkpoint(case) if form == "gguf" else memory_checkpoint(case.configs[form], case.tensors)
    return network.build(network.choose_spec(checkpoint), checkpoint), checkpoint


def errors(case: Case, form: int | str = 0, executor: str = "reference") -> dict[str, float]:
    """Relative error of every stored array."""
    found = {}
    for i, (given, kept) in enumerate(zip(case.inputs, case.rows, strict=True)):
        built, checkpoint = network_of(case.name, form)
        model = import_module(f"numflow.{executor}.program").Program(
            built, WeightSource(built, checkpoint), activations="f32")
        for key in ("logits", "hidden", "encoder_hidden"):
            expected = case.expected.get(f"{key}_{i}")
            # GGUF files of encoders have no masked-LM head.
            if expected is None or (form == "gguf" and key not in built.outputs):
                continue
            if key == "encoder_hidden":
                y = run(model, given["ids"], key, encoder_ids=given["ids"])[kept["encoder_hidden"]]
            elif "decoder_ids" in given:
                y = run(model, given["decoder_ids"], key, encoder_ids=given["ids"])[kept["rows"]]
            else:
                y = run(model, given["ids"], key, given.get("types"))[kept["rows"]]
            found[f"{key}_{i}"] = relative_error(y, expected)
        if (expected := case.expected.get(f"scores_{i}")) is not None:
            head = read_score_head(checkpoint, network.choose_spec(checkpoint))
            scores = head(run(model, given["ids"], "hidden", given.get("types")))
            found[f"scores_{i}"] = float(np.abs(scores - expected).max())  # numbers around 1, or a single one
        model.close()
    return found


@pytest.mark.parametrize("executor", ["reference", "cpu"])
@pytest.mark.parametrize("name", names())
@pytest.mark.thin(12)
def test_published_numbers(name, executor):
    found = errors(load_case(name), executor=executor)
    assert found
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", gguf_names())
@pytest.mark.thin(3)
def test_published_numbers_from_gguf(name):
    found = errors(load_case(name), "gguf")
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "moonlight"])
def test_a_matrix_for_each_head_on_the_processor(name):
    """GGUF files store the halves of the latent matrix by head; their 12 and 14 rows fill no tile."""
    assert max(errors(load_case(name), "gguf", "cpu").values()) < TOLERANCE


@pytest.mark.parametrize("name", names())
@pytest.mark.thin(8)
def test_both_forms_of_the_configuration_give_the_same_network(name):
    """config.json as the family was published with it, and as transformers writes it today."""
    first, second = (network_of(name, form)[0] for form in (0, 1))
    assert first.entries == second.entries
    assert first.buffers == second.buffers
    assert repr(first.weights) == repr(second.weights)
    for key, weight in first.weights.items():
        if weight.constant is not None:
            np.testing.assert_allclose(weight.constant, second.weights[key].constant, rtol=1e-6)
