"""Inferflow's schemes: the original's bytes, the compiled kernels against the reference, its quirks, invalid input."""

import numpy as np
import pytest

from numflow.errors import FormatError, RequestError
from numflow.quant import inferflow_kernels
from numflow.quant.bits import Plane
from numflow.quant.inferflow import INFERFLOW_SCHEMES, decode_reference, encode_reference, inferflow_scheme
from tests.quant.golden import GOLDEN, X

ENCODERS = [encode_reference, inferflow_kernels.encode]
DECODERS = [decode_reference, inferflow_kernels.decode]
every_scheme = pytest.mark.parametrize("scheme", INFERFLOW_SCHEMES.values(), ids=INFERFLOW_SCHEMES.keys())

# rms(decoded - x) / rms(x) on N(0, 0.02), as measured with the original's code, and bits per weight.
MEASURED = {
    "q8_b32t1": (0.0046, 9), "q8_b32t2": (0.0053, 8.5), "q6_b64t1": (0.0216, 6.5), "q5_b32t1": (0.0378, 6),
    "q5_b64t1": (0.0447, 5.5), "q4_b32t1a": (0.0781, 5), "q4_b32t1b": (0.0802, 5), "q4_b64t1": (0.0959, 4.5),
    "q4_b16": (0.147, 5), "q3h_b64t1": (0.134, 4), "q3_b32t1a": (0.167, 4), "q3_b32t1b": (0.160, 4),
    "q2_b32t1a": (0.392, 3), "q2_b32t1b": (0.320, 3),
}


def weights(rows=32, columns=512, scale=0.02, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)


def relative_rms(x, y):
    return float(np.sqrt(np.mean((x - y) ** 2) / np.mean(x ** 2)))


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("name", GOLDEN)
def test_bytes_of_the_original(name, encode):
    assert encode(X, inferflow_scheme(name)).tobytes().hex() == GOLDEN[name]


def test_all_thirteen_golden_vectors_are_there():
    assert len(GOLDEN) == 13
    assert set(MEASURED) == set(INFERFLOW_SCHEMES) == {*GOLDEN, "q8_b32t1"}


@every_scheme
def test_error_and_size_are_the_original_s(scheme):
    x = weights(256, 1024)
    error, bits = MEASURED[scheme.name]
    raw = inferflow_kernels.encode(x, scheme)
    assert 8 * raw.nbytes / x.size == scheme.bits_per_weight(1024) == bits
    assert relative_rms(x, inferflow_kernels.decode(raw, scheme, x.shape[1])) == pytest.approx(error, rel=0.015)


@every_scheme
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_equal_the_reference(scheme, threads):
    x = weights(33, 320)
    if scheme.name != "q4_b16":  # whose header holds few magnitudes
        x = x * np.float32(10) ** np.random.default_rng(1).integers(-5, 4, (33, 1)).astype(np.float32)
    raw = encode_reference(x, scheme)
    np.testing.assert_array_equal(inferflow_kernels.encode(x, scheme, threads=threads), raw)
    np.testing.assert_array_equal(inferflow_kernels.decode(raw, scheme, 320, threads),
                                  decode_reference(raw, scheme, 320))


@every_scheme
def test_zeros_of_either_sign_and_numbers_too_small_to_count(scheme):
    rng = np.random.default_rng(3)
    signs = np.where(rng.random((40, 192)) < 0.5, np.float32(0), np.float32(-0.0))
    some = np.where(rng.random((40, 192)) < 0.6, signs, rng.random((40, 192), np.float32) / 8)
    for x in (np.zeros((2, 64), np.float32), -np.zeros((2, 64), np.float32), signs, some, -some,
              weights(4, 64, 1e-40), weights(4, 64, 1e-30)):
        np.testing.assert_array_equal(inferflow_kernels.encode(x, scheme), encode_reference(x, scheme))
    header = encode_reference(np.zeros((1, 64), np.float32), scheme)[0, :scheme.header]
    assert header.tobytes() == (b"\x64\0" if scheme.rule == 3 else bytes(scheme.header))


@pytest.mark.parametrize("value", [65504, 65520, 1e30, 3.4e38])
@every_scheme
def test_the_largest_weights(scheme, value):
    x = np.resize(np.array([value, -value, 0, value], np.float32), (2, 64))
    found = []
    for encode in ENCODERS:
        try:
            found.append(decode_reference(encode(x, scheme), scheme, 64))
        except RequestError as error:
            found.append(str(error))
    assert np.array_equal(*found)
    if isinstance(found[0], str):
        assert value > 65504 or scheme.name == "q4_b16"
    else:
        assert relative_rms(x, found[0]) < 0.3


@every_scheme
def test_any_bytes_decode_the_same(scheme):
    raw = np.random.default_rng(2).integers(0, 256, (16, 4 * scheme.size), dtype=np.uint8)
    columns = 4 * scheme.block
    decoded = inferflow_kernels.decode(raw, scheme, columns)
    np.testing.assert_array_equal(decoded, decode_reference(raw, scheme, columns))


