"""Products on Hopper's tensor cores: on the simulator against the reference, and as the driver launches them.

From their PTX they run in on_ptx (jobs of "-hopper"); test_sass looks at the machine code."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    copy_async,
    copy_commit,
    copy_wait,
    copy_wait_older,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import HOPPER, kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.lang.warpgroup import (
    ALIGNMENT,
    SUMS,
    begin_tiles,
    fence_tiles,
    multiply_tiles_bf16,
    multiply_tiles_f16,
    send_tiles,
    tile_place,
    wait_older_tiles,
    wait_tiles,
)
from numflow.cuda.linear.wgmma_gemm import wgmma_gemm
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import experts_case, linear_case

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


class Told(FakeDriver):
    """Keeps the names of kernels, and which of them asked for more shared memory."""

    def __init__(self):
        super().__init__()
        self.names, self.asked = [], []

    def cuFuncSetAttribute(self, name, which, value):
        self.asked.append(name)
        return super().cuFuncSetAttribute(name, which, value)

    def cuLaunchKernel(self, name, *values):
        self.names.append(name)
        return super().cuLaunchKernel(name, *values)


@pytest.mark.parametrize(("multiply", "bfloat"), [(multiply_tiles_f16, False), (multiply_tiles_bf16, True)])
def test_tiles(multiply, bfloat):
    """Sums of one warpgroup: copied tiles, of which one is multiplied while another one may still be on its way."""
    words, places, sums = SharedArray(u32, 192 * 16, ALIGNMENT), SharedArray(u32, 4), LocalArray(f32, 2 * SUMS)

    @kernel(f"_tiles_{bfloat}", 128, hopper=True)
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
    if bfloat:
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
    np.testing.assert_allclose(found, expected[rows, columns], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("F16", 20, 256, 70), ("BF16", 300, 64, 66), ("q4", 270, 512, 140), ("q3h", 40, 1056, 130), ("Q6_K", 130, 256, 129),
    ("Q4_K", 20, 256, 65)])
def test_products(kind, n, k, tokens):
    """Rows and tokens beyond a tile and fewer, columns in parts, parts of a single tile."""
    case = linear_case(kind, n, k, tokens, bias=True)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < (1e-2 if kind == "BF16" else 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "q4"])
def test_products_of_experts(kind):
    case = replace(experts_case(kind, 40, 64, experts=2, chosen=1, bias=True), schedule=(((0, 150),),))
    (actual,) = run_case(case, Program, gpu=Simulated(seed=2, wgmma=True))
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


@pytest.mark.parametrize("variable, name", [("1", "wgmma_f16"), ("0", "gemm_f16_128")])
@pytest.mark.thin(2)
def test_a_launch(variable, name, monkeypatch):
    """The driver gives the kernel its shared memory once it has been asked for it, unless the kernel is not wanted."""
    monkeypatch.setenv("NUMFLOW_CUDA_WGMMA", variable)
    told, case = Told(), linear_case("F16", 8, 64, 65)
    (actual,) = run_case(case, Program, gpu=Gpu(told, 0, fake_binary))
    assert name in told.names and told.asked == [name] * int(variable)
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


def test_cards_that_have_it():
    assert wgmma_gemm("f16").runs_on(HOPPER)
    assert not any(wgmma_gemm("f16").runs_on(other) for other in ((8, 0), (8, 9), (10, 0), (12, 0)))
