"""Products on Hopper's tensor cores: on the simulator against the reference, and launched by a fake driver.

They run from their PTX in on_ptx (jobs named "-hopper"); test_sass checks the machine code.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.cluster import (
    arrive_at,
    begin_count,
    cluster_rank,
    cluster_size,
    copy_bulk,
    expect_bytes,
    share_bulk,
    show_counts,
    sync_cluster,
    turn_is_over,
    wait_turn,
)
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    copy_async,
    copy_commit,
    copy_wait,
    copy_wait_older,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import HOPPER, REGISTRY, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import SimulatorError
from numflow.cuda.lang.warpgroup import (
    ALIGNMENT,
    SUMS,
    begin_tiles,
    fence_tiles,
    multiply_tiles_bf16,
    multiply_tiles_e4m3,
    multiply_tiles_e5m2,
    multiply_tiles_f16,
    send_tiles,
    tile_place,
    wait_older_tiles,
    wait_tiles,
)
from numflow.cuda.linear.wgmma_gemm import cluster_for, wgmma_gemm
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.errors import DeviceError
from numflow.learn.cases.build import error, run_case
from numflow.quant.hub_types import TABLES
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import experts_case, linear_case, of_float8

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


class Told(FakeDriver):
    """A driver that notes the names of kernels, and which of them need more than 48 KB of shared memory."""

    def __init__(self):
        super().__init__()
        self.names, self.asked = [], []

    def cuFuncSetAttribute(self, name, which, value):
        self.asked.append(name)
        return super().cuFuncSetAttribute(name, which, value)

    def cuLaunchKernel(self, name, *values):
        self.names.append(name)
        return super().cuLaunchKernel(name, *values)


@pytest.mark.parametrize(("multiply", "kind"), [(multiply_tiles_f16, "f16"), (multiply_tiles_bf16, "bf16"),
                                                (multiply_tiles_e4m3, "e4m3"), (multiply_tiles_e5m2, "e5m2")])
def test_tiles(multiply, kind):
    """Accumulators of one warpgroup: one tile is multiplied while the copy of the next one may be in flight."""
    words, places, sums = SharedArray(u32, 192 * 16, ALIGNMENT), SharedArray(u32, 4), LocalArray(f32, 2 * SUMS)

    @kernel(f"_tiles_{kind}", 128, target="sm_90a")
    def _product(y: f32.ptr, x: u32.ptr):
        thread, tile, acc, other = u32(thread_index()), words(), sums(), places()
        for i in range(2 * SUMS):
            acc[i] = f32(1)
        for i in range(6):
            at = u32(thread + 128 * i)
            row, part = at >> u32(2), at & u32(3)
            inside = u32(64 * 16 + tile_place(row - 64, part)) if row >= 64 else tile_place(row, part)
            copy_async(tile, inside, x, u32(4 * at))
        copy_commit()
        copy_async(other, 0, x, 0)
        copy_commit()
        copy_wait_older()
        fence_tiles()
        sync_block()
        begin_tiles()
        multiply(acc, SUMS, tile, 0, tile, 64 * 16)
        send_tiles()
        wait_older_tiles()
        wait_tiles(acc)
        copy_wait()
        for i in range(SUMS):
            y[thread * SUMS + i] = acc[SUMS + i]

    rng, device = np.random.default_rng(0), Simulated(seed=3)
    x = rng.standard_normal((192, 32)).astype(np.float16)
    if kind in TABLES:
        x = rng.integers(0, 120, (192, 64), np.uint8) | rng.integers(0, 2, (192, 64), np.uint8) << 7
        numbers = np.concatenate([TABLES[kind][x[:64]], TABLES["e4m3"][x[64:]]])
    elif kind == "bf16":
        x = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        numbers = (x.astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = x.astype(np.float32)
    given, result = device.alloc(x.nbytes), device.alloc(128 * SUMS * 4)
    device.upload(given.at(), x.view(np.uint32))
    device.launch(Launch(_product, (1, 1, 1), (result.at(), given.at())))
    found = device.download(result.at(), result.nbytes).view(np.float32).reshape(4, 32, SUMS)
    warp, lane, i = np.ogrid[:4, :32, :SUMS]
    rows, columns = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
    expected = 1 + numbers[:64] @ numbers[64:].T
    np.testing.assert_allclose(found, expected[rows, columns], rtol=1e-4, atol=1e-4 * max(1, np.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("F16", 20, 256, 70), ("BF16", 300, 64, 66), ("q4", 270, 512, 140), ("q3h", 40, 1056, 130), ("Q6_K", 130, 256, 129),
    ("Q4_K", 20, 256, 65)])
def test_products(kind, n, k, tokens):
    """Numbers of rows and tokens that do not fill tiles, columns in parts, parts of a single tile."""
    case = linear_case(kind, n, k, tokens, bias=True)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < (1e-2 if kind == "BF16" else 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("E4M3_ROW", 20, 96, 70), ("E4M3_128", 260, 256, 130), ("E5M2_128", 130, 640, 66)])
def test_products_of_8_bit_floats(kind, n, k, tokens, tma):
    """Columns with half a tile left over, block scales and row scales; few tokens are computed as with other
    activations."""
    case, device = of_float8(linear_case(kind, n, k, tokens, bias=True), k), Simulated(seed=1, wgmma=True)
    device.tma = tma
    case = replace(case, schedule=(((0, tokens),), ((0, 3),), ((0, 20),)))
    found = zip(run_case(case, Program, gpu=device, activations="fp8"), run_case(case, Reference), (2e-5, 1e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
def test_products_of_experts_of_8_bit_floats():
    case = of_float8(replace(experts_case("E4M3_128", 40, 128, experts=2, chosen=1, bias=True),
                             schedule=(((0, 150),), ((0, 9),))), 128)
    found = zip(run_case(case, Program, gpu=Simulated(seed=2, wgmma=True), activations="fp8"),
                run_case(case, Reference), (2e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "q4"])
def test_products_of_experts(kind):
    case = replace(experts_case(kind, 40, 64, experts=2, chosen=1, bias=True), schedule=(((0, 150),),))
    (actual,) = run_case(case, Program, gpu=Simulated(seed=2, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


@pytest.mark.parametrize("variable, name", [("TMA=1", "wgmma_f16_tma"), ("TMA=0", "wgmma_f16"),
                                            ("WGMMA=0", "gemm_f16_128")])
@pytest.mark.merge
def test_a_launch(variable, name, monkeypatch):
    """The driver is asked once for the kernel's shared memory, unless the kernel is disabled."""
    monkeypatch.setenv(*f"NUMFLOW_CUDA_{variable}".split("="))
    told, case = Told(), linear_case("F16", 8, 64, 65)
    (actual,) = run_case(case, Program, gpu=Gpu(told, 0, fake_binary))
    assert name in told.names and told.asked == [name] * name.startswith("wgmma")
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


