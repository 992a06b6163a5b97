"""Block tables by window: the same bits whether blocks that left a window are kept or reused."""

import numpy as np
import pytest

from numflow.cpu.program import Program
from numflow.cuda.program import Program as Cuda
from numflow.errors import RequestError
from numflow.network.describe import cache_bytes, cache_bytes_per_token
from numflow.network.windows import BLOCK, CHUNK, cache_windows, first_key, most_blocks, windows
from numflow.partition.cut.plan import single_device
from numflow.partition.price.price import Prices
from numflow.reference.program import Program as Reference
from tests.ops.windowed import HEAD_DIM, KV_HEADS, decoder, pieces, plain, tabled

WINDOW = 70
MAKERS = {
    "reference": lambda made: Reference(*made, block_size=16),
    "cpu f32": lambda made: Program(*made, kv_k="f32", kv_v="f32", threads=1),
    "cpu f16, threads": lambda made: Program(*made, kv_k="f16", kv_v="f16", threads=2),
    "cpu q4": lambda made: Program(*made, kv_k="q4", kv_v="q4", threads=1, activations="f32"),
}
SIMULATED = {
    "cuda f32": lambda made: Cuda(*made, gpu="simulator", activations="f32"),
    "cuda f16": lambda made: Cuda(*made, gpu="simulator", kv_type="f16"),
    "cuda on the host": lambda made: Cuda(*made, gpu="simulator", kv_type="f16", host_kv_percent=100),
}


def runs(make, batches, ring, window=WINDOW):
    """Logits of a sequence whose windowed layer has `ring` blocks of its own."""
    program = make(decoder((0, window)))
    size = program.block_size
    program.reserve(-(-1024 // size), 0, {window: ring} if ring else None)
    try:
        return np.concatenate([program.run(plain(at, n, size) if ring is None else tabled(at, n, size, window, ring))
                               for at, n in batches])
    finally:
        program.close()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("sizes", [(100, 1, 37), (1, 130, 64)])
def test_blocks_that_left_the_window_serve_again(kind, sizes):
    size = 16 if kind == "reference" else 64
    ring = most_blocks(WINDOW, 10**6, max(sizes), size)
    batches = list(pieces(900, sizes))
    np.testing.assert_array_equal(runs(MAKERS[kind], batches, ring), runs(MAKERS[kind], batches, None))


@pytest.mark.slow  # run by .ci/cuda
@pytest.mark.parametrize("kind", SIMULATED)
def test_blocks_that_left_the_window_serve_again_on_the_simulator(kind):
    batches = [(0, 66), (66, 8), (74, 1)]
    np.testing.assert_array_equal(runs(SIMULATED[kind], batches, 2, 8), runs(SIMULATED[kind], batches, None, 8))


def test_each_window_has_memory_of_its_own():
    for make in (MAKERS["reference"], MAKERS["cpu f16, threads"], SIMULATED["cuda f16"]):
        program = make(decoder((0, WINDOW, 0)))
        program.reserve(5)
        by_window = program.window_bytes
        assert by_window == {0: program.block_bytes * 2 // 3, WINDOW: program.block_bytes // 3}
        program.reserve(5, 0, {WINDOW: 2})
        if not isinstance(program, Reference):
            assert program.kv_bytes == 5 * by_window[0] + 2 * by_window[WINDOW]
        rng = np.random.default_rng(0)
        data = rng.integers(0, 50, (1, by_window[WINDOW]), dtype=np.uint8)
        kept = program.save_blocks([0, 1], 0)
        program.load_blocks([0], data, WINDOW)
        program.copy_blocks([0], [1], WINDOW)
        np.testing.assert_array_equal(program.save_blocks([1], WINDOW), data)
        np.testing.assert_array_equal(program.save_blocks([0, 1], 0), kept)
        program.close()


def test_tables_are_checked_where_they_are_read():
    program = MAKERS["cpu f32"](decoder((0, WINDOW)))
    program.reserve(20, 0, {WINDOW: 3})
    program.run(tabled(256, 10, 64, WINDOW, 3))
    batch = tabled(256, 10, 64, WINDOW, 3)
    batch.windows[WINDOW][0, 2] = 3
    with pytest.raises(RequestError, match=r"KV block 3 is out of range: it should be in 0 \.\. 2"):
        program.run(batch)
    program.close()


def test_a_cache_has_the_widest_window_of_its_readers():
    made, _ = decoder((0, 7, 9))
    assert list(cache_windows(made).values()) == [0, 7, 9] and windows(made) == (0, 7, 9)
    assert windows(decoder((5, 5))[0]) == (5,)


@pytest.mark.parametrize("size", [4, 16])
def test_the_most_blocks_that_a_window_takes(size):
    for window in (1, 2, 5, 16, 33):
        for chunk in (1, 3, 16, 40):
            most = 0
            for begin in range(200):  # blocks that left the window at the last block boundary are free again
                border = begin // size * size
                most = max(most, -(-(begin + chunk) // size) - first_key(max(window, 2), border) // size)
            assert most == most_blocks(window, 10**6, chunk, size)


def test_what_a_text_takes_is_foreseen():
    """In `inspect` and in the planner's price: the whole sequence in one layer, a window and a chunk in the other."""
    network, _ = decoder((0, WINDOW))
    size, most = 2 * 2 * KV_HEADS * HEAD_DIM, BLOCK * most_blocks(WINDOW, 10**6, CHUNK, BLOCK)
    assert cache_bytes_per_token(network) == size and WINDOW + CHUNK <= most <= WINDOW + CHUNK + 3 * BLOCK
    prices = Prices(single_device(network, ""), None)
    for tokens in (1, most, most + 1, 32768):
        assert cache_bytes(network, tokens) == size * (tokens + min(tokens, most))
        assert prices.cached_bytes(network, tokens) == cache_bytes(network, tokens)
        assert prices.cached_bytes(network, 4 * tokens, 4) == 4 * cache_bytes(network, tokens)
