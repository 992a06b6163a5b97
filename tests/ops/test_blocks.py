"""Moving KV blocks: a sequence continues in copied, swapped or grown blocks with the same results."""

import numpy as np
import pytest

from numflow.cpu.program import Program
from numflow.errors import RequestError
from numflow.ops import Batch
from numflow.reference.program import Program as Reference
from tests.cpu.test_program import decoder

SIZE = 64
KINDS = ["reference", *(f"cpu {k} {v}" for k, v in (("f32", "f32"), ("f16", "f16"), ("q8", "f16"), ("q3h", "q4")))]


def make(kind):
    if kind == "reference":
        program = Reference(*decoder(), block_size=SIZE)
    else:
        _, kv_k, kv_v = kind.split()
        program = Program(*decoder(), block_size=SIZE, kv_k=kv_k, kv_v=kv_v)
    program.reserve(8)
    return program


def run(program, start, count, blocks):
    """Logits of the last of `count` tokens from position `start` on, of a sequence in these blocks."""
    tokens = np.random.default_rng(5).integers(0, 50, 400, dtype=np.int32)[start:start + count]
    return np.array(program.run(Batch(tokens, np.arange(start, start + count, dtype=np.int32),
                                      np.array([0, count], np.int32), np.array([blocks], np.int32),
                                      np.array([count - 1], np.int32))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin(3)
def test_a_text_goes_on_in_other_blocks(kind):
    program = make(kind)
    run(program, 0, 100, [0, 1])
    expected = run(program, 100, 20, [0, 1])
    run(program, 0, 100, [0, 1])
    program.copy_blocks([1, 0], [5, 7])
    saved = program.save_blocks([0, 1])
    assert saved.dtype == np.uint8
    assert saved.shape == (2, program.block_bytes)
    np.testing.assert_array_equal(run(program, 100, 20, [0, 5]), expected)
    np.testing.assert_array_equal(run(program, 100, 20, [7, 1]), expected)
    for block in (0, 1, 5, 7):  # other content
        program.load_blocks([block], np.zeros((1, program.block_bytes), np.uint8))
    assert not np.array_equal(run(program, 100, 20, [0, 1]), expected)
    program.reserve(12)
    program.load_blocks([11, 2], saved)
    np.testing.assert_array_equal(run(program, 100, 20, [11, 2]), expected)
    np.testing.assert_array_equal(program.save_blocks([11])[0], saved[0])


@pytest.mark.merge
def test_a_block_takes_as_many_bytes_as_memory_grows():
    for kind in KINDS[1:]:
        program = make(kind)
        before = program.kv_bytes
        program.reserve(12)
        assert program.kv_bytes - before == 4 * program.block_bytes


def test_nothing_to_move():
    for kind in KINDS[:2]:
        program = make(kind)
        program.copy_blocks([], [])
        assert program.save_blocks([]).shape == (0, program.block_bytes)


def test_blocks_that_are_not_there():
    program = make("cpu f32 f32")
    for blocks in ([8], [-1]):
        with pytest.raises(RequestError, match=r"KV block -?\d is out of range: it should be in 0 \.\. 7"):
            program.save_blocks(blocks)
        with pytest.raises(RequestError, match="is out of range"):
            program.copy_blocks([0], blocks)
    with pytest.raises(RequestError, match=r"1 KV blocks are uint8 \[1, \d+\], not uint8 \[1, 3\]"):
        program.load_blocks([0], np.zeros((1, 3), np.uint8))
