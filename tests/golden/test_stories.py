"""A real model in llama2.c's three formats writes the text that the reference C programs write."""

import json

import pytest

import numflow
from tests.conftest import shared

STEPS = 120  # tokens, prompt and start token included


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("version", ["v0", "v1", "v2.q8"])
@pytest.mark.thin(3)
def test_greedy_text(version, backend):
    folder = shared("data", "llama2c")
    texts = json.loads((folder / "expected.json").read_text())["expected"]
    expected = texts.get(f"stories260K.{version}.bin", texts["stories260K.v0.bin"])
    with numflow.load(folder / f"stories260K.{version}.bin", backend=backend) as model:
        for prompt, text in expected.items():
            ids = model.tokenizer.encode(prompt)
            new = model.generate(ids, max_tokens=STEPS + 1 - len(ids)).ids
            assert model.tokenizer.decode([*ids, *new]) == text
