"""Tiny GGUF files against llama.cpp's results (see make_llama_cpp_cases.py)."""

from importlib import import_module

import pytest

import numflow
from numflow import network
from numflow.network import WeightSource
from tests.specs.case import LLAMA_CPP_FOLDER, load_case, memory_checkpoint, names, relative_error, run
from tests.specs.configs_llama_cpp import CASES
from tests.specs.make_llama_cpp_cases import write

TOLERANCE = 1e-4


def errors(name: str, executor: str) -> dict[str, float]:
    """Relative error of every stored array."""
    case = load_case(name, LLAMA_CPP_FOLDER)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors, "gguf")
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    model = import_module(f"numflow.{executor}.program").Program(
        built, WeightSource(built, checkpoint), activations="f32")
    found = {}
    for key, expected in case.expected.items():
        output, i = key.rsplit("_", 1)
        y = run(model, case.inputs[int(i)]["ids"], output)[case.rows[int(i)]["rows"]]
        found[key] = relative_error(y, expected)
    model.close()
    return found


@pytest.mark.parametrize("executor", ["reference", "cpu"])
@pytest.mark.parametrize("name", [name for name in names(LLAMA_CPP_FOLDER) if not CASES[name][2].get("pooled")])
@pytest.mark.thin(4)
def test_numbers_of_llama_cpp(name, executor):
    found = errors(name, executor)
    assert max(found.values()) < CASES[name][2].get("tolerance", TOLERANCE), found


def test_layers_behind_the_pooling(tmp_path):
    """Embeddings transformed by two matrices of the file after pooling."""
    name = "gemma_embedding_dense"
    case, (metadata, tensors, options) = load_case(name, LLAMA_CPP_FOLDER), CASES[name]
    write(tmp_path / "model.gguf", metadata, tensors)
    with numflow.load(tmp_path / "model.gguf", backend="reference") as model:
        for i, given in enumerate(case.inputs):
            found = model.embed(given["ids"], normalize=False)
            assert relative_error(found, case.expected[f"pooled_{i}"][0]) < options["tolerance"]
