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
from numflow.cuda.lang.float4 import e2m1_values, mxfp4_scales, nvfp4_scales
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import sync_block, thread_index
from numflow.cuda.lang.kernel import HOPPER, REGISTRY, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.simulator import SimulatorError
from numflow.cuda.lang.tensor_memory import (
    LOADED,
    SCALES,
    after_barrier,
    allocate_columns,
    before_barrier,
    commit_products,
    copy_scales,
    free_columns,
    load_tensor,
    multiply_e4m3,
    multiply_e5m2,
    multiply_mxfp4,
    multiply_nvfp4,
    relinquish_columns,
)
from numflow.cuda.lang.warpgroup import ALIGNMENT, TILE_WORDS, tile_place
from numflow.cuda.linear.tensor_memory_gemm import tensor_memory_gemm
from numflow.cuda.program import Program
from numflow.cuda.weights.operand_float4 import tensor_operand
from numflow.errors import DeviceError
from numflow.learn.cases.build import error, run_case
from numflow.quant.hub_types import TABLES
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import FLOAT4, experts_case, linear_case, of_float4, of_float8

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


@pytest.mark.parametrize(("multiply", "scales_of", "count"), [
    (multiply_nvfp4, nvfp4_scales, 8), (multiply_mxfp4, mxfp4_scales, 4)])
def test_tiles_of_4_bit_floats(multiply, scales_of, count):
    """Scale words of 64 columns of 128 rows: first those of the left tile, twice 128 words, then those of the right."""
    words, loaded = SharedArray(u32, 4 * TILE_WORDS + 516, ALIGNMENT), LocalArray(f32, LOADED)
    done, where = 4 * TILE_WORDS + 512, 4 * TILE_WORDS + 514

    @kernel(f"_tensor_{multiply.name}", 128, target="sm_100a")
    def _product(y: f32.ptr, x: u32.ptr):
        thread, tile, values = u32(thread_index()), words(), loaded()
        for part in range(4):
            for i in range(4):
                tile[tile_place(thread, part) + i] = x[16 * thread + 4 * part + i]
                tile[2 * TILE_WORDS + tile_place(thread, part) + i] = x[16 * (thread + 128) + 4 * part + i]
        for i in range(4):
            tile[4 * TILE_WORDS + 128 * i + 4 * (thread & 31) + (thread >> 5)] = x[4096 + 128 * i + thread]
        if thread < 32:
            allocate_columns(tile, where, 256)
        if thread == 0:
            begin_count(tile, done, 1)
        sync_block()
        address = u32(tile[where])
        if thread == 0:
            for i in range(4):
                copy_scales(address + 128 + SCALES * i, tile, 4 * TILE_WORDS + 128 * i)
            multiply(address, tile, 0, tile, 2 * TILE_WORDS, address + 128, address + 128 + 2 * SCALES, 0)
            commit_products(tile, done)
        sync_block()
        wait_turn(tile, done, 0)
        for part in range(128 // LOADED):
            load_tensor(values, address + (thread // 32 << 21) + LOADED * part)
            for i in range(LOADED):
                y[128 * thread + LOADED * part + i] = values[i]
        sync_block()
        if thread < 32:
            free_columns(address, 256)

    rng, device = np.random.default_rng(0), Simulated(seed=3)
    x = rng.integers(0, 1 << 32, 4096 + 512, np.uint32)
    x[4096:] = rng.integers(100, 120, (512, 4), np.uint8).view(np.uint32)[:, 0]
    given, result = device.alloc(x.nbytes), device.alloc(128 * 128 * 4)
    device.upload(given.at(), x)
    device.launch(Launch(_product, (1, 1, 1), (result.at(), given.at())))
    found = device.download(result.at(), result.nbytes).view(np.float32).reshape(128, 128)
    scales = scales_of(x[4096:].reshape(2, 2, 128)).transpose(0, 2, 1, 3).reshape(2, 128, count)
    left, right = (e2m1_values(x[2048 * i:2048 * i + 2048]).reshape(128, 128) * np.repeat(scales[i], 128 // count, 1)
                   for i in range(2))
    np.testing.assert_allclose(found, left @ right.T, rtol=1e-4, atol=1e-4 * np.abs(left @ right.T).max())


@pytest.mark.parametrize(("kind", "n", "k", "tokens", "tma"), [
    ("E4M3_ROW", 20, 96, 70, True),
    *(pytest.param(*case, tma, marks=pytest.mark.slow) for tma in (True, False) for case in (
        ("E4M3_128", 260, 256, 130), ("E5M2_128", 130, 640, 66), ("E4M3_128", 20, 2048, 66)))])
@pytest.mark.merge
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "tokens", "tma"), [
    ("E2M1_ROW", 20, 160, 66, True), ("NVFP4", 260, 256, 130, True), ("NVFP4", 20, 256, 66, False),
    ("MXFP4", 40, 416, 70, True)])
def test_products_of_4_bit_floats(kind, n, k, tokens, tma):
    """Columns that end within a tile; a few tokens use int8, as with other activations."""
    case = of_float4(linear_case(kind, n, k, tokens, bias=True), k, FLOAT4[kind])
    case, device = replace(case, schedule=(((0, tokens),), ((0, 3),))), Simulated(seed=1, tcgen05=True, tma=tma)
    found = zip(run_case(case, Program, gpu=device, activations="nvfp4"), run_case(case, Reference), (2e-5, 0.05))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
def test_products_of_experts_of_4_bit_floats():
    case = of_float4(replace(experts_case("E2M1_ROW", 40, 128, experts=2, chosen=1, bias=True),
                             schedule=(((0, 150),),)), 128, "nvfp4")
    (actual,) = run_case(case, Program, gpu=Simulated(seed=2, tcgen05=True), activations="nvfp4")
    assert error(actual, run_case(case, Reference)[0]) < 2e-5


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
    (lambda tile, values, at: copy_scales(at + 126, tile, 0), "columns 510 .. 513"),
    (lambda tile, values, at: copy_scales(at, tile, 2), "is not aligned"),
    (lambda tile, values, at: multiply_nvfp4(at, tile, 0, tile, 0, at, 8, 0), "columns 8 .. 15 of tensor memory"),
    (lambda tile, values, at: multiply_mxfp4(at, tile, 0, tile, 0, 8, at, 0), "columns 8 .. 15 of tensor memory"),
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
@pytest.mark.merge
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
    cards = (8, 9), HOPPER, (10, 0), (10, 3), (12, 0)
    for one in (tensor_memory_gemm("e4m3_row", "e4m3", tma=True), tensor_operand("nvfp4")):
        assert [one.architecture(card) for card in cards if one.runs_on(card)] == ["sm_100a", "sm_103a"]
