"""Products in tensor memory (tcgen05) on the simulator, against the reference; errors that the simulator reports.

They run from their PTX in on_ptx (jobs with "-tcgen05"); test_sass checks the machine code.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.cluster import begin_count, wait_turn
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import sync_block, thread_index
from numflow.cuda.lang.kernel import HOPPER, REGISTRY, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import SimulatorError
from numflow.cuda.lang.tensor_memory import (
    LOADED,
    after_barrier,
    allocate_columns,
    before_barrier,
    commit_products,
    free_columns,
    load_tensor,
    multiply_e4m3,
    multiply_e5m2,
    relinquish_columns,
)
from numflow.cuda.lang.warpgroup import ALIGNMENT, TILE_WORDS, tile_place
from numflow.cuda.linear.tensor_memory_gemm import tensor_memory_gemm
from numflow.cuda.program import Program
from numflow.errors import DeviceError
from numflow.learn.cases.build import error, run_case
from numflow.quant.hub_types import TABLES
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import experts_case, linear_case, of_float8

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

DONE, ADDRESS = 4 * TILE_WORDS, 4 * TILE_WORDS + 2    # words of an mbarrier and of an address, after two tiles


@pytest.mark.parametrize(("multiply", "kind"), [(multiply_e4m3, "e4m3"), (multiply_e5m2, "e5m2")])
def test_tiles(multiply, kind):
    """Two products: the first replaces what is in tensor memory, the second one is added."""
    words, loaded = SharedArray(u32, 4 * TILE_WORDS + 4, ALIGNMENT), LocalArray(f32, LOADED)

    @kernel(f"_tensor_{kind}", 128, target="sm_100a")
    def _product(y: f32.ptr, x: u32.ptr):
        thread, tile, values = u32(thread_index()), words(), loaded()
        for part in range(4):
            for i in range(4):
                tile[tile_place(thread, part) + i] = x[16 * thread + 4 * part + i]
                tile[2 * TILE_WORDS + tile_place(thread, part) + i] = x[16 * (thread + 128) + 4 * part + i]
        if thread < 32:
            allocate_columns(tile, ADDRESS, 128)
            relinquish_columns()
        if thread == 0:
            begin_count(tile, DONE, 1)
        before_barrier()
        sync_block()
        after_barrier()
        address = u32(tile[ADDRESS])
        if thread == 0:
            multiply(address, tile, 0, tile, 2 * TILE_WORDS, 0)
            multiply(address, tile, 0, tile, 2 * TILE_WORDS, 1)
            commit_products(tile, DONE)
        sync_block()
        wait_turn(tile, DONE, 0)
        after_barrier()
        for part in range(128 // LOADED):
            load_tensor(values, address + (thread // 32 << 21) + LOADED * part)
            for i in range(LOADED):
                y[128 * thread + LOADED * part + i] = values[i]
        before_barrier()
        sync_block()
        if thread < 32:
            free_columns(address, 128)

    rng, device = np.random.default_rng(0), Simulated(seed=3)
    x = rng.integers(0, 120, (256, 64), np.uint8) | rng.integers(0, 2, (256, 64), np.uint8) << 7
    given, result = device.alloc(x.nbytes), device.alloc(128 * 128 * 4)
    device.upload(given.at(), x.view(np.uint32))
    device.launch(Launch(_product, (1, 1, 1), (result.at(), given.at())))
    found = device.download(result.at(), result.nbytes).view(np.float32).reshape(128, 128)
    expected = 2 * TABLES[kind][x[:128]] @ TABLES["e4m3"][x[128:]].T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "n", "k", "tokens", "tma"), [
    ("E4M3_ROW", 20, 96, 70, True),
    *(pytest.param(*case, tma, marks=pytest.mark.slow) for tma in (True, False) for case in (
        ("E4M3_128", 260, 256, 130), ("E5M2_128", 130, 640, 66), ("E4M3_128", 20, 2112, 66)))])
def test_products_of_8_bit_floats(kind, n, k, tokens, tma):
    """Columns with half a tile left over and in parts, block scales and row scales; few tokens are computed as with
    other activations."""
    case, device = of_float8(linear_case(kind, n, k, tokens, bias=True), k), Simulated(seed=1, tcgen05=True, tma=tma)
    case = replace(case, schedule=(((0, tokens),), ((0, 3),), ((0, 20),)))
    found = zip(run_case(case, Program, gpu=device, activations="fp8"), run_case(case, Reference), (2e-5, 1e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
def test_products_of_experts_of_8_bit_floats():
    case = of_float8(replace(experts_case("E4M3_128", 40, 128, experts=2, chosen=1, bias=True),
                             schedule=(((0, 150),), ((0, 9),))), 128)
    found = zip(run_case(case, Program, gpu=Simulated(seed=2, tcgen05=True), activations="fp8"),
                run_case(case, Reference), (2e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


def _one_warp(body):
    """A kernel of one warp, which frees its 128 columns; `body` runs after the allocation."""
    memory, loaded = SharedArray(u32, 4 * TILE_WORDS + 4, ALIGNMENT), LocalArray(f32, LOADED)

    def _alone(x: u32.ptr):
        tile, values = memory(), loaded()
        allocate_columns(tile, ADDRESS, 128)
        if thread_index() == 0:
            begin_count(tile, DONE, 1)
        sync_block()
        body(tile, values, int(tile[ADDRESS]))
        free_columns(tile[ADDRESS], 128)

    device = Simulated()
    REGISTRY.pop("_alone", None)
    device.launch(Launch(kernel("_alone", 32)(_alone), (1, 1, 1), (device.alloc(256).at(),)))


def _start(tile, address):
    if thread_index() == 0:
        multiply_e4m3(address, tile, 0, tile, 0, 0)
    sync_block()


@pytest.mark.parametrize(("body", "message"), [
    (lambda tile, values, at: load_tensor(values, 0), "columns 0 .. 31 of tensor memory are not allocated"),
    (lambda tile, values, at: multiply_e4m3(at + 1, tile, 0, tile, 0, 0), "columns 385 .. 512"),
    (lambda tile, values, at: multiply_e4m3(1 << 21 | at, tile, 0, tile, 0, 0), "a product in lane 32"),
    (lambda tile, values, at: load_tensor(values, 1 << 21 | at), "warp 0 reads tensor memory from lane 32"),
    (lambda tile, values, at: allocate_columns(tile, ADDRESS, 96), "96 columns of tensor memory cannot be allocated"),
    (lambda tile, values, at: allocate_columns(tile, ADDRESS, 512), "512 columns of tensor memory cannot"),
    (lambda tile, values, at: (relinquish_columns(), allocate_columns(tile, ADDRESS, 32)), "permit was relinquished"),
    (lambda tile, values, at: allocate_columns(tile, ADDRESS + 1, 32), "32 columns of tensor memory are not freed"),
    (lambda tile, values, at: (_start(tile, at), load_tensor(values, at)), "while products into them are pending"),
    (lambda tile, values, at: _start(tile, at), "freed while products are pending"),
    (lambda tile, values, at: wait_turn(tile, DONE, 0), "waits for turn 0"),
    (lambda tile, values, at: (commit_products(tile, DONE), commit_products(tile, DONE + 2)), "no count was made")])
def test_what_no_product_may(body, message):
    with pytest.raises(SimulatorError, match=re.escape(message)):
        _one_warp(body)


class Blackwell(FakeDriver):
    """A driver with a GPU of compute capability 10.0, which notes the names of kernels."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=10,
                                         CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0)

    def __init__(self):
        super().__init__()
        self.names = []

    def cuLaunchKernel(self, name, *values):
        self.names.append(name)
        return super().cuLaunchKernel(name, *values)


