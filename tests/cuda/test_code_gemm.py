"""Products of 8-bit and 4-bit floats (mma.sync) on the simulator, compared with the reference. on_ptx runs their PTX.
"""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang.float4 import e2m1_values, mxfp4_scales, nvfp4_scales
from numflow.cuda.lang.kernel import FLOAT4 as FLOAT4_TARGET
from numflow.cuda.lang.kernel import HOPPER, REGISTRY
from numflow.cuda.lang.simulator import SimulatedPointer
from numflow.cuda.lang.warpgroup import tile_place
from numflow.cuda.linear.code_gemm import code_gemm
from numflow.cuda.linear.float4 import scale_words
from numflow.cuda.program import Program
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand_float4 import WORDS, operand4_bytes, operand_float4, rounded
from numflow.errors import DeviceError
from numflow.learn.cases.build import error, run_case
from numflow.reference.program import Program as Reference
from tests.cuda.matrices import FLOAT4, experts_case, linear_case, of_float4, of_float8

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("E4M3_ROW", 20, 96, 70), pytest.param("E4M3_128", 130, 256, 130, marks=pytest.mark.slow),
    pytest.param("E5M2_128", 40, 640, 66, marks=pytest.mark.slow)])
@pytest.mark.merge
def test_products_of_8_bit_floats(kind, n, k, tokens):
    """Columns that end in half a tile, scales of tiles and of rows; a few tokens use int8, as with other activations.
    """
    case = of_float8(linear_case(kind, n, k, tokens, bias=True), k)
    case = replace(case, schedule=(((0, tokens),), ((0, 3),)))
    device = Simulated(seed=1, float8=True)
    found = zip(run_case(case, Program, gpu=device, activations="fp8"), run_case(case, Reference), (2e-5, 1e-5))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
def test_products_of_experts_of_8_bit_floats():
    case = of_float8(replace(experts_case("E4M3_128", 40, 128, experts=2, chosen=1, bias=True),
                             schedule=(((0, 150),), ((0, 9),))), 128)
    found = zip(run_case(case, Program, gpu=Simulated(seed=2, float8=True), activations="fp8"),
                run_case(case, Reference), (2e-5, 6e-3))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    ("E2M1_ROW", 20, 160, 66), pytest.param("NVFP4", 130, 256, 130, marks=pytest.mark.slow),
    pytest.param("MXFP4", 40, 416, 70, marks=pytest.mark.slow)])
def test_products_of_4_bit_floats(kind, n, k, tokens):
    """Columns that end within a tile; a few tokens use int8, as with other activations."""
    case = of_float4(linear_case(kind, n, k, tokens, bias=True), k, FLOAT4[kind])
    case = replace(case, schedule=(((0, tokens),), ((0, 3),)))
    found = zip(run_case(case, Program, gpu=Simulated(seed=1, float4=True), activations="nvfp4"),
                run_case(case, Reference), (2e-5, 0.05))
    assert all(error(actual, expected) < bound for actual, expected, bound in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["E2M1_ROW", "MXFP4"])
