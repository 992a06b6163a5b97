"""numflow's own schemes: size, error, scale, layout, the compiled search against the reference, invalid input."""

import numpy as np
import pytest

from numflow.errors import FormatError, RequestError
from numflow.quant import SCHEMES, decode, encode, find, layout_kernels, search_kernels
from numflow.quant.layout import ROW_SCHEMES, Fields, decode_reference, pack_reference, unpack_reference
from numflow.quant.search import encode_reference

every_scheme = pytest.mark.parametrize("scheme", ROW_SCHEMES.values(), ids=ROW_SCHEMES.keys())

# Bound on rms(decoded - x) / rms(x) for normal weights of 1024 columns, and the bits per weight of 1024 columns.
BOUNDS = {"q2": (0.267, 2.390625), "q3": (0.132, 3.390625), "q3h": (0.112, 3.703125), "q4": (0.071, 4.390625),
          "q5": (0.035, 5.390625), "q6": (0.0175, 6.390625), "q8": (0.0046, 8.390625)}


def weights(rows=16, columns=512, scale=0.02, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32)


def error(x, y, c=1.0):
    return float(np.sqrt(np.sum(c * (x - y) ** 2.0) / np.sum(c * x ** 2.0)))


def quantised(x, scheme, importance=None):
    return decode(encode(x, scheme, importance), scheme, x.shape[1])


@every_scheme
def test_error_and_size_on_normal_weights(scheme):
    x, (bound, bits) = weights(64, 1024), BOUNDS[scheme.name]
    raw = encode(x, scheme)
    assert 8 * raw.nbytes / x.size == scheme.bits_per_weight(1024) == bits
    assert error(x, decode(raw, scheme, 1024)) < bound


def test_q3h_beats_the_original_with_fewer_bits():
    x, ours, theirs = weights(64, 1024), find("q3h"), find("q3h_b64t1")
    assert ours.bits_per_weight(256) <= 3.75 < theirs.bits_per_weight(256) == 4
    assert error(x, quantised(x, ours)) < 0.9 * error(x, quantised(x, theirs))


@pytest.mark.parametrize("draw", ["laplace", "standard_t"])
@pytest.mark.parametrize("ours, theirs", [("q2", "q2_b32t1b"), ("q3", "q3_b32t1b"), ("q3h", "q3h_b64t1"),
                                          ("q4", "q4_b32t1a"), ("q5", "q5_b64t1"), ("q6", "q6_b64t1"),
                                          ("q8", "q8_b32t2")])
def test_less_error_in_fewer_bits_on_heavy_tails(draw, ours, theirs):
    rng = np.random.default_rng(3)
    x = (rng.laplace(size=(32, 1024)) if draw == "laplace" else rng.standard_t(4, (32, 1024))).astype(np.float32)
    ours, theirs = find(ours), find(theirs)
    assert ours.bits_per_weight(1024) < theirs.bits_per_weight(1024)
    assert error(x, quantised(x, ours)) < error(x, quantised(x, theirs))


@every_scheme
def test_error_does_not_depend_on_magnitude(scheme):
    x = weights(8, 256, scale=1)
    expected = error(x, quantised(x, scheme))
    for factor in (1e-6, 1e-3, 0.37, 1e3):
        scaled = x * np.float32(factor)
        assert error(scaled, quantised(scaled, scheme)) == pytest.approx(expected, rel=0.02)
    rows = x * np.geomspace(1e-6, 1e3, 8, dtype=np.float32)[:, None]  # each row on its own
    for row, decoded in zip(rows, quantised(rows, scheme)):
        assert error(row, decoded) == pytest.approx(expected, rel=0.15)


@every_scheme
@pytest.mark.parametrize("factor", [0.1, 1e-2, 1e-3, 1e-6, 1e3])
@pytest.mark.thin(2)
def test_a_block_octaves_from_its_row(scheme, factor):
    """A block much larger or smaller than its row: neither loses precision, and finer scales preserve both better."""
    x, block = weights(32, 1024, seed=4), slice(64, 64 + scheme.block)

    def errors():
        y = quantised(x, scheme)
        return error(x[:, block], y[:, block]), error(np.delete(x, np.r_[block], 1), np.delete(y, np.r_[block], 1))

    own, others = errors()
    x[:, block] *= np.float32(factor)
    own_then, others_then = errors()
    fine = scheme.scale_bits > 3
    assert own_then < (1.5 if fine else 3) * own and others_then < (1.25 if fine else 1.5) * others


