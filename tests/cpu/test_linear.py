"""linear with every type of weight against the dequantised matrix in double precision; a row's bits depend on that row
alone."""

import numpy as np
import pytest

from numflow.cpu.weights.layout import SCHEMES
from numflow.cpu.weights.pack import pack
from numflow.formats.types import to_f32
from numflow.quant.grids import GRIDS
from numflow.quant.hub_types import HUB_TYPES, TABLES
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.stored import STORED
from tests.cpu.matrices import (
    activations,
    as_bfloat16,
    columns_of,
    pack_stored,
    quantized,
    quantized_twice,
    run_linear,
    stored,
)
from tests.quant.hub import TYPES_TESTED

# Their float32 decoding is the same code as of other types with their header kind; each takes a second to compile.
_SLOW = {(kind, "f32") for kind in ("Q5_0", "Q8_0", "Q5_1", "Q5_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4", "q2", "q4",
                                    "q5", "q6", "q8")}
# Grid types differ in their tables and codebooks; these have 0, 1 and 4 high bits of a grid index, indices of 4
# and 8 columns, and scales by 16 and by 32.
_SLOW |= {(kind, mode) for kind in GRIDS for mode in ("int8", "f32")} - {("IQ1_S", "int8"), ("IQ2_XS", "int8"),
                                                                         ("IQ3_XXS", "int8"), ("IQ2_XXS", "f32")}
_SLOW |= {(kind, mode) for kind in ("TQ1_0", "TQ2_0", "Q2_0_128") for mode in ("int8", "f32")}
# Inferflow's schemes consist of the same parts as GGUF's and numflow's.
_SLOW |= {(kind, mode) for kind in INFERFLOW_SCHEMES for mode in ("int8", "f32")} - {("q3h_b64t1", "int8")}
# Types of quantised checkpoints differ in the types of scales and zero points, and in tables.
_SLOW |= {(kind, mode) for kind in HUB_TYPES for mode in ("int8", "f32")} - {
    ("U2_BF16_16", "int8"), ("U3_F16_32", "int8"), ("Z8_F16_ROW", "f32"), ("NF4_64", "f32"), ("NF4_64", "int8"),
    ("E4M3_128", "f32"), ("E2M1_ROW", "f32")}
CASES = [pytest.param(kind, mode, marks=[pytest.mark.slow] if (kind, mode) in _SLOW else [])
         for kind in TYPES_TESTED for mode in ("int8", "f32")
         if mode == "f32" or not SCHEMES[STORED[kind].kind.name].floats_only]
CASES += [(kind, "int16") for kind in ("Q4_0", "Q6_K", "q3h", "q2", "IQ2_XS", "F16")]  # the kernels are int8's
CASES += [(kind, "bf16") for kind in ("F16", "BF16", "F32", "Q8_0")]
_OPERANDS = {"int8": quantized, "int16": quantized_twice, "bf16": quantized_twice}


def _columns(kind, mode):
    """Columns of a matrix; pairs of bfloat16 need an even number."""
    return 2 * columns_of(kind) if mode == "bf16" else columns_of(kind)