@every_scheme
def test_every_code_value_round_trips(scheme):
    step = 2 ** -7 if scheme.rule != 3 else 0.01  # a power of two, or what a header of bytes can hold
    symmetric = scheme.rule == 2
    codes = np.arange(scheme.levels) - (127 if symmetric else 0)
    codes = np.resize(codes, (len(codes) + scheme.block, scheme.block)).astype(np.float32)
    codes[:, 0], codes[:, 1] = codes.min(), codes.max()  # every block spans the range
    decoded = decode_reference(encode_reference(codes * np.float32(step), scheme), scheme, scheme.block)
    if scheme.rule == 1:  # cells are narrower, so that values stand anywhere in theirs
        assert len(np.unique(decoded)) == scheme.levels
    else:
        np.testing.assert_allclose(decoded, codes * step, atol=step / 500 if not symmetric else step / 5)


def test_pairs_of_eleven_levels():
    scheme = inferflow_scheme("q3h")
    first, second = (code.ravel() for code in np.mgrid[0:11, 0:11])
    values = np.zeros((121, 64), np.float32)
    values[:, 0::2], values[:, 1::2] = first[:, None], second[:, None]
    values[:, :2], values[:, 2:4] = (0, 10), (10, 0)
    for encode, decode in zip(ENCODERS, DECODERS):
        np.testing.assert_array_equal(decode(encode(values, scheme), scheme, 64), values)


def test_quirks_are_kept():
    q8, q3h = inferflow_scheme("Q8"), inferflow_scheme("Q3H")
    for encode, decode in zip(ENCODERS, DECODERS):
        small = np.linspace(-0.00126, 0.00126, 32, dtype=np.float32)[None]
        assert not decode(encode(small, q8), q8, 32).any()
        narrow = np.linspace(0.001, 0.001063, 64, dtype=np.float32)[None]
        assert len(np.unique(decode(encode(narrow, q3h), q3h, 64))) == 1


def test_names_of_the_original():
    names = {"Q8": "q8_b32t2", "q4_B32T1": "q4_b32t1a", "q3_b32t1": "q3_b32t1b", "Q2": "q2_b32t1b"}
    assert {name: inferflow_scheme(name).name for name in names} == names
    with pytest.raises(RequestError, match="no scheme 'q3h_b32t1'; did you mean"):
        inferflow_scheme("q3h_b32t1")


@pytest.mark.parametrize("encode", ENCODERS)
def test_bad_weights_are_refused(encode):
    scheme = inferflow_scheme("q3h")
    x = weights(4, 128)
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[2, 70:72] = value, -value
        with pytest.raises(FormatError, match=f"blk.0 cannot be quantised: row 2, column 70 is {value}"):
            encode(bad, scheme, "blk.0")
    with pytest.raises(RequestError, match="blk.0: q3h_b64t1 has blocks of 64 weights, which do not divide 96 columns"):
        encode(x[:, :96], scheme, "blk.0")
    with pytest.raises(RequestError, match="of shape .0, 64. cannot be quantised"):
        encode(x[:0, :64], scheme)
    with pytest.raises(RequestError, match="float16 headers"):
        encode(x * np.float32(1e7), scheme)
    with pytest.raises(RequestError, match="smallest weights of -1 to 1.55"):
        encode(x * 1000, inferflow_scheme("q4_b16"))


@pytest.mark.parametrize("decode", DECODERS)
def test_bad_bytes_are_refused(decode):
    scheme = inferflow_scheme("q4")
    with pytest.raises(FormatError, match="32 weights of q4_b32t1a should be rows of 20 bytes"):
        decode(np.zeros((1, 21), np.uint8), scheme, 32)
    with pytest.raises(FormatError, match="these are int8 .1, 20."):
        decode(np.zeros((1, 20), np.int8), scheme, 32)
    with pytest.raises(RequestError, match="do not divide 20 columns"):
        decode(np.zeros((1, 20), np.uint8), scheme, 20)


def test_one_version_of_each_kernel_is_compiled():
    scheme = inferflow_scheme("q3h")
    raw = inferflow_kernels.encode(weights(4, 128), scheme)
    raw.flags.writeable = False
    inferflow_kernels.decode(raw, scheme, 128)
    for kernel in (inferflow_kernels._encode, inferflow_kernels._decode):
        assert len(kernel.signatures) == 1


@pytest.mark.parametrize("plane, codes, packed", [
    (Plane(4, 0), [1, 2, 3, 0x14], [0x21, 0x43]), (Plane(2, 4), [0x10, 0x20, 0x30, 0x0F], [0b00111001]),
    (Plane(1, 2), [4, 0, 0, 4, 3, 0, 0, 7], [0b10001001]), (Plane(4, 0, split=True), [1, 2, 3, 4], [0x31, 0x42]),
    (Plane(8, 0), [7, 255], [7, 255])])
def test_planes(plane, codes, packed):
    codes = np.array(codes, np.uint8)
    np.testing.assert_array_equal(plane.pack(codes), packed)
    mask = ((1 << plane.width) - 1) << plane.shift
    np.testing.assert_array_equal(plane.unpack(np.array(packed, np.uint8)), codes & np.uint8(mask))
