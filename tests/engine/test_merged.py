"""One softmax over a decoder's own keys and the encoder's: the same values for any chunks and in any batch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from tests.engine.beside import ENGINES, EXECUTORS, check_side_by_side, ids_alone
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

TEXT = [5 + (7 * i * i + i) % 190 for i in range(64)]
SOURCES = [TEXT[:20], TEXT, TEXT[30:33], TEXT[:20], [9]]
SETTINGS = [{}, {"decoder_ids": TEXT[3:40]}, {"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3},
            {"speculate": "ngram", "decoder_ids": [*TEXT[:9], *TEXT[:9]]}]


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
    """An executor, and each source by each of SETTINGS by itself."""
    return request.param, ids_alone(folder, request.param, SOURCES, SETTINGS)


@pytest.mark.parametrize("options", ENGINES, ids=str)
@pytest.mark.merge
def test_side_by_side(alone, folder, options):
    """Samples, beams, guesses, swapped and read again, begun where another text is known: each as by itself."""
    executor, expected = alone
    check_side_by_side(folder, executor, SOURCES, SETTINGS, options, expected,
                       lambda program: 12 * (program.block_bytes + program.cross_block_bytes))


def test_the_decoder_starts_with_the_token_that_begins_texts(folder):
    with numflow.load(folder, backend="reference") as model:
        first = model.generate(TEXT[:9], max_tokens=1, ignore_eos=True).ids
        assert first == [int(model.logits([2], encoder_ids=TEXT[:9])[0].argmax())]