@every_scheme
def test_importances_say_what_a_small_block_is_worth(scheme):
    x = weights(8, 512, seed=4)
    expected = error(x, quantised(x, scheme))
    x[:, 64:96] *= np.float32(1e-6)
    y = decode(encode(x, scheme, np.ones(512)), scheme, 512)  # nothing: it does not cost the others anything
    assert error(x, y) < 1.06 * expected
    importance = np.ones(512)
    importance[64:96] = 1e16
    y = decode(encode(x, scheme, importance), scheme, 512)
    assert error(x[:, 64:96], y[:, 64:96]) < 2 * expected


@every_scheme
def test_all_levels_are_used(scheme):
    fields = search_kernels.search(weights(64, 1024), scheme)
    assert len(np.unique(fields.codes)) == scheme.levels


@every_scheme
@pytest.mark.thin(4)
def test_kernels_equal_the_reference(scheme):
    rng = np.random.default_rng(5)
    x = weights(6, 160) * np.float32(10) ** rng.integers(-6, 4, (6, 5)).repeat(32, 1).astype(np.float32)
    x[0], x[1, :64], x[2] = 0, 0, np.abs(x[2])
    for importance in (None, rng.random(160), rng.random((6, 160))):
        raw = encode_reference(x, scheme, importance)
        for threads in (1, 3):
            np.testing.assert_array_equal(encode(x, scheme, importance, threads=threads), raw)
    expected = decode_reference(raw, scheme, 160)
    for threads in (1, 3):
        np.testing.assert_array_equal(decode(raw, scheme, 160, threads), expected)


