"""Rotary frequencies that depend on the sequence length: transformers' formulas, and ranges of lengths with equal
frequencies.
"""

import math

import numpy as np
import pytest

from numflow import network
from numflow.network.by_length import ByLength, variant
from tests.specs.case import load_case, memory_checkpoint

SHORT, LONG = [1 + 0.05 * i for i in range(8)], [1.5 + 0.7 * i for i in range(8)]


def rows(config, *limits):
    """(network, frequencies and factor of each length limit) of a tiny llama with this [rope_scaling]."""
    case = load_case("llama_dynamic")
    checkpoint = memory_checkpoint(case.configs[0] | config, case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    found = ByLength(built, lambda name: built.weights[name].constant).rows(np.array(limits))
    return built, found[:, :-1], found[:, -1:].reshape(-1)


def lists(**more):
    return {"max_position_embeddings": 96, "rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 12, "short_factor": SHORT,
        "long_factor": LONG} | more}


def test_lists_of_factors():
    _, found, _ = rows(lists(), 1, 12, 13, 96)
    powers = 10000.0 ** (np.arange(8) / 8)
    for row, factors in zip(found, (SHORT, SHORT, LONG, LONG), strict=True):
        np.testing.assert_allclose(row, 1 / (np.array(factors) * powers), rtol=1e-6)


@pytest.mark.parametrize(("keys", "expected"), [
    ({}, [math.sqrt(1 + math.log(8) / math.log(12))] * 2),
    ({"factor": 32.0}, [math.sqrt(1 + math.log(32) / math.log(12))] * 2),
    ({"attention_factor": 1.25}, [1.25, 1.25]),
    ({"short_mscale": 1.1, "long_mscale": 1.3}, [math.sqrt(1 + math.log(8) / math.log(12))] * 2)])  # Phi-MoE's alone
def test_the_factor_on_cosines_is_that_of_the_set(keys, expected):
    np.testing.assert_allclose(rows(lists(**keys), 12, 13)[2], expected, rtol=1e-6)


def test_a_base_that_grows_with_the_length():
    """transformers' dynamic scaling, which uses the model's own context even if the file has an original context."""
    scaling = {"type": "dynamic", "factor": 4.0}
    for own, said in ((12, {}), (48, {"original_max_position_embeddings": 12})):
        built, found, factors = rows({"max_position_embeddings": own, "rope_scaling": scaling | said},
                                     3, own, own + 1, 4 * own, 9 * own)
        assert built.facts["context"] == 4 * own
        for row, length in zip(found, (own, own, own + 1, 4 * own, 9 * own), strict=True):
            base = 10000.0 * (4 * length / own - 3) ** (16 / 14)
            np.testing.assert_allclose(row, base ** (-np.arange(8) / 8), rtol=1e-6)
        assert (factors == 1).all()


def test_keys_are_shared_by_lengths_with_the_same_frequencies():
    lists_of, _, _ = rows(lists(), 1)
    assert variant(lists_of, 1) == variant(lists_of, 12) != variant(lists_of, 13) == variant(lists_of, 96)
    dynamic, _, _ = rows({}, 1)
    assert variant(dynamic, 1) == variant(dynamic, 12) and len({variant(dynamic, n) for n in (12, 13, 14)}) == 3


@pytest.mark.parametrize("scaling", [
    {"type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 12}])
def test_other_scalings_are_the_same_at_every_length(scaling):
    built, found, _ = rows({"rope_scaling": scaling}, 5, 500)
    assert found.size == 0
    assert built.facts["context"] == 12 and variant(built, 5) == variant(built, 500) == 0