@pytest.mark.parametrize(("n", "tma", "blocks"), [
    (256, True, 1), (512, True, 2), (700, True, 1), (2304, True, 2), (512, False, 1)])
def test_clusters(n, tma, blocks):
    """Two blocks share tokens if the number of row tiles is even, or so large that one more tile costs little."""
    device = Simulated(wgmma=True, tma=tma)
    assert cluster_for(device, n, 128, False) == blocks
    assert cluster_for(device, n, 64, False) == cluster_for(device, n, 128, True) == 1


def test_a_launch_of_clusters():
    """In a graph and outside, the grid has whole clusters for any number of rows."""
    case = linear_case("F16", 2100, 64, 65, fill="blank")
    device = Notebook(wgmma=True)
    program = Program(case.network, case.weights, gpu=device)
    (found,) = (work for work in program.launches(Sizes((65, 65, 65, 1), 1)) if "wgmma" in work.kernel.name)
    assert (found.cluster, found.grid[0]) == (2, 10)
    with pytest.raises(DeviceError, match="9 blocks are not whole clusters of 2"):
        replace(found, grid=(9, 1, 1)).check()


def test_counts_and_bulk_copies():
    """On the simulator, a block copies two tiles for itself in turn, to one buffer."""
    memory = SharedArray(u32, 64)

    @kernel("_bring", 64, target="sm_90a")
    def _bring(y: u32.ptr, x: u32.ptr):
        thread, tile, turn = u32(thread_index()), memory(), u32(0)
        if thread == 0:
            begin_count(tile, 32, u32(1))
            begin_count(tile, 34, cluster_size())
            show_counts()
        sync_cluster()
        while turn < 2:
            if thread == 0:
                arrive_at(tile, 34, cluster_rank())
                wait_turn(tile, 34, turn)
                expect_bytes(tile, 32, u32(128))
                copy_bulk(tile, 0, x, u32(32 * turn), u32(64), 32)
                share_bulk(tile, 16, x, u32(32 * turn + 16), u32(64), 32, u32(1))
            sync_block()
            if turn_is_over(tile, 32, turn) != 0 and thread < 32:
                y[32 * turn + thread] = tile[31 - thread]
            sync_block()
            turn = u32(turn + 1)

    device, x = Simulated(seed=5), np.arange(64, dtype=np.uint32)
    given, result = device.alloc(x.nbytes), device.alloc(x.nbytes)
    device.upload(given.at(), x)
    device.launch(Launch(_bring, (1, 1, 1), (result.at(), given.at())))
    found = device.download(result.at(), x.nbytes).view(np.uint32)
    assert found.tolist() == [*range(31, -1, -1), *range(63, 31, -1)]