@every_scheme
def test_fields_round_trip(scheme):
    rng = np.random.default_rng(6)
    fields = Fields(scheme, rng.integers(0, 1 << 16, 5, dtype=np.uint16),
                    rng.integers(0, 1 << scheme.header_bits, (5, 224 // scheme.block)).astype(np.uint16),
                    rng.integers(0, scheme.levels, (5, 224)).astype(np.uint8))
    fields.codes[0] = np.resize(np.arange(scheme.levels), 224)  # every code value
    raw = pack_reference(fields)
    assert raw.shape == (5, scheme.row_bytes(224))
    np.testing.assert_array_equal(layout_kernels.pack(fields), raw)
    for unpacked in (unpack_reference(raw, scheme, 224), layout_kernels.unpack(raw, scheme, 224)):
        for name in ("rows", "blocks", "codes"):
            np.testing.assert_array_equal(getattr(unpacked, name), getattr(fields, name))


@every_scheme
def test_any_bytes_decode_the_same(scheme):
    raw = np.random.default_rng(7).integers(0, 256, (40, scheme.row_bytes(96)), dtype=np.uint8)
    values = decode(raw, scheme, 96)
    np.testing.assert_array_equal(values, decode_reference(raw, scheme, 96))
    assert np.isfinite(values).all()


def test_pairs_of_eleven_levels_fill_seven_bits():
    scheme = find("q3h")
    first, second = (code.ravel() for code in np.mgrid[0:11, 0:11])
    codes = np.resize(np.stack([first, second], 1), (128, 2)).reshape(1, 256).astype(np.uint8)
    fields = Fields(scheme, np.zeros(1, np.uint16), np.zeros((1, 8), np.uint16), codes)
    raw = pack_reference(fields)
    assert raw.shape[1] == 2 + 6 + 256 * 7 // 16
    np.testing.assert_array_equal(unpack_reference(raw, scheme, 256).codes, codes)
    assert len({tuple(pair) for pair in codes.reshape(-1, 2)}) == 121


def test_a_row_by_hand():
    # Base code 400: B = 508 << 21 = 0x3F800000, the pattern of 1.0. Step code 9: D = (4 + 1) << (2 + 12) = 5 << 14.
    scheme = find("q4")
    row, blocks = np.array([400 << 7 | 9 << 2 | 1], np.uint16), np.array([[0 | 32 << 6, 3 | 0 << 6]], np.uint16)
    fields = Fields(scheme, row, blocks, np.resize(np.arange(16), (1, 64)).astype(np.uint8))
    values = decode(pack_reference(fields), scheme, 64)[0]
    second = np.int32(0x3F800000 + 3 * (5 << 14)).view(np.float32)
    np.testing.assert_array_equal(values[:16], np.arange(16) - 7.55859375)
    np.testing.assert_array_equal(values[32:48], second * (np.arange(16, dtype=np.float32) - np.float32(3.80859375)))


@every_scheme
def test_zeros_and_one_sided_weights(scheme):
    x = weights(4, 128)
    x[1] = 0
    assert not quantised(x, scheme)[1].any()
    positive = np.abs(x) + np.float32(0.01)
    assert error(positive, quantised(positive, scheme)) < 1.3 * BOUNDS[scheme.name][0]
    constant = np.full((2, 64), -0.3, np.float32)
    assert error(constant, quantised(constant, scheme)) < BOUNDS[scheme.name][0]


@every_scheme
def test_weights_at_the_ends_of_what_rows_hold(scheme):
    for scale in (1e-40, 1e-30, 1e-27, 1e7):
        x = weights(3, 64, seed=9) * np.float32(scale / 0.02)
        raw = encode(x, scheme)
        np.testing.assert_array_equal(raw, encode_reference(x, scheme))
        if scale >= 1e-27:
            assert error(x.astype(float), decode(raw, scheme, 64)) < 1.15 * BOUNDS[scheme.name][0]


@every_scheme
def test_importances_move_the_error(scheme):
    x, c = weights(32, 256, seed=8), np.where(np.arange(256) % 4 == 0, 100, 1).astype(np.float32)
    plain, weighted = quantised(x, scheme), quantised(x, scheme, c)
    assert error(x, weighted, c) < 0.97 * error(x, plain, c)
    np.testing.assert_array_equal(quantised(x, scheme, np.ones(256)), plain)


@pytest.mark.parametrize("encoder", [encode_reference, encode])
def test_bad_weights_are_refused(encoder):
    scheme, x = find("q3h"), weights(4, 128)
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[3, 5] = value
        with pytest.raises(FormatError, match=f"blk.0 cannot be quantised: row 3, column 5 is {value}"):
            encoder(bad, scheme, name="blk.0")
    with pytest.raises(RequestError, match="blk.0: q3h has blocks of 32 weights, which do not divide 80 columns"):
        encoder(x[:, :80], scheme, name="blk.0")
    with pytest.raises(RequestError, match="of shape .4, 0. cannot be quantised"):
        encoder(x[:, :0], scheme)
    with pytest.raises(RequestError, match="of shape .128. cannot be quantised"):
        encoder(x[0], scheme)
    with pytest.raises(RequestError, match="weights up to 1e.10; 2.27 is the most"):
        encoder(np.full((1, 32), -1e10, np.float32), scheme)
    with pytest.raises(RequestError, match="importances of blk.0 should be .128. or .4, 128., are .64."):
        encoder(x, scheme, np.ones(64), name="blk.0")
    with pytest.raises(RequestError, match="should be finite and not negative, are -1 to 1"):
        encoder(x, scheme, np.where(np.arange(128) == 3, -1, 1))


def test_what_is_asked_for_has_to_exist():
    assert find("Q3H") is ROW_SCHEMES["q3h"]
    assert find("q3h_b64t1").block == 64
    assert len(SCHEMES) == 7 + 14
    with pytest.raises(RequestError, match="no quantisation scheme named 'q3hh'; did you mean 'q3h'"):
        find("q3hh")
    with pytest.raises(RequestError, match="uses no calibration"):
        encode(weights(), find("q4_b32t1a"), np.ones(512))
    with pytest.raises(FormatError, match="should be rows of 238 bytes"):
        decode(np.zeros((2, 100), np.uint8), find("q3h"), 512)


def test_one_version_of_each_kernel_is_compiled():
    x = weights(4, 128)
    importance = np.ones(128, np.float32)  # of a file, as weights may be
    for array in (x, importance):
        array.flags.writeable = False
    for known in (None, importance, np.ones((4, 128))):
        quantised(x, find("q3h"), known)
    for kernel in (search_kernels._search, layout_kernels._pack, layout_kernels._decode):
        assert len(kernel.signatures) == 1
