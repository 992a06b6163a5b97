"""Schemes with separate outliers: layout, errors, and models that have them."""

import numpy as np
import pytest

import numflow
from numflow import formats
from numflow.engine.quantise.quantize import quantize
from numflow.engine.quantise.verify import verify
from numflow.errors import FormatError, RequestError
from numflow.formats import container
from numflow.formats.types import tensor_type, to_f32
from numflow.quant import decode, encode, find
from numflow.quant.apart import _bfloat16, take_apart
from numflow.quant.recipe import Recipe, read_recipe
from tests.quant.small import TEXT, write_model


def weights(rows=64, columns=256, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32)
    x.ravel()[rng.integers(0, x.size, rows)] *= 40
    return x


def rms(x):
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


@pytest.mark.parametrize("name", ["q2+1%", "q3h+0.5%", "q4+2%", "q8+1%", "q3h_b64t1+1%"])
def test_outliers_are_all_but_exact_and_help_the_others(name):
    scheme, x = find(name), weights()
    raw = encode(x, scheme)
    assert raw.shape == (64, scheme.row_bytes(256)) == (64, scheme.base.row_bytes(256) + 4 * scheme.count(256))
    y, plain = decode(raw, scheme, 256), decode(encode(x, scheme.base), scheme.base, 256)
    largest = np.argmax(np.abs(x), axis=1)[:, None]
    np.testing.assert_allclose(np.take_along_axis(y, largest, 1), np.take_along_axis(x, largest, 1), rtol=0.01)
    assert rms(y - x) < 0.7 * rms(plain - x)


