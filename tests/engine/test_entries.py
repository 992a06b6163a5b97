"""Entries of windows beside the last keys, hashed n-grams beside an index of windows, and an index of blocks of keys:
the same values for any chunks and in any batch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from tests.engine.beside import ENGINES, EXECUTORS, check_side_by_side, ids_alone
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

TEXT = [5 + (7 * i * i + i) % 190 for i in range(200)]
PROMPTS = [TEXT[:150], TEXT[:61], TEXT[30:100], [*TEXT[:130], 5, 6], [9, 8]]
# Difference from the reference, which multiplies whole batches.
CLOSE = {"deepseek_v4": 1e-5, "qwen4_exp": 3e-5, "minimax_m3_text_blocks": 3e-5}
# Blocks of keys and values, too few for all requests.
BLOCKS = {"deepseek_v4": 40, "qwen4_exp": 60, "minimax_m3_text_blocks": 40}
SETTINGS = [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3}, {"speculate": "ngram"}]


@pytest.fixture(scope="module", params=["deepseek_v4", "qwen4_exp", "minimax_m3_text_blocks"])
def folder(request, tmp_path_factory):
    """A window of 6, entries of 4 tokens that an index chooses, and of 8 tokens; or n-grams of up to 3 tokens, a
    convolution of taps 3 tokens apart, and windows of 4 tokens that an index chooses; or blocks of 5 keys."""
    case, folder = load_case(request.param), tmp_path_factory.mktemp(request.param) / request.param
    folder.mkdir()
    save_file({name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()},
              folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case.configs[0] | {"max_position_embeddings": 512}))
    return folder


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.merge
def test_pieces_of_any_size_give_the_numbers_of_the_whole_text(folder, executor):
    case = load_case(folder.name)
    ids, rows, expected = case.inputs[1]["ids"], case.rows[1]["rows"], case.expected["logits_1"]
    with numflow.load(folder, **EXECUTORS[executor]) as model:
        whole = model.logits(TEXT)
    for chunk in (1, 7, 64):
        with numflow.load(folder, chunk=chunk, **EXECUTORS[executor]) as model:
            found = model.logits(TEXT)
            assert relative_error(model.logits(ids)[rows], expected) < 1e-4
        if executor != "reference":
            np.testing.assert_array_equal(found, whole)
        else:
            assert relative_error(found, whole) < CLOSE[folder.name]


@pytest.fixture(scope="module", params=list(EXECUTORS))
def alone(request, folder):
    """An executor, and each prompt by each of SETTINGS by itself."""
    return request.param, ids_alone(folder, request.param, PROMPTS, SETTINGS)


@pytest.mark.parametrize("options", ENGINES, ids=str)
@pytest.mark.merge
def test_side_by_side(alone, folder, options):
    """Samples, beams, guesses, swapped and read again, begun where another text is known: each as by itself."""
    executor, expected = alone
    check_side_by_side(folder, executor, PROMPTS, SETTINGS, options, expected,
                       lambda program: BLOCKS[folder.name] * program.block_bytes)