@pytest.mark.parametrize("tma", ["1", "0"])
@pytest.mark.thin(2)
def test_a_launch(tma, monkeypatch):
    monkeypatch.setenv("NUMFLOW_CUDA_TMA", tma)
    told, case = Blackwell(), of_float8(linear_case("E4M3_ROW", 8, 64, 65), 64)
    (actual,) = run_case(case, Program, gpu=Gpu(told, 0, fake_binary), activations="fp8")
    assert "tcgen05_e4m3_row_float8" + "_tma" * (tma == "1") in told.names
    assert error(actual, run_case(case, Reference)[0]) < 2e-5


def test_without_its_kernels(monkeypatch):
    monkeypatch.setenv("NUMFLOW_CUDA_TCGEN05", "0")
    case = linear_case("E4M3_ROW", 8, 64, 65)
    with pytest.raises(DeviceError, match="activations fp8 needs a GPU"):
        Program(case.network, case.weights, gpu=Gpu(Blackwell(), 0, fake_binary), activations="fp8")


def test_cards_that_have_it():
    """Compute capability 10.x, by an assembly of its own for each minor version."""
    product = tensor_memory_gemm("e4m3_row", tma=True)
    cards = (8, 9), HOPPER, (10, 0), (10, 3), (12, 0)
    assert [product.architecture(card) for card in cards if product.runs_on(card)] == ["sm_100a", "sm_103a"]
