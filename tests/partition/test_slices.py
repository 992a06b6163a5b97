"""Slices of weights decode to the same slices of the whole weight, in the stored type, for every type."""

import numpy as np
import pytest

from numflow.errors import NetworkError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import tensor_type, to_f32
from numflow.network import WeightSource
from numflow.ops import Network, Part, Weight
from numflow.partition.cut.slices import column_unit, columns_of, experts_of, rows_of
from numflow.quant import encode, find

ROWS, COLUMNS = 12, 768
QUANTISED = ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "q2", "q3", "q3h", "q4", "q6", "q8",
             "q3h_b64t1", "q4_b32t1a")


def _stored(type_name: str) -> np.ndarray:
    """uint8 [ROWS, row_bytes]: encoded weights for numflow's own schemes, random bytes for others."""
    rng = np.random.default_rng(3)
    if type_name[0] == "q":
        return encode(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), find(type_name))
    if type_name == "F32":
        return rng.standard_normal((ROWS, COLUMNS)).astype(np.float32).view(np.uint8)
    return rng.integers(0, 96, (ROWS, tensor_type(type_name).row_bytes(COLUMNS)), np.uint8)


def _source(weight: Weight, type_name: str, raw: np.ndarray) -> WeightSource:
    tensor = Tensor("t", (ROWS, COLUMNS), tensor_type(type_name), lambda: raw)
    network = Network("toy", {}, {}, {weight.name: weight}, {}, {}, {})
    return WeightSource(network, Checkpoint(None, "gguf", "gguf", {"t": tensor}, {}))


@pytest.mark.parametrize("type_name", ["q3h+2%", "q2+0.5%", "q3h_b64t1+1%"])
def test_columns_of_matrices_with_outliers(type_name):
    raw, wide = _stored(type_name), (Part("t", range(3, 7)), Part("t", range(2)))
    values = to_f32(raw, type_name)[[3, 4, 5, 6, 0, 1]]
    whole = Weight("w", (6, COLUMNS), wide, types=(type_name,) * 2)
    for begin, end in ((0, 256), (256, 320), (320, COLUMNS)):
        cut = columns_of(whole, begin, end)
        source = _source(cut, type_name, raw)
        np.testing.assert_array_equal(source.f32(cut.name), values[:, begin:end])
        stored = source.raw(cut.name)
        assert stored.type == type_name.partition("+")[0]
        assert stored.rows.shape == (6, tensor_type(stored.type).row_bytes(end - begin))
        np.testing.assert_array_equal(stored.f32(), values[:, begin:end])
    cut = columns_of(whole, 16, 64)
    with pytest.raises(NetworkError, match="cut a block of"):
        _source(cut, type_name, raw).raw(cut.name)


@pytest.mark.parametrize("type_name", ["F32", *QUANTISED])
def test_rows_and_columns(type_name):
    raw = _stored(type_name)
    whole = Weight("w", (ROWS, COLUMNS), (Part("t"),), types=(type_name,))
    values = to_f32(raw, type_name)
    unit = column_unit(whole)
    assert unit == 1 if type_name == "F32" else unit % 32 == 0
    for begin, end in ((0, COLUMNS // 3), (256, 512), (512, COLUMNS)):
        cut = rows_of(columns_of(whole, begin, end), 2, 9)
        assert cut.name == (f"w[:, {begin}:{end}][2:9]") and cut.shape == (7, end - begin)
        source = _source(cut, type_name, raw)
        np.testing.assert_array_equal(source.f32(cut.name), values[2:9, begin:end])
        stored = source.raw(cut.name)
        assert stored.type == type_name and stored.rows.shape[1] == tensor_type(type_name).row_bytes(end - begin)
        np.testing.assert_array_equal(to_f32(stored.rows, type_name), values[2:9, begin:end])


@pytest.mark.parametrize(("types", "unit"), [
    (("Q8_GS8",), 32), (("Q8_GS16",), 32), (("Q8_GS24",), 96), (("Q8_GS64",), 64), (("Q4_0",), 32), (("Q6_K",), 256),
    (("Q8_GS16", "F32"), 32), (("Q4_0", "Q8_GS48"), 96), (("F32",), 1), (("F16", "BF16"), 1)])
def test_columns_that_share_an_operand_s_scale_stay_together(types, unit):
    """Activations have one scale per 32 columns, however small the weights' blocks are."""
    assert column_unit(Weight("w", (ROWS, COLUMNS), (Part("t"),) * len(types), types=types)) == unit


def test_a_block_is_not_cut():
    whole = Weight("w", (ROWS, COLUMNS), (Part("t"),), types=("Q4_0",))
    cut = columns_of(whole, 16, 64)
    with pytest.raises(NetworkError, match=r"columns 16 \.\. 64 of tensor 't' cut a block of 32 Q4_0 weights"):
        _source(cut, "Q4_0", _stored("Q4_0")).raw(cut.name)


def test_slices_of_slices():
    whole = Weight("w", (6, COLUMNS), (Part("t", range(1, 12, 2)),), types=("F32",))
    cut = columns_of(columns_of(rows_of(rows_of(whole, 1, 6), 2, 4), 100, 300), 10, 20)
    assert cut.parts == (Part("t", range(7, 11, 2), False, (110, 120)),)


def test_experts():
    values = np.arange(4 * 3 * 8, dtype=np.float32).reshape(12, 8)
    one = Weight("one", (12, 8), (Part("t"),), groups=4, types=("F32",))
    assert experts_of(one, 1, 3).parts == (Part("t", range(3, 9)),) and experts_of(one, 1, 3).groups == 2
    each = Weight("each", (12, 8), tuple(Part(name) for name in "abcd"), groups=4, types=("F32", "F16", "F32", "F32"))
    cut = experts_of(each, 1, 3)
    assert [part.tensor for part in cut.parts] == ["b", "c"] and cut.types == ("F16", "F32") and cut.shape == (6, 8)
    constant = Weight("c", (12, 8), constant=values, types=("F32",))
    np.testing.assert_array_equal(columns_of(rows_of(constant, 2, 5), 1, 3).constant, values[2:5, 1:3])


def test_rows_that_must_stay_whole():
    assert column_unit(Weight("w", (4, 8), (Part("t"),), normalize_rows=True, types=("F32",))) == 0
    assert column_unit(Weight("w", (4, 512), (Part("t"),), types=("Q4_K",))) == 256
    assert column_unit(Weight("w", (4, 512), (Part("t"), Part("u")), types=("F32", "NVFP4"))) == 64
