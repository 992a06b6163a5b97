"""Qwen4-Exp on the simulator: hashed n-grams, gates of the columns of residual streams, an index of means of keys."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from numflow import network
from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import Case, error, run_case
from numflow.learn.cases.cases import CASES
from numflow.network import WeightSource
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import embed_ids_case
from tests.specs.case import load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

BOUND = 1e-4


def _model(name):
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return case, built, WeightSource(built, checkpoint)


@pytest.mark.parametrize("host", [False, True])
def test_rows_of_ngrams(host):
    for case in (case for case in CASES if case.name.startswith("embed_ids")):
        actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1), host_embeddings=host)
        for a, e in zip(actual, run_case(case, Reference), strict=True):
            np.testing.assert_array_equal(a, e)


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("kind", ["q4", "q3h+0.5%", "BF16"])
def test_rows_of_stored_types(kind, host):
    case = embed_ids_case(kind, 64)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1), host_embeddings=host)
    assert error(actual, run_case(case, Reference)[0]) < 1e-6


@pytest.mark.slow
def test_pieces_and_company():
    """Windows of four tokens, taps of a convolution and n-grams across the ends of pieces."""
    _, built, weights = _model("qwen4_exp")
    case = Case("qwen4_exp", built, weights, (((0, 7), (1, 3)), ((1, 6), (0, 1)), ((0, 1), (1, 1))))
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen4_exp", "qwen4_exp_multimodal", "qwen4_exp_plain"])
def test_numbers_of_transformers(name):
    case, built, weights = _model(name)
    program = Program(built, weights, activations="f32", gpu=Simulated(seed=2))
    found = run(program, case.inputs[1]["ids"])[case.rows[1]["rows"]]
    assert relative_error(found, case.expected["logits_1"]) < BOUND
    program.close()


@pytest.mark.slow
def test_the_engine_s_tokens(tmp_path):
    """The tokens of the CPU: prompts in pieces, then token by token, with a known prefix, and with quantised keys."""
    case = load_case("qwen4_exp")
    save_file({name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.configs[0]))
    found = {}
    for backend, options in (("cpu", {"threads": 1}), ("cuda", {"gpu": "simulator"})):
        with numflow.load(tmp_path, backend=backend, activations="f32", kv="q8", chunk=5, **options) as model:
            found[backend] = model.logits([9, 8, 7, 30, 4, 66]), model.generate([9, 8, 7, 30], max_tokens=4).ids
    assert relative_error(found["cuda"][0], found["cpu"][0]) < BOUND
    assert found["cuda"][1] == found["cpu"][1]
