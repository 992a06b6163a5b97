"""A real model in two float formats: the whole greedy text of the reference C program."""

import json

import pytest

from numflow.engine.load import load
from tests.conftest import shared

STEPS = 120  # tokens of the published texts, the prompt's included


@pytest.mark.parametrize("name", ["stories260K.v0.bin", "stories260K.v1.bin"])
@pytest.mark.merge
def test_greedy_text(name):
    folder = shared("data", "llama2c")
    expected = json.loads((folder / "expected.json").read_text())["expected"]["stories260K.v0.bin"]
    with load(folder / name, backend="reference") as model:
        for prompt, text in expected.items():
            new = STEPS - len(model.tokenizer.encode(prompt)) + 1
            assert prompt + model.generate(prompt, max_tokens=new, ignore_eos=True).text == text
            pieces = list(model.generate(prompt, max_tokens=new, ignore_eos=True, stream=True))
            assert prompt + "".join(pieces) == text
