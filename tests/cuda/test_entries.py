"""DeepSeek V4, Qwen4-Exp and MiniMax-M3 on the simulator: entries of windows, an index over them, over means of keys or
over blocks of keys, streams that are balanced or gated by column, experts chosen by a table, hashed n-grams
(test_ngrams.py has their ops)."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import numflow
from numflow import network
from numflow.cuda.device.device import Simulated
from numflow.cuda.program import Program
from numflow.learn.cases.build import Case, error, run_case
from numflow.network import WeightSource
from numflow.reference.program import Program as Reference
from tests.cuda.small import CASES
from tests.specs.case import load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

BOUND = 1e-4
# New tokens of each sequence, run after run. Entries are of 4 and of 8 tokens, the window of 6.
SCHEDULES = {"ones": (((0, 1),),) * 10, "sevens": (((0, 7),), ((0, 2), (1, 7))),
             "together": (((0, 7), (1, 3)), ((1, 6), (0, 1)), ((0, 1), (1, 1)))}


def _model(name):
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return case, built, WeightSource(built, checkpoint)


@pytest.mark.parametrize("name", ["attention-entries-2-of-4-best-3", "attention-entries-1-of-1"])
def test_steps_of_entries(name):
    """Each op: pooling, storing, choosing and attention. More cases are in test_ops.py."""
    case = next(case for case in CASES if case.name == name)
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < case.bound


@pytest.mark.parametrize("name", ["index_select-5-of-3-heads", "attention-entries-2-of-4-best-3"])
def test_memory_of_an_index_and_of_entries(name):
    """Caches of the index and of entries in host memory are copied to the device like keys."""
    case = replace(next(case for case in CASES if case.name == name), schedule=(((0, 9), (1, 3)), ((1, 2), (0, 1))))
    found = []
    for percent in (0, 100):
        made = Program(case.network, case.weights, activations="f32", gpu=Simulated(), host_kv_percent=percent)
        first, second = (run.batch for run in case.runs(made.block_size))
        count = case.blocks(made.block_size)
        made.reserve(2 * count)
        made.run(first)
        made.copy_blocks(first.blocks[:, 0].tolist(), (first.blocks[:, 0] + count).tolist())
        second.blocks[:] += count
        found.append(made.run(second))
        made.close()
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pieces_and_company(schedule):
    _, built, weights = _model("deepseek_v4")
    case = Case("deepseek_v4", built, weights, SCHEDULES[schedule])
    actual = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    for a, e in zip(actual, run_case(case, Reference), strict=True):
        assert error(a, e) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prompt"), [
    ("deepseek_v4", 0), ("deepseek_v4_ratios", 0), ("deepseek_v4_heavy", 1), ("deepseek_v4_default_layers", 1),
    ("qwen4_exp", 1), ("qwen4_exp_multimodal", 1), ("qwen4_exp_plain", 1),
    ("minimax_m3_text_blocks", 0), ("minimax_m3_text_no_local", 0)])
def test_numbers_of_transformers(name, prompt):
    case, built, weights = _model(name)
    program = Program(built, weights, activations="f32", gpu=Simulated(seed=2))
    found = run(program, case.inputs[prompt]["ids"])[case.rows[prompt]["rows"]]
    assert relative_error(found, case.expected[f"logits_{prompt}"]) < BOUND
    program.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v4_default_layers", "qwen4_exp", "minimax_m3_text_blocks"])
def test_the_engine_s_tokens(tmp_path, name):
    """The tokens of the CPU: prompts in pieces, then token by token, with a known prefix, and with quantised keys."""
    case = load_case(name)
    save_file({name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.configs[0]))
    found = {}
    for backend, options in (("cpu", {"threads": 1}), ("cuda", {"gpu": "simulator"})):
        with numflow.load(tmp_path, backend=backend, activations="f32", kv="q8", chunk=5, **options) as model:
            found[backend] = model.logits([9, 8, 7, 30, 4, 66]), model.generate([9, 8, 7, 30], max_tokens=4).ids
    assert relative_error(found["cuda"][0], found["cpu"][0]) < BOUND
    assert found["cuda"][1] == found["cpu"][1]
