"""Tiny models of every family against what transformers computes for them (see make_transformers_cases.py)."""

from functools import cache

import numpy as np
import pytest

from numflow import network
from numflow.network import WeightSource
from numflow.reference.program import Program
from tests.specs.case import Case, gguf_checkpoint, gguf_names, load_case, memory_checkpoint, names, relative_error, run

TOLERANCE = 1e-4


@cache
def program(name: str, form: int | str, context: int):
    """The case's model on the reference; built for prompts of this length, which some rotary scalings look at.

    form: which form of config.json, or "gguf".
    """
    case = load_case(name)
    checkpoint = gguf_checkpoint(case) if form == "gguf" else memory_checkpoint(case.configs[form], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint, context=context)
    return Program(built, WeightSource(built, checkpoint))


def errors(case: Case, form: int | str = 0) -> dict[str, float]:
    """Relative error of every stored array."""
    found = {}
    for i, (given, kept) in enumerate(zip(case.inputs, case.rows, strict=True)):
        model = program(case.name, form, len(given["ids"]))
        for key in ("logits", "hidden", "encoder_hidden"):
            expected = case.expected.get(f"{key}_{i}")
            # GGUF files of encoders have no masked-LM head.
            if expected is None or (form == "gguf" and key not in model.network.outputs):
                continue
            if key == "encoder_hidden":
                y = run(model, given["ids"], key, encoder_ids=given["ids"])[kept["encoder_hidden"]]
            elif "decoder_ids" in given:
                y = run(model, given["decoder_ids"], key, encoder_ids=given["ids"])[kept["rows"]]
            else:
                y = run(model, given["ids"], key, given.get("types"))[kept["rows"]]
            found[f"{key}_{i}"] = relative_error(y, expected)
    return found


@pytest.mark.parametrize("name", names())
def test_published_numbers(name):
    found = errors(load_case(name))
    assert found
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", gguf_names())
def test_published_numbers_from_gguf(name):
    found = errors(load_case(name), "gguf")
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("name", names())
def test_both_forms_of_the_configuration_give_the_same_network(name):
    """config.json as the family was published with it, and as transformers writes it today."""
    case = load_case(name)
    length = max(len(given["ids"]) for given in case.inputs)
    first, second = (program(name, form, length).network for form in (0, 1))
    assert first.entries == second.entries
    assert first.buffers == second.buffers
    assert repr(first.weights) == repr(second.weights)
    for key, weight in first.weights.items():
        if weight.constant is not None:
            np.testing.assert_allclose(weight.constant, second.weights[key].constant, rtol=1e-6)
