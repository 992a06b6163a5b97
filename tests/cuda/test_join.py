"""The join of attention parts: any number of parts and columns, and the operand made of the result."""

import numpy as np
import pytest

from numflow.cuda.attention.join import MOST_PARTS, join, join_two
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.patterns import together
from numflow.lab.shapes import Shape, random_network

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")

HEADS, ROWS = 3, 2
SIZES = ((2, 128), (5, 96), (33, 160), (MOST_PARTS, 32))
TWO = ((2, 2, 20), (32, 3, 130), (5, 32, 64))  # parts over one cache, parts over the other, columns


@pytest.mark.parametrize(("parts", "width", "kind"), [
    *((parts, width, "") for parts, width in (*SIZES, (3, 20), (7, 130))),
    *((*size, kind) for size in SIZES for kind in ("int8", "f16"))])
def test_parts_are_joined(parts, width, kind):
    """Rows beyond the batch, and memory beyond the columns, stay unchanged."""
    rng, stride = np.random.default_rng(parts), -(-HEADS * width // 32) * 32 + 32
    partial = rng.standard_normal((ROWS + 1, HEADS, parts, width + 2)).astype(np.float32)
    partial[..., 0] *= 8
    partial[..., 1] = 0.5 + rng.random((ROWS + 1, HEADS, parts))
    partial[:, :, 1, 0], partial[:, :, 1, 1:] = -3e38, 0          # a part without keys
    device, units = Simulated(seed=parts), HEADS * width // 32
    y, given, counts, codes, aux = (device.alloc(n) for n in (
        4 * (ROWS + 1) * stride, partial.nbytes, 64, 4096 * units + 16, 16 * (ROWS + 1) * units + 16))
    device.upload(y.at(), np.full((ROWS + 1, stride), 9, np.float32))
    device.upload(given.at(), partial)
    device.upload(counts.at(), np.array([ROWS, 0, 0, 0], np.int32))
    device.launch(Launch(join(kind), (HEADS, ROWS + 1, 1), (
        Rows(y.at(), stride), given.at(), parts, counts.at(), HEADS, width, codes.at() if kind else None,
        aux.at() if kind else None)))
    weights = np.exp(partial[..., :1].astype(float) - partial[..., :1].max(2, keepdims=True))
    expected = (weights * partial[..., 2:]).sum(2) / (weights[..., 0] * partial[..., 1]).sum(2)[..., None]
    found = device.download(y.at(), y.nbytes).view(np.float32).reshape(ROWS + 1, stride)
    expected = expected[:ROWS].reshape(ROWS, HEADS * width)
    np.testing.assert_allclose(found[:ROWS, :HEADS * width], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (found[ROWS] == 9).all() and (found[:, HEADS * width:] == 9).all()
    if kind == "f16":
        tiles = device.download(codes.at(), 4096 * units).view(np.float16).reshape(units, 64, 4, 8)
        row, part = np.ogrid[:ROWS, :4]                              # parts of a row are exchanged (lang/warpgroup.py)
        halves = tiles[:, row, part ^ row // 2 % 4].transpose(1, 0, 2, 3).reshape(ROWS, HEADS * width)
        np.testing.assert_array_equal(halves, found[:ROWS, :HEADS * width].astype(np.float16))
        assert (device.download(aux.at(), 4 * ROWS).view(np.float32) == 1).all()
    elif kind:
        _check_operand(device, codes, aux, units, found[:ROWS, :HEADS * width])


@pytest.mark.parametrize(("own", "other", "width"), TWO)
def test_parts_over_two_caches_are_joined(own, other, width):
    """As one softmax over the keys of both. Rows beyond the batch stay unchanged."""
    rng, device = np.random.default_rng(own), Simulated(seed=own)
    partial = rng.standard_normal((ROWS + 1, HEADS, own + other, width + 2)).astype(np.float32)
    partial[..., 0] *= 8
    partial[..., 1] = 0.5 + rng.random((ROWS + 1, HEADS, own + other))
    partial[:, :, own + 1, 0], partial[:, :, own + 1, 1:] = -3e38, 0  # a part without keys
    halves = [np.ascontiguousarray(half) for half in np.split(partial, [own], axis=2)]
    y, first, second, counts = (device.alloc(n) for n in (
        4 * (ROWS + 1) * HEADS * width, *(half.nbytes for half in halves), 64))
    for memory, values in ((y, np.full((ROWS + 1, HEADS * width), 9, np.float32)), (first, halves[0]),
                           (second, halves[1]), (counts, np.array([ROWS, 0, 0, 0], np.int32))):
        device.upload(memory.at(), values)
    device.launch(Launch(join_two(), (HEADS, ROWS + 1, 1), (
        Rows(y.at(), HEADS * width), first.at(), own, second.at(), other, counts.at(), HEADS, width)))
    weights = np.exp(partial[..., :1].astype(float) - partial[..., :1].max(2, keepdims=True))
    expected = (weights * partial[..., 2:]).sum(2) / (weights[..., 0] * partial[..., 1]).sum(2)[..., None]
    found = device.download(y.at(), y.nbytes).view(np.float32).reshape(ROWS + 1, HEADS, width)
    np.testing.assert_allclose(found[:ROWS], expected[:ROWS], rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (found[ROWS] == 9).all()


def _check_operand(device, codes, aux, units: int, y: np.ndarray) -> None:
    """Check the layout of weights/operand.py."""
    words = device.download(codes.at(), 32 * ROWS * units).view(np.int8).reshape(ROWS, 2, units, 16)
    numbers = words.transpose(0, 2, 1, 3).reshape(ROWS, units, 32).astype(np.float32)
    scale, total, half, _ = device.download(aux.at(), 16 * ROWS * units).view(np.float32).reshape(ROWS, units, 4).T
    scale, total, half = scale.T, total.T, half.T
    y = y.reshape(ROWS, units, 32)
    np.testing.assert_allclose(scale, np.abs(y).max(2) / 127, rtol=1e-6)
    assert (np.abs(numbers * scale[..., None] - y) <= 0.5001 * scale[..., None]).all()
    np.testing.assert_allclose(total, scale * numbers.sum(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(half, scale * numbers[..., :16].sum(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "width", "heads", "expected"), [
    ("q4", 128, 2, 1), ("F16", 128, 2, 0), ("q4", 96, 4, 0)])
def test_which_attentions_make_an_operand(kind, width, heads, expected):
    """Attention steps whose heads fill units of 32 columns, before a matrix with int8 activations. Not the last
    layer's: it continues with logit rows only."""
    network, _ = random_network(Shape(2, width, heads, 1, 96, 40, 64), kind)
    found = together(network, "main", "int8", network.caches).joined
    assert len(found) == expected and all(network.entries["main"][index].op == "attention" for index in found)
    assert not together(network, "main", "f32", network.caches).joined
