"""Packing of matrices: the device kernels, and the host for types without one, make the planes of the type's fields."""

import numpy as np
import pytest

from numflow.cuda.device.device import Simulated
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.pack import upload
from numflow.cuda.weights.pack_fields import planes
from numflow.formats.types import TYPES
from numflow.network.weights.source import RawMatrix
from numflow.quant.stored import STORED
from tests.cuda.matrices import QUANTISED, stored

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
_SOME = {"Q4_K", "IQ4_NL", "q3h_b64t1", "q4_b16"}  # .ci/cuda has all


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in _SOME else pytest.mark.slow)
                                  for name in QUANTISED])
def test_a_device_has_the_planes_of_the_fields(name):
    """Also for the types that a kernel packs on the device."""
    columns = TYPES[name].block * (3 if TYPES[name].block > 16 else 6)
    _check_planes(name, stored(name, 3, columns), columns)


def test_every_scale_of_the_4_bit_floats_on_a_device():
    blocks = np.random.default_rng(0).integers(0, 256, (64, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    _check_planes("NVFP4", blocks.reshape(1, -1), 64 * 64)


def _check_planes(name, rows, columns):
    scheme = SCHEMES[STORED[name].kind.name]
    matrix = upload(RawMatrix("w", name, rows, (len(rows), columns)), Simulated())
    assert (matrix.kind, matrix.type, matrix.expanded_from) == (scheme.name, name, None)
    made = planes(scheme, *STORED[name].fields(rows, columns))
    assert made.keys() == matrix.parts.keys() == scheme.parts.keys()
    for part, expected in made.items():
        ref = matrix.parts[part]
        found = ref.memory.handle[ref.offset:ref.offset + expected.size].reshape(expected.shape)
        np.testing.assert_array_equal(found, expected, part)
