"""Random checkpoints of a shape: they build, run, and have the size that the shape states."""

import numpy as np
import pytest

from numflow.errors import FormatError, RequestError
from numflow.lab.shapes import find_shape, random_checkpoint, random_network, shape_names

TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocabulary": 50}


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_builds(name):
    network, checkpoint = random_network(find_shape(name), "Q4_0")
    assert network.facts["layers"] == find_shape(name).layers
    assert checkpoint.nbytes == pytest.approx(find_shape(name).weights * 18 / 32, rel=2e-3)


@pytest.mark.parametrize("weights", ["F32", "F16", "Q4_0", "Q8_0", "q3h"])
def test_weights_are_finite_and_scaled(weights):
    tensor = random_checkpoint(find_shape("1b", **TINY), weights).tensors["model.layers.0.mlp.down_proj.weight"]
    values = tensor.f32()
    assert values.shape == (64, 96)
    assert values.std() == pytest.approx(96 ** -0.5, rel=0.2)
    assert np.array_equal(values[0], values[32])


def test_mistakes():
    with pytest.raises(RequestError, match="no shape .2b.; known: 135m"):
        find_shape("2b")
    with pytest.raises(FormatError, match="no tensor type named 'Q4'"):
        random_checkpoint(find_shape("1b"), "Q4")
