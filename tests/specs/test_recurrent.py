"""Recurrent families and families whose layers share results: bit-identical however a text is split or batched."""

import numpy as np
import pytest

from numflow.cpu.program import Program
from numflow.network import WeightSource
from numflow.ops import Batch
from tests.specs.case import load_case
from tests.specs.test_families import network_of

NAMES = ("qwen3_5", "kimi_linear", "mamba2", "jamba", "nemotron_h_moe", "falcon_h1", "minimax", "zaya_local",
         "inkling_text", "longcat_flash_idle", "qwen4_exp")


def run(program, pieces):
    """Logits of one run. pieces: (ids, first position, slot) of each sequence; its keys are in block `slot`."""
    counts = [len(ids) for ids, _, _ in pieces]
    slots = np.array([slot for _, _, slot in pieces], np.int32)
    batch = Batch(tokens=np.concatenate([ids for ids, _, _ in pieces]).astype(np.int32),
                  positions=np.concatenate([first + np.arange(len(ids)) for ids, first, _ in pieces]).astype(np.int32),
                  starts=np.cumsum([0, *counts]).astype(np.int32), blocks=slots[:, None],
                  logit_rows=np.arange(sum(counts), dtype=np.int32), slots=slots)
    return np.split(program.run(batch), np.cumsum(counts)[:-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thin(2)
def test_bits_do_not_depend_on_the_cut_or_on_other_texts(name):
    built, checkpoint = network_of(name, 0)
    with_threads = [Program(built, WeightSource(built, checkpoint), activations="f32", threads=n) for n in (1, 2)]
    text, other = (np.array(given["ids"]) for given in load_case(name).inputs[::-1])
    for program in with_threads:
        program.reserve(3)
    (whole,) = (np.array(y) for y in run(with_threads[0], [(text, 0, 1)]))
    program = with_threads[1]
    for size in (1, 7):
        found = [np.array(run(program, [(text[at:at + size], at, 2)])[0]) for at in range(0, len(text), size)]
        np.testing.assert_array_equal(np.concatenate(found), whole)
    beside = [np.array(run(program, [(other, 0, 0), (text[:9], 0, 2)])[1]),
              np.array(run(program, [(text[9:20], 9, 2), (other[::-1], 0, 1)])[0]),
              np.array(run(program, [(text[20:], 20, 2)])[0])]
    np.testing.assert_array_equal(np.concatenate(beside), whole)
    for program in with_threads:
        program.close()