def to_whole(rows, kind):
    """Weights in products with int8: values of a table of 16 are rounded to k / 8191 with integer k."""
    if not HUB_TYPES[kind].table:
        return to_f32(rows, kind)
    type_, columns = STORED[kind], HUB_TYPES[kind].columns * (rows.shape[1] // HUB_TYPES[kind].size)
    codes, (scales,) = type_.fields(rows, columns if HUB_TYPES[kind].block else 2 * (rows.shape[1] - 4))
    numbers = np.round(TABLES[type_.kind.table].astype(np.float64) * 8191) / 8191
    return scales.repeat(codes.shape[1] // scales.shape[1], axis=1) * numbers[codes]


@pytest.mark.parametrize(("kind", "mode"), CASES)
@pytest.mark.thin(16)
def test_against_double_precision(kind, mode):
    raw, packed = pack_stored(kind, 45, _columns(kind, mode))
    x, bias = activations(33, raw.shape[1]), np.linspace(-3, 3, 45, dtype=np.float32)
    y = run_linear(packed, x, mode, bias, before=5)
    floats = mode == "f32" or packed.floats_only
    weight = (to_f32 if floats or kind not in HUB_TYPES else to_whole)(raw.rows, kind).astype(np.float64)
    if floats and mode == "bf16":
        x, weight = as_bfloat16(x), as_bfloat16(weight)
    x = x.astype(np.float64) if floats else _OPERANDS[mode](x)
    bound = 1e-6 * (np.abs(x) @ np.abs(weight).T) + 1e-6 * np.abs(bias)
    assert (np.abs(y - (x @ weight.T + bias)) <= bound).all()


@pytest.mark.parametrize(("kind", "mode"), CASES)
@pytest.mark.thin(16)
def test_rows_do_not_depend_on_their_neighbours(kind, mode):
    raw, packed = pack_stored(kind, 45, _columns(kind, mode))
    x = activations(33, raw.shape[1])
    together = run_linear(packed, x, mode)
    for begin, end, threads in ((0, 1, 1), (4, 6, 3), (7, 10, 2), (3, 10, 1), (8, 16, 2), (24, 33, 5), (0, 33, 4)):
        np.testing.assert_array_equal(run_linear(packed, x[begin:end], mode, threads=threads), together[begin:end])


@pytest.mark.parametrize(("kind", "codes", "wrong"), [
    pytest.param("E4M3_ROW", (0x7F, 0xFF), (1, 2), marks=pytest.mark.slow),
    pytest.param("E5M2_ROW", (0x7C, 0x7E), (1, 2), marks=pytest.mark.slow),
    ("E4M3_128", (0x7F, 0x7E), (1,)), ("E5M2_16", (0x7B, 0xFD), (2,))])
@pytest.mark.merge
def test_floats_that_are_no_numbers_spoil_their_rows(kind, codes, wrong):
    raw = stored(kind, 20, 256)
    for row, code in zip((1, 2), codes):
        raw.rows[row, -3] = code
    y = run_linear(pack(raw, 1), activations(9, 256), "f32")
    assert np.isfinite(y).all(axis=0).nonzero()[0].tolist() == [row for row in range(20) if row not in wrong]


@pytest.mark.merge
def test_pairs_are_closer_than_16_bits_of_a_unit():
    raw, packed = pack_stored("Q6_K", 45, 512)
    x, weight = activations(9, 512), to_f32(raw.rows, "Q6_K").astype(np.float64)
    units = np.abs(x).reshape(9, -1, 32).max(-1).repeat(32, axis=1)
    far = np.abs(run_linear(packed, x, "int16") - x @ weight.T)
    assert (far <= (units / 2**16 + 1e-6 * np.abs(x)) @ np.abs(weight).T).all()


def test_many_tokens_pass_in_blocks():
    """More tokens than a token block, with wide rows."""
    raw, packed = pack_stored("Q4_0", 20, 8192)
    x = activations(100, 8192)
    y = run_linear(packed, x, "int8")
    exact = quantized(x) @ to_f32(raw.rows, "Q4_0").astype(np.float64).T
    np.testing.assert_allclose(y, exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    np.testing.assert_array_equal(run_linear(packed, x[97:99], "int8"), y[97:99])


@pytest.mark.parametrize(("kind", "mode"), [("Q8_0", "int8"), ("F32", "f32"),
                                            pytest.param("Q4_1", "int8", marks=pytest.mark.merge)])
def test_wide_rows_stay_accurate(kind, mode):
    raw, packed = pack_stored(kind, 16, 14336)
    x = np.random.default_rng(0).standard_normal((2, 14336)).astype(np.float32)
    exact = (quantized(x) if mode == "int8" else x) @ to_f32(raw.rows, kind).astype(np.float64).T
    np.testing.assert_allclose(run_linear(packed, x, mode), exact, rtol=0, atol=1e-5 * exact.std())


def test_extreme_activations():
    """Zeros stay zero, tiny units count as zero, and infinities do not disturb other rows."""
    _, packed = pack_stored("Q8_0", 16, 64)
    x = np.zeros((4, 64), np.float32)
    x[1], x[2, 5], x[3] = 1e-38, np.inf, 1.0
    y = run_linear(packed, x, "int8")
    assert (y[:2] == 0).all()
    assert not np.isfinite(y[2]).all()
    np.testing.assert_array_equal(y[3], run_linear(packed, x[3:], "int8")[0])


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("Q6_K", marks=pytest.mark.merge)])
def test_activations_of_every_code(kind):
    """Values that are exactly -127 .. 127 times a power of two are exact in int8."""
    raw, packed = pack_stored(kind, 16, 256)
    x = (np.arange(256, dtype=np.float32).reshape(8, 32) - 127).clip(-127, 127)
    x[:, 0] = 127
    x = (x * 2.0 ** -np.arange(8, dtype=np.float32)[:, None]).reshape(1, 256)
    exact = x.astype(np.float64) @ to_f32(raw.rows, kind).astype(np.float64).T
    np.testing.assert_allclose(run_linear(packed, x, "int8"), exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.merge
def test_pairs_of_bfloat16_are_added_in_one_order(kind):
    """Odd column of a pair first, pairs alternate between two sums per 32 columns: the bits of `vdpbf16ps`."""
    raw, packed = pack_stored(kind, 20, 70)
    x = as_bfloat16(np.random.default_rng(2).standard_normal((5, 70)).astype(np.float32))
    w = as_bfloat16(to_f32(raw.rows, kind))
    products = x[:, None, :].astype(np.float64) * w  # exact, as are their sums with a float32 of about their size

    def pair(total, k):
        for column in (k + 1, k):
            total = (total + products[:, :, column]).astype(np.float32)
        return total

    total = np.zeros((5, 20), np.float32)
    for unit in (0, 32):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(0, 32, 2):
            sums[k // 2 % 2] = pair(sums[k // 2 % 2], unit + k)
        total = total + (sums[0] + sums[1])
    for k in (64, 66, 68):
        total = pair(total, k)
    np.testing.assert_array_equal(run_linear(packed, x, "bf16"), total)


@pytest.mark.merge
def test_bfloat16_of_numbers_that_are_not_usual():
    """NaN and infinities stay in their row, values below 2^-126 are zero, and an odd width uses float32."""
    _, packed = pack_stored("F16", 16, 64)
    x = np.ones((5, 64), np.float32)
    x[0, 3], x[1, 5], x[2], x[4, 7] = np.nan, np.inf, 1e-39, np.uint32(0x7F800001).view(np.float32)
    y = run_linear(packed, x, "bf16")
    assert np.isnan(y[[0, 4]]).all() and not np.isfinite(y[1]).any() and (y[2] == 0).all()
    np.testing.assert_array_equal(y[3], run_linear(packed, x[3:4], "bf16")[0])
    _, odd = pack_stored("F16", 16, 63)
    np.testing.assert_array_equal(run_linear(odd, x[3:4, :63], "bf16"), run_linear(odd, x[3:4, :63], "f32"))
