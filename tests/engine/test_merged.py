"""One softmax over a decoder's own keys and the encoder's: the same values for any chunks and in any batch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

TEXT = [5 + (7 * i * i + i) % 190 for i in range(64)]
SOURCES = [TEXT[:20], TEXT, TEXT[30:33], TEXT[:20], [9]]
GREEDY = {"max_tokens": 12, "ignore_eos": True}
SETTINGS = [{}, {"decoder_ids": TEXT[3:40]}, {"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3},
            {"speculate": "ngram", "decoder_ids": [*TEXT[:9], *TEXT[:9]]}]
CPU = {"backend": "cpu", "activations": "f32", "threads": 1}
EXECUTORS = {"reference": {"backend": "reference", "block_size": 16}, "cpu": {**CPU, "threads": 2},
             "layers": {**CPU, "devices": "0;1"}, "tensors": {**CPU, "devices": "0&1"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of three layers, two of which see the last four of their own keys."""
    case, folder = load_case("t5gemma2"), tmp_path_factory.mktemp("merged")
    save_file({name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()},
              folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case.configs[0]))
    return folder


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.merge
def test_pieces_of_any_size_give_the_numbers_of_the_whole_text(folder, executor):
    case = load_case("t5gemma2")
    given, rows, expected = case.inputs[1], case.rows[1]["rows"], case.expected["logits_1"]
    with numflow.load(folder, **EXECUTORS[executor]) as model:
        whole = model.logits(TEXT, encoder_ids=TEXT[:50])
    for chunk in (1, 7, 64):
        with numflow.load(folder, chunk=chunk, **EXECUTORS[executor]) as model:
            found = model.logits(TEXT, encoder_ids=TEXT[:50])
            of_case = model.logits(given["decoder_ids"], encoder_ids=given["ids"])[rows]
            assert relative_error(of_case, expected) < 1e-4
        if executor != "reference":
            np.testing.assert_array_equal(found, whole)
        else:
            assert relative_error(found, whole) < 1e-5


@pytest.fixture(scope="module", params=list(EXECUTORS))
def alone(request, folder):
    """Options, and each source by each of SETTINGS by itself."""
    with numflow.load(folder, **EXECUTORS[request.param]) as model, numflow.Engine(model, prefix_cache=False) as engine:
        found = [[one.ids for one in engine.submit(source, **GREEDY, **own).results()]
                 for source in SOURCES for own in SETTINGS]
    return EXECUTORS[request.param], found


@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"preemption": "recompute"}, {"max_step_tokens": 7}],
                         ids=str)
@pytest.mark.merge
def test_side_by_side(alone, folder, options):
    """Samples, beams, guesses, swapped and read again, begun where another text is known: each as by itself."""
    own, expected = alone
    with numflow.load(folder, **own) as model:
        if "preemption" in options:
            options = {**options, "kv_memory": 12 * (model.program.block_bytes + model.program.cross_block_bytes)}
        with numflow.Engine(model, **options) as engine:
            for _ in range(2):  # the second time all prompts are in the prefix cache
                handles = [engine.submit(source, priority=number % 2, **GREEDY, **settings)
                           for number, (source, settings) in enumerate((p, s) for p in SOURCES for s in SETTINGS)]
                assert [[one.ids for one in handle.results()] for handle in handles] == expected
            assert engine.stats["preemptions"] > 0 or "preemption" not in options


def test_the_decoder_starts_with_the_token_that_begins_texts(folder):
    with numflow.load(folder, backend="reference") as model:
        first = model.generate(TEXT[:9], max_tokens=1, ignore_eos=True).ids
        assert first == [int(model.logits([2], encoder_ids=TEXT[:9])[0].argmax())]