def test_the_layout_of_a_row():
    scheme, x = find("q4+0.8%"), weights(3)
    assert scheme.count(256) == 2 and scheme.name == "q4+0.8%"
    raw = encode(x, scheme)
    base, outliers = take_apart(raw, scheme, 256)
    columns, values = outliers.columns, (outliers.values.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(columns, np.sort(np.argsort(-np.abs(x), axis=1)[:, :2], axis=1))
    first = scheme.base.row_bytes(256)
    np.testing.assert_array_equal(raw[:, first:first + 4].copy().view("<u2"), columns)
    y = decode(base, scheme.base, 256)
    np.put_along_axis(y, columns, np.take_along_axis(y, columns, 1) + values, 1)
    np.testing.assert_array_equal(decode(raw, scheme, 256), y)
    np.testing.assert_array_equal(to_f32(raw, "q4+0.8%"), y)


def test_calibration_is_for_the_weights_that_stay():
    scheme, x = find("q3+1%"), weights()
    inputs = np.random.default_rng(2).standard_normal((900, 256)).astype(np.float32) * np.linspace(0.1, 3, 256)
    moment = (inputs.T @ inputs).astype(np.float32)
    plain, weighted, fed = (decode(encode(x, scheme, **known), scheme, 256) - x
                            for known in ({}, {"importance": np.diagonal(moment)}, {"moment": moment}))
    outputs = [rms(error @ inputs.T) for error in (plain, weighted, fed)]
    assert outputs[2] < outputs[1] < outputs[0]


@pytest.mark.parametrize("shape", [(64,), (1,), (), (64, 1), (2, 256)])
def test_importances_of_another_shape(shape):
    with pytest.raises(RequestError, match=r"importances of matrix should be \[256\] or \[64, 256\]"):
        encode(weights(), find("q3+1%"), importance=np.ones(shape, np.float32))


def test_bfloat16_rounds_to_nearest():
    x = np.float32([1, 1 + 2 ** -8, 1 + 3 * 2 ** -8, -1.00390625, 3.3e-39])
    assert _bfloat16(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF80, 0x0024]


@pytest.mark.parametrize("columns", [64, 256, 576, 640, 2048])
@pytest.mark.parametrize("name", ["q3h+0.5%", "q2+5%", "q8_b32t2+0.1%"])
def test_columns_follow_from_bytes(name, columns):
    kind = tensor_type(name)
    assert kind.columns(kind.row_bytes(columns)) == columns
    assert kind.columns(kind.row_bytes(columns) + 1) is None


def test_damaged_columns_count_for_nothing():
    scheme = find("q4+1%")
    raw = encode(weights(), scheme)
    raw[:, -4 * scheme.count(256):] = 255
    np.testing.assert_array_equal(decode(raw, scheme, 256), decode(take_apart(raw, scheme, 256)[0], scheme.base, 256))


@pytest.mark.parametrize("name, message", [
    ("q4+6%", "share of outliers should be over 0 and at most 5 %"), ("q4+0%", "over 0 and at most 5 %"),
    ("q4+x%", "no quantisation scheme named"), ("q44+1%", "no quantisation scheme named 'q44.1%'"),
    ("q4+1", "no quantisation scheme named")])
def test_names_that_are_none(name, message):
    with pytest.raises(RequestError, match=message):
        find(name)
    with pytest.raises(FormatError, match="no tensor type named"):
        tensor_type(name)


def test_names_are_brought_to_one_form():
    assert find("Q3H+0.50%") == find("q3h+0.5%") and read_recipe("q3h+0.50%").weights == "q3h+0.5%"
    with pytest.raises(RequestError, match="room for 65536 columns"):
        find("q4+1%").row_bytes(1 << 17)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(source, file written by numflow quantize)"""
    def far(tensors):
        for x in tensors.values():
            if x.ndim == 2:
                x[:, 5] *= 8

    source, file = write_model(tmp_path_factory.mktemp("source"), change=far), tmp_path_factory.mktemp("made") / "x"
    recipe = Recipe("apart", "q3h+3%", (("token_embd", "q6+2%"), ("*.ffn_up", "q4")))
    return source, file, quantize(formats.open_checkpoint(source), file, recipe)


def test_a_container_holds_them(made):
    source, file, report = made
    assert verify(file, source) == report
    rows = {row["name"]: row for row in report["tensors"]}
    assert rows["model.embed_tokens.weight"]["type"] == "q6+2%"
    assert rows["lm_head.weight"]["bytes"] == 257 * find("q3h+3%").row_bytes(64)
    checkpoint = formats.open_checkpoint(file)
    assert checkpoint.tensors["lm_head.weight"].type.name == "q3h+3%"
    assert report["bits_per_weight"] > 4.2  # outliers are counted
    again = quantize(checkpoint, file.with_name("again"), read_recipe("q3h"))
    assert container.read_report(file.with_name("again")) == again


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.thin(2)
def test_models_run_with_them(made, backend):
    source, file, report = made
    ids = list(TEXT[:40].encode())
    with numflow.load(source, backend="reference") as base, numflow.load(file, backend="reference") as reference:
        expected, exact = base.logits(ids), reference.logits(ids)
    with numflow.load(file, backend=backend, activations="f32") as model:
        found = model.logits(ids)
        assert model.bits_per_weight == pytest.approx(report["bits_per_weight"], abs=1e-5)
    np.testing.assert_allclose(found, exact, atol=2e-4 * np.abs(exact).max())
    with numflow.load(source, backend="reference", weights="q3h", calibration=False, progress=False) as without:
        assert rms(found - expected) < 0.5 * rms(without.logits(ids) - expected)


@pytest.mark.parametrize(("backend", "devices"), [
    ("reference", "0;1"), ("reference", "0&1"), pytest.param("cpu", "0&1", marks=pytest.mark.merge)])
def test_models_with_them_can_be_cut(made, backend, devices):
    ids = list(TEXT[:12].encode())
    with numflow.load(made[1], backend="reference") as whole, \
            numflow.load(made[1], backend=backend, devices=devices, activations="f32") as cut:
        np.testing.assert_allclose(cut.logits(ids), whole.logits(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.merge
def test_they_take_few_bytes_in_memory(made):
    source, file, _ = made
    with numflow.load(file, backend="cpu") as apart, numflow.load(source, backend="cpu", weights="q6") as q6, \
            numflow.load(source, backend="cpu") as floats:
        assert apart.program.weights_bytes < 1.1 * q6.program.weights_bytes < 0.6 * floats.program.weights_bytes
