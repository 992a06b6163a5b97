"""Entries of windows beside the last keys, and hashed n-grams beside an index of windows: the same values for any
chunks and in any batch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

TEXT = [5 + (7 * i * i + i) % 190 for i in range(200)]
PROMPTS = [TEXT[:150], TEXT[:61], TEXT[30:100], [*TEXT[:130], 5, 6], [9, 8]]
GREEDY = {"max_tokens": 12, "ignore_eos": True}
SETTINGS = [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3}, {"speculate": "ngram"}]
CPU = {"backend": "cpu", "activations": "f32", "threads": 1}
EXECUTORS = {"reference": {"backend": "reference", "block_size": 16}, "cpu": {**CPU, "threads": 2},
             "layers": {**CPU, "devices": "0;1"}, "tensors": {**CPU, "devices": "0&1"}}


@pytest.fixture(scope="module", params=["deepseek_v4", "qwen4_exp"])
def folder(request, tmp_path_factory):
    """A window of 6, entries of 4 tokens that an index chooses, and of 8 tokens; or n-grams of up to 3 tokens, a
    convolution of taps 3 tokens apart, and windows of 4 tokens that an index chooses."""
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
            assert relative_error(found, whole) < 3e-5


@pytest.fixture(scope="module", params=list(EXECUTORS))
def alone(request, folder):
    """Options, and each prompt by each of SETTINGS by itself."""
    with numflow.load(folder, **EXECUTORS[request.param]) as model, numflow.Engine(model, prefix_cache=False) as engine:
        found = [[one.ids for one in engine.submit(prompt, **GREEDY, **own).results()]
                 for prompt in PROMPTS for own in SETTINGS]
    return EXECUTORS[request.param], found


@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"preemption": "recompute"}, {"max_step_tokens": 7}],
                         ids=str)
@pytest.mark.merge
def test_side_by_side(alone, folder, options):
    """Samples, beams, guesses, swapped and read again, begun where another text is known: each as by itself."""
    own, expected = alone
    with numflow.load(folder, **own) as model:
        if "preemption" in options:
            options = {**options, "kv_memory": 60 * model.program.block_bytes}
        with numflow.Engine(model, **options) as engine:
            for _ in range(2):  # the second time all prompts are in the prefix cache
                handles = [engine.submit(prompt, priority=number % 2, **GREEDY, **settings)
                           for number, (prompt, settings) in enumerate((p, s) for p in PROMPTS for s in SETTINGS)]
                assert [[one.ids for one in handle.results()] for handle in handles] == expected
