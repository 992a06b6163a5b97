"""K types: decoded equally by the gguf package and by numflow, with less error than scales from the extremes of each
block.
"""

import gguf
import numpy as np
import pytest

from numflow.errors import RequestError
from numflow.formats.types import TYPES, to_f32
from numflow.quant.k_types import BLOCK, K_TYPES, encode

# Relative error for normally distributed weights: what is found, rounded up.
BOUNDS = {"Q2_K": 0.27, "Q3_K": 0.15, "Q4_K": 0.072, "Q5_K": 0.036, "Q6_K": 0.0175}
KINDS = {"normal": lambda rng, shape: rng.standard_normal(shape), "heavy": lambda rng, shape: rng.standard_t(3, shape),
         "one side": lambda rng, shape: rng.random(shape) + 0.5, "negative": lambda rng, shape: -rng.random(shape) - 2,
         "octaves": lambda rng, shape: rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, (shape[0], 1)))}


def weights(kind: str, rows: int = 12, columns: int = 768) -> np.ndarray:
    return KINDS[kind](np.random.default_rng(len(kind)), (rows, columns)).astype(np.float32)


def simple(x: np.ndarray, name: str) -> np.ndarray:
    """The same blocks with scales from the extremes of each sub-block, rounded as the type stores them."""
    kind = K_TYPES[name]
    blocks = x.reshape(-1, BLOCK // kind.size, kind.size)
    half = np.float16
    if kind.low:
        scales = np.abs(blocks).max(axis=2) / -kind.low
        d = half(scales.max(axis=1, keepdims=True) / (kind.levels - 1)).astype(np.float32)
        step = d * np.rint(np.divide(scales, d, out=np.zeros_like(scales), where=d > 0))
        least = np.zeros_like(step)
    else:
        least = np.maximum(-blocks.min(axis=2), 0)
        scales = (np.maximum(blocks.max(axis=2), 0) + least) / kind.high
        step, least = (d * np.rint(np.divide(part, d, out=np.zeros_like(part), where=d > 0)) for part in (scales, least)
                       for d in (half(part.max(axis=1, keepdims=True) / kind.levels).astype(np.float32),))
    step, least = step[..., None], least[..., None]
    codes = np.rint(np.divide(blocks + least, step, out=np.zeros_like(blocks), where=step > 0))
    return (step * np.clip(codes, kind.low, kind.high) - least).reshape(x.shape)


def error(y: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(y - x) / np.linalg.norm(x))


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin(8)
def test_both_readers_agree_and_the_error_is_below_that_of_simple_scales(name, kind):
    x = weights(kind)
    raw = encode(x, name)
    assert raw.shape == (len(x), TYPES[name].row_bytes(x.shape[1])) and raw.dtype == np.uint8
    y = to_f32(raw, name)
    np.testing.assert_array_equal(y, gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    assert error(y, x) <= error(simple(x, name), x)
    if kind == "normal":
        assert error(y, x) < BOUNDS[name]


@pytest.mark.parametrize("name", K_TYPES)
def test_rows_without_a_spread(name):
    x = np.zeros((6, 512), np.float32)
    x[1], x[2], x[3, 5], x[4, :256] = 3, -1, 7, 0.1
    y = to_f32(encode(x, name), name)
    assert not y[0].any() and not y[5].any()
    np.testing.assert_allclose(y[1:5], x[1:5], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", K_TYPES)
def test_what_a_type_holds_comes_back(name):
    """Encoding decoded weights again reproduces them, except for values between two codes."""
    x = to_f32(encode(weights("normal"), name), name)
    assert error(to_f32(encode(x, name), name), x) < BOUNDS[name] / 3


@pytest.mark.parametrize("name", K_TYPES)
def test_rows_do_not_depend_on_each_other_nor_on_threads(name):
    x = weights("octaves")
    whole = encode(x, name, threads=1)
    np.testing.assert_array_equal(encode(x, name, threads=3), whole)
    np.testing.assert_array_equal(encode(x[4:6], name), whole[4:6])


@pytest.mark.parametrize("name", K_TYPES)
def test_weights_beyond_float16_scales_are_refused(name):
    with pytest.raises(RequestError, match=rf"blk\.0 has weights up to 1e\+3\d, which {name} cannot hold"):
        encode(np.full((1, 256), 1e30, np.float32), name, "blk.0")
    large = weights("normal", 2, 256) * np.float32(1e5)
    assert error(to_f32(encode(large, name), name), large) < 1.1 * BOUNDS[name]


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.thin(3)
def test_what_matters_is_closer(name):
    x, c = weights("heavy"), np.random.default_rng(1).uniform(0, 1, 768).astype(np.float32) ** 8
    plain, better = (to_f32(encode(x, name, importance=known), name) for known in (None, c))
    assert (c * (better - x) ** 2).sum() < 0.9 * (c * (plain - x) ** 2).sum()
    np.testing.assert_array_equal(encode(x, name, importance=np.tile(c, (len(x), 1))), encode(x, name, importance=c))
    np.testing.assert_array_equal(encode(x, name, importance=np.full(768, 1, np.float32)), encode(x, name))
    nothing = encode(x, name, importance=np.zeros(768, np.float32))  # of a text that never came there
    np.testing.assert_array_equal(nothing, encode(x, name))
    with pytest.raises(RequestError, match=r"importances of matrix should be \[768\]"):
        encode(x, name, importance=c[1:])