def _one_thread(body):
    """A kernel whose body one thread of a block runs, with shared and global memory."""
    memory = SharedArray(u32, 64)

    def _alone(x: u32.ptr):
        tile = memory()
        if thread_index() == 0:
            body(tile, x)

    device = Simulated()
    REGISTRY.pop("_alone", None)
    device.launch(Launch(kernel("_alone", 32)(_alone), (1, 1, 1), (device.alloc(256).at(),)))


@pytest.mark.parametrize(("body", "message"), [
    (lambda tile, x: begin_count(tile, 1, 1), "a count at the odd place 1"),
    (lambda tile, x: expect_bytes(tile, 2, 16), "no count was made at 2"),
    (lambda tile, x: (begin_count(tile, 0, 1), copy_bulk(tile, 4, x, 0, 24, 0)), "a bulk copy of 24 bytes"),
    (lambda tile, x: (begin_count(tile, 0, 1), copy_bulk(tile, 5, x, 0, 16, 0)), "is not aligned"),
    (lambda tile, x: (begin_count(tile, 0, 1), copy_bulk(tile, 4, x, 60, 32, 0)), "accessed at 60 .. 67"),
    (lambda tile, x: (begin_count(tile, 0, 1), share_bulk(tile, 4, x, 0, 16, 0, 3)), "blocks 11 of a cluster of one"),
    (lambda tile, x: (begin_count(tile, 0, 1), arrive_at(tile, 0, 1)), "block 1 of a cluster of one"),
    (lambda tile, x: (begin_count(tile, 0, 1), wait_turn(tile, 0, 0)), "waits for turn 0 of the count at 0"),
    (lambda tile, x: (begin_count(tile, 0, 1), expect_bytes(tile, 0, 16), expect_bytes(tile, 0, 16)), "more threads"),
    (lambda tile, x: (begin_count(tile, 0, 1), expect_bytes(tile, 0, 32), copy_bulk(tile, 4, x, 0, 16, 0),
                      wait_turn(tile, 0, 0)), "not all bytes are on their way")])
def test_what_no_bulk_copy_may(body, message):
    with pytest.raises(SimulatorError, match=re.escape(message)):
        _one_thread(body)


def test_cards_that_have_it():
    assert wgmma_gemm("f16", tma=True).runs_on(HOPPER)
    assert wgmma_gemm("f16").architecture(HOPPER) == "sm_90a"
    assert not any(wgmma_gemm("f16").runs_on(other) for other in ((8, 0), (8, 9), (10, 0), (12, 0)))
