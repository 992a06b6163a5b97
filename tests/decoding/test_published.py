"""Strategies against transformers and llama.cpp on the same logits (see make_published.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import FILTERS, Sampling
from numflow.decoding.weights import UNIT
from tests.decoding.published_cases import CASES, logits_of

_, *FOUND = json.loads((Path(__file__).parent / "expected" / "published.json").read_text(encoding="utf-8"))
EXPECTED = {(found["case"], library): found[library] for found in FOUND for library in ("transformers", "llama.cpp")
            if found[library] is not None}


def test_every_case_is_there():
    assert {name for name, _ in EXPECTED} == set(CASES)
    assert sum(library == "transformers" for _, library in EXPECTED) >= 12


@pytest.mark.parametrize(("name", "library"), EXPECTED)
def test_the_same_is_left(name, library):
    settings, text, spread = CASES[name]
    order = [setting for setting in settings if setting in FILTERS]
    own = {**settings, "temperature": settings.get("temperature", 1.0),
           "samplers": ("temperature", *order) if "temperature" not in order else tuple(order)}
    sampler = Sampler(Sampling(**own), prefix=[] if library == "llama.cpp" else text)
    if library == "llama.cpp":  # whose presence and frequency count the prompt too
        for id in text:
            sampler.accept(id)
    ids, p = sampler.distribution(logits_of(name, spread))
    expected = EXPECTED[name, library]
    assert ids.tolist() == expected["ids"]
    np.testing.assert_allclose(p, expected["p"], rtol=1e-4, atol=UNIT)
