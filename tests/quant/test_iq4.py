"""IQ4_NL and IQ4_XS: decoded equally by the gguf package and by numflow, with less error than scales from the extremes.
"""

import gguf
import numpy as np
import pytest

from numflow.errors import RequestError
from numflow.formats.types import TYPES, to_f32
from numflow.quant.iq4 import IQ4_TYPES, encode
from numflow.quant.stored import IQ4
from tests.quant.test_k_types import KINDS, error, weights

BOUND = 0.078  # relative error for normally distributed weights: what is found, rounded up


def simple(x: np.ndarray) -> np.ndarray:
    """Blocks of 32 whose largest weight gets the outermost codebook value, with float32 scales."""
    blocks, book = x.reshape(-1, 32), np.array(IQ4, np.float32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], 1)
    scales = largest / book[0]
    levels = np.divide(blocks, scales, out=np.zeros_like(blocks), where=scales != 0)
    return (scales * book[np.abs(levels[..., None] - book).argmin(axis=2)]).reshape(x.shape)


@pytest.mark.parametrize("name", IQ4_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_readers_agree_and_the_error_is_below_that_of_simple_scales(name, kind):
    x = weights(kind)
    raw = encode(x, name)
    assert raw.shape == (len(x), TYPES[name].row_bytes(x.shape[1])) and raw.dtype == np.uint8
    y = to_f32(raw, name)
    np.testing.assert_array_equal(y, gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    assert error(y, x) <= (1 if name == "IQ4_NL" else 1.02) * error(simple(x), x)  # of 6 bits, where those have 32
    if kind == "normal":
        assert error(y, x) < BOUND


@pytest.mark.parametrize("name", IQ4_TYPES)
def test_rows_without_a_spread_and_rows_apart(name):
    x = np.zeros((6, 512), np.float32)
    x[1], x[2], x[3, 5], x[4, :256] = 3, -1, 7, 0.1
    y = to_f32(encode(x, name), name)
    assert not y[0].any() and not y[5].any()
    np.testing.assert_allclose(y[[1, 2]], x[[1, 2]], rtol=4e-3)
    np.testing.assert_array_equal(encode(x[2:4], name), encode(x, name, threads=3)[2:4])


@pytest.mark.parametrize("name", IQ4_TYPES)
def test_what_matters_is_closer(name):
    x, c = weights("heavy"), np.random.default_rng(1).uniform(0, 1, 768).astype(np.float32) ** 8
    plain, better = (to_f32(encode(x, name, importance=known), name) for known in (None, c))
    assert (c * (better - x) ** 2).sum() < 0.9 * (c * (plain - x) ** 2).sum()
    np.testing.assert_array_equal(encode(x, name, importance=np.tile(c, (len(x), 1))), encode(x, name, importance=c))
    np.testing.assert_array_equal(encode(x, name, importance=np.full(768, 1, np.float32)), encode(x, name))


@pytest.mark.parametrize("name", IQ4_TYPES)
def test_weights_beyond_float16_scales_are_refused(name):
    with pytest.raises(RequestError, match=rf"blk\.0 has weights up to 1e\+3\d, which {name} cannot hold"):
        encode(np.full((1, 256), 1e30, np.float32), name, "blk.0")
