"""KV block allocator and block tables."""

import numpy as np
import pytest

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.errors import RequestError


def test_low_ids_first_and_freed_ones_again():
    allocator = BlockAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert (first, second, allocator.free, allocator.used) == ([0, 1], [2, 3], 1, 4)
    allocator.release(first)
    assert allocator.allocate(3) == [0, 1, 4]


def test_growing_keeps_what_is_held():
    allocator = BlockAllocator(2)
    held = allocator.allocate(2)
    allocator.grow(4)
    assert allocator.allocate(2) == [2, 3]
    allocator.grow(1)
    assert (allocator.capacity, allocator.used, held) == (4, 4, [0, 1])


def test_too_many_blocks_are_refused_and_nothing_is_taken():
    allocator = BlockAllocator(3)
    allocator.allocate(1)
    with pytest.raises(RequestError, match="3 KV blocks are needed and 2 of 3 are free"):
        allocator.allocate(3)
    assert allocator.free == 2


@pytest.mark.parametrize("blocks", [[0], [1, 1], [7]])
def test_a_block_is_released_once(blocks):
    allocator = BlockAllocator(3)
    allocator.release(allocator.allocate(1))
    allocator.allocate(1)
    allocator.release([0])
    with pytest.raises(ValueError, match="not all in use"):
        allocator.release(blocks)


def test_tables_hold_just_enough():
    allocator = BlockAllocator(8)
    table = BlockTable(allocator, block_size=4)
    for tokens, blocks in ((1, 1), (4, 1), (5, 2), (16, 4), (3, 4)):
        table.extend(tokens)
        assert len(table.blocks) == blocks
    assert (table.missing(16), table.missing(17)) == (0, 1)
    table.release()
    table.release()
    assert (table.blocks, allocator.used) == ([], 0)


def test_a_shared_block_is_free_when_its_last_holder_has_left():
    allocator = BlockAllocator(6)
    table = BlockTable(allocator, block_size=4)
    table.extend(11)
    full, whole = table.fork(2), table.fork()
    assert (full.blocks, whole.blocks, allocator.used) == ([0, 1], [0, 1, 2], 3)
    full.extend(11)
    assert (full.blocks, allocator.free) == ([0, 1, 3], 2)
    table.release()
    assert allocator.used == 4
    whole.release()
    assert (allocator.used, allocator.allocate(1)) == (3, [2])
    full.release()
    assert allocator.used == 1
    with pytest.raises(ValueError, match="not all in use"):
        allocator.share([0])


def test_a_block_that_is_not_shared_has_one_holder():
    rng, allocator, held = np.random.default_rng(0), BlockAllocator(20), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.integers(len(held))))
        else:
            count = int(rng.integers(0, 6))
            if count > allocator.free:
                allocator.grow(allocator.capacity + count)
            held.append(allocator.allocate(count))
        flat = [block for blocks in held for block in blocks]
        assert len(flat) == len(set(flat)) == allocator.used
        assert allocator.used + allocator.free == allocator.capacity
