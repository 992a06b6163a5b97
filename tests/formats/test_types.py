"""The table of tensor types against the `gguf` package, and every conversion to float32."""

import gguf
import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import GGML_NAMES, TYPES, TensorType, tensor_type, to_f32
from numflow.quant import SCHEMES, decode, encode, find

DECODED = [t.name for t in gguf.constants.GGML_QUANT_SIZES if t in gguf.quants._type_traits]


def random_rows(kind: TensorType, rows: int = 5, blocks: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, blocks * kind.size), np.uint8)


def test_the_table_is_the_gguf_package_s():
    published = {t.name: (int(t), *sizes) for t, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    ours = {name: (number, TYPES[name].block, TYPES[name].size) for number, name in GGML_NAMES.items()}
    newer = {"Q2_0": (42, 64, 18)}  # than the package
    assert ours == newer | published


@pytest.mark.parametrize("name", DECODED)
def test_block_types_expand_as_in_the_gguf_package(name):
    raw = random_rows(TYPES[name])
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    got = to_f32(raw, name)
    assert got.shape == (5, 3 * TYPES[name].block)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", sorted(TYPES))
@pytest.mark.thin(8)
def test_no_rows_give_no_rows(name):
    columns = 4 * TYPES[name].block
    assert to_f32(np.empty((0, TYPES[name].row_bytes(columns)), np.uint8), name).shape == (0, columns)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_schemes_of_the_quant_package_are_types(name):
    kind, x = TYPES[name], np.random.default_rng(1).uniform(-1, 1, (3, 320)).astype(np.float32)
    raw = encode(x, find(name))
    assert raw.shape[1] == kind.row_bytes(320)
    np.testing.assert_array_equal(to_f32(raw, name), decode(raw, find(name), 320))
    for columns in (0, kind.block, 320, 576, 4096):
        assert kind.columns(kind.row_bytes(columns)) == columns
    with pytest.raises(FormatError, match=f"no whole number of {name} blocks"):
        to_f32(np.zeros((1, kind.row_bytes(320) + 1), np.uint8), name)


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K"])
def test_types_of_activations_are_refused(name):
    with pytest.raises(FormatError, match=name):
        to_f32(random_rows(TYPES[name]), name)


@pytest.mark.parametrize(("name", "dtype"), [
    ("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8"), ("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"), ("I64", "<i8"),
    ("U8", "u1"), ("U16", "<u2"), ("U32", "<u4"), ("U64", "<u8"), ("BOOL", "u1"),
])
def test_plain_numbers(name, dtype):
    numbers = np.array([[0, 1, 100], [7, 8, 9]], dtype)
    got = to_f32(numbers.view(np.uint8), name)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, numbers.astype(np.float32))


def test_bf16_is_the_upper_half_of_float32():
    numbers = np.array([[1.0, -2.5, 3e38, np.inf]], np.float32)
    upper = (numbers.view(np.uint32) >> 16).astype("<u2")
    np.testing.assert_allclose(to_f32(upper.view(np.uint8), "BF16"), numbers, rtol=2**-7)
    np.testing.assert_array_equal(to_f32(np.array([[0x80, 0x3F, 0x40, 0xC0]], np.uint8), "BF16"), [[1.0, -3.0]])


@pytest.mark.parametrize(("name", "codes"), [
    ("F8_E4M3", {0: 0.0, 1: 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x3C: 1.5, 0x7E: 448.0, 0xB8: -1.0, 0xFE: -448.0}),
    ("F8_E5M2", {0: 0.0, 1: 2.0**-16, 0x3C: 1.0, 0x3E: 1.5, 0x7B: 57344.0, 0x7C: np.inf, 0xBC: -1.0}),
    ("F8_E8M0", {0: 2.0**-127, 127: 1.0, 128: 2.0, 254: 2.0**127}),
])
def test_eight_bit_floats(name, codes):
    got = to_f32(np.array([list(codes)], np.uint8), name)
    np.testing.assert_array_equal(got[0], np.array(list(codes.values()), np.float32))
    assert np.isnan(to_f32(np.array([[255]], np.uint8), name))


def test_q1_0_by_hand():
    block = np.concatenate([np.array([0.5], "<f2").view(np.uint8), [0b00000101], np.zeros(15)]).astype(np.uint8)
    expected = np.full(128, -0.5, np.float32)
    expected[[0, 2]] = 0.5
    np.testing.assert_array_equal(to_f32(block[None], "Q1_0")[0], expected)


def test_q2_0_by_hand():
    """4 weights per byte, lowest bits first."""
    block = np.concatenate([np.array([0.5], "<f2").view(np.uint8), [0b11100100, 0b00000011], np.full(14, 0b01010101)])
    expected = np.zeros(64, np.float32)
    expected[:8] = [-0.5, 0, 0.5, 1, 1, -0.5, -0.5, -0.5]
    np.testing.assert_array_equal(to_f32(block.astype(np.uint8)[None], "Q2_0")[0], expected)


def test_q8_groups_by_hand():
    codes = np.array([[1, -2, 3, 127], [-128, 0, 5, 6]], np.int8)
    scales = np.array([0.5, 2.0], "<f4")
    raw = np.concatenate([scales.view(np.uint8).reshape(2, 4), codes.view(np.uint8)], axis=1).reshape(1, 16)
    np.testing.assert_array_equal(to_f32(raw, "Q8_GS4"), (codes * scales[:, None]).reshape(1, 8))


def test_unknown_type_and_broken_rows():
    with pytest.raises(FormatError, match="did you mean 'Q4_K'"):
        tensor_type("Q4_KK")
    with pytest.raises(FormatError, match="no whole number of Q4_0 blocks"):
        to_f32(np.zeros((2, 19), np.uint8), "Q4_0")
    with pytest.raises(FormatError, match="Q8_GS0"):
        to_f32(np.zeros((2, 4), np.uint8), "Q8_GS0")


def test_unaligned_float32_becomes_aligned():
    data = np.zeros(17, np.uint8)
    got = to_f32(data[1:].reshape(2, 8), "F32")
    assert got.flags.aligned


def test_some_rows_of_a_tensor():
    raw = random_rows(TYPES["Q4_0"], rows=6, blocks=2)
    tensor = Tensor("w", (2, 3, 64), TYPES["Q4_0"], lambda: raw)
    assert (tensor.rows, tensor.columns, tensor.nbytes) == (6, 64, raw.nbytes)
    np.testing.assert_array_equal(tensor.f32([4, 1]), tensor.f32().reshape(6, 64)[[4, 1]])