def test_products_of_experts_of_4_bit_floats(kind):
    case = of_float4(replace(experts_case(kind, 40, 128, experts=2, chosen=1, bias=True), schedule=(((0, 150),),)),
                     128, FLOAT4[kind])
    (actual,) = run_case(case, Program, gpu=Simulated(seed=2, float4=True), activations="nvfp4")
    assert error(actual, run_case(case, Reference)[0]) < 2e-5


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_operands_of_4_bit_floats(kind):
    """The kernels agree with `rounded`. A row of zeros stays zero; a row that is not finite has an infinite scale."""
    rng, rows, columns, pitch = np.random.default_rng(3), 67, 160, 164
    x = (rng.standard_normal((rows, pitch)) * 10.0**rng.uniform(-3, 3, (rows, 1))).astype(np.float32)
    x[1], x[2, 7], x[3, 9] = 0, np.nan, np.inf
    device, tiles = Simulated(), 2
    nbytes, more = operand4_bytes(rows, columns)
    y, scales, source, counts = (device.alloc(size).at() for size in (nbytes, more, x.nbytes, 4))
    device.upload(source, x)
    device.upload(counts, np.array([rows], np.int32))
    device.launch(Launch(operand_float4(kind), (rows, 1, 1),
                         (y, scales, tiles, source, pitch, counts, 0, columns)))
    words = device.download(y, nbytes).view(np.uint32).reshape(2, tiles, WORDS)
    row_scales = device.download(scales, more).view(np.float32)
    found = np.zeros((rows, 128 * tiles), np.float64)
    for row in range(rows):
        for tile in range(tiles):
            part = words[row // 64, tile]
            codes = np.concatenate([part[tile_place(row % 64, p):][:4] for p in range(4)])
            own = part[1024 + 2 * (row % 64):][:2]
            blocks = (nvfp4_scales if kind == "nvfp4" else mxfp4_scales)(own).reshape(-1, 1).astype(np.float64)
            found[row, 128 * tile:128 * tile + 128] = (e2m1_values(codes).reshape(len(blocks), -1) * blocks).ravel()
    finite = np.delete(np.arange(rows), [2, 3])
    assert np.isinf(row_scales[[2, 3]]).all() and not found[:, columns:].any()
    np.testing.assert_allclose(found[finite, :columns] * row_scales[finite, None], rounded(x[finite, :columns], kind),
                               rtol=1e-6)


def test_rounding_to_4_bit_floats():
    """NVFP4 has an error of about 10 %; scales that are powers of two have a larger one, and clip values above 6."""
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    errors = [np.linalg.norm(rounded(x, kind) - x) / np.linalg.norm(x) for kind in ("nvfp4", "mxfp4")]
    assert 0.08 < errors[0] < 0.11 < errors[1] < 0.15
    np.testing.assert_array_equal(rounded(np.array([[6, 5, 0.25, 0.75, -3.5] + [0] * 27], np.float32), "mxfp4")[0, :5],
                                  [6, 4, 0, 1, -4])


@pytest.mark.parametrize("header", [[0x38, 0x3C], [0xB8, 0x38]])
def test_a_negative_scale_is_no_number(header):
    """Tensor cores would ignore the sign."""
    head = np.array([*header, 0x38, 0x38, *[0x38] * 4], np.uint8).view(np.uint16)
    low, high = scale_words(SCHEMES["e2m1_row"])(SimulatedPointer(head), 0, 0, 4)
    scales = nvfp4_scales(np.array([low, high], np.uint32))
    assert np.isnan(scales[0, 0]) == (header[0] > 127) and np.isfinite(scales.ravel()[1:]).all()


def test_4_bit_floats_need_a_card_that_has_them():
    case = linear_case("E2M1_ROW", 20, 96, 70)
    with pytest.raises(DeviceError, match="activations nvfp4 needs a GPU of compute capability 10.x or 12.x"):
        Program(case.network, case.weights, gpu=Simulated(float8=True), activations="nvfp4")
    kernel = code_gemm("e2m1_row", "nvfp4")
    assert kernel.target == FLOAT4_TARGET and kernel.architecture((12, 1)) == "sm_121a"
    assert [card for card in ((8, 9), HOPPER, (10, 0), (12, 0), (12, 1), (13, 0)) if kernel.runs_on(card)] == [
        (12, 0), (12, 1)]


def test_8_bit_floats_need_a_card_that_has_them():
    case = linear_case("E4M3_ROW", 20, 96, 70)
    with pytest.raises(DeviceError, match="activations fp8 needs a GPU of compute capability 8.9, 9.0, 10.x or 12.x"):
        Program(case.network, case.weights, gpu=Simulated(), activations="fp8")


def test_cards_that_have_them():
    kernel, operand = code_gemm("e4m3_row", "e4m3"), REGISTRY["operand_e4m3"]
    cards = (8, 0), (8, 6), (8, 9), HOPPER, (10, 0), (12, 0), (12, 1)
    assert [kernel.architecture(card) for card in cards if kernel.runs_on(card)] == ["sm_89", "sm_120", "sm_121"]
    assert [kernel.architecture(card) for card in cards if operand.runs_on(card)] == [
        "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]
