"""Cache of tensors quantised at load (`weights=`): the next start reads them, and stale files are never used."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

import numflow
from numflow import formats, kernel_cache
from numflow.engine.quantise.calibrate import calibrate
from numflow.network.quantise import kept as kept_tensors
from numflow.network.quantise import quantise
from tests.quant.small import TEXT, write_model

IDS = [1, 2, 3, 200, 7]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model and its calibration."""
    folder = tmp_path_factory.mktemp("original")
    model = write_model(folder / "model", ffn=128)
    calibrate(model, TEXT, 64, 2).write(folder / "calibration.safetensors")
    return folder


@pytest.fixture
def model(original, tmp_path):
    """A copy of the model that a test may change."""
    return shutil.copytree(original / "model", tmp_path / "model")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The cache folder; also small tensors are kept there."""
    monkeypatch.setenv("NUMFLOW_PREPARED", "1")
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tensors, "SMALLEST", 1)
    return tmp_path / "cache" / "quantised"


@pytest.fixture
def made(monkeypatch):
    """Names of the tensors that are quantised, recorded."""
    names, encoded = [], quantise.encoded

    def recorded(tensor, *args):
        names.append(tensor.name)
        return encoded(tensor, *args)

    monkeypatch.setattr(quantise, "encoded", recorded)
    return names


def start(path, made, **options):
    """(logits, number of quantised tensors) of a start on the reference, which needs no compilation; uncalibrated by
    default."""
    before, calibrated = len(made), "imatrix" in options
    defaults = {"backend": "reference", "weights": "q4", "calibration": calibrated}
    with numflow.load(path, **{**defaults, **options}) as model:
        return model.logits(IDS), len(made) - before


@pytest.mark.merge
def test_the_second_start_quantises_nothing_and_has_the_same_bits(model, folder, made):
    first, count = start(model, made)
    again, none = start(model, made)
    assert count == len(os.listdir(folder)) == 16 and none == 0
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("options", [
    {"weights": "q3h+3%"},
    *(pytest.param(options, marks=pytest.mark.merge) for options in (
        {"weights": "q4_b32t1a"}, {"backend": "cpu", "threads": 1},
        {"backend": "cpu", "threads": 1, "devices": "0&1"}))])
def test_every_executor_and_scheme(model, folder, made, options):
    first, count = start(model, made, **options)
    again, none = start(model, made, **options)
    assert count >= 16 and none == 0
    np.testing.assert_array_equal(first, again)


def test_recipes_share_what_they_have_in_common(model, folder, made):
    start(model, made)
    mixed, count = start(model, made, weights="q4-mix")
    assert 0 < count < 16
    assert start(model, made)[1] == 0 and start(model, made, weights="q8")[1] == 16
    np.testing.assert_array_equal(start(model, made, weights="q4-mix")[0], mixed)


def test_a_calibration_counts(original, model, folder, made):
    calibration = shutil.copy2(original / "calibration.safetensors", model)
    plain = start(model, made)[0]
    calibrated, count = start(model, made, imatrix=calibration)
    assert count == 16 and not np.array_equal(plain, calibrated)
    again, none = start(model, made, imatrix=calibration)
    assert none == 0 and np.array_equal(again, calibrated)
    assert np.array_equal(start(model, made)[0], plain) and len(made) == 32
    os.utime(calibration)
    assert start(model, made, imatrix=calibration)[1] == 16


def test_another_content_under_the_same_name(model, folder, made):
    before = start(model, made)[0]
    write_model(model, ffn=128, change=lambda tensors: tensors["lm_head.weight"].__imul__(2))
    after, count = start(model, made)
    assert count == 16 == len(os.listdir(folder)) and not np.array_equal(before, after)
    np.testing.assert_array_equal(after, start(model, made)[0])


def test_off_and_small_models(model, folder, made, monkeypatch):
    monkeypatch.setattr(kept_tensors, "SMALLEST", 1 << 20)
    assert start(model, made)[1] == start(model, made)[1] == 16
    monkeypatch.setattr(kept_tensors, "SMALLEST", 1)
    monkeypatch.setenv("NUMFLOW_PREPARED", "0")
    assert start(model, made)[1] == start(model, made)[1] == 16
    assert not folder.exists()


def test_no_room(model, folder, made, monkeypatch):
    monkeypatch.setattr(kept_tensors.kept, "make_room", lambda path, nbytes: False)
    assert start(model, made)[1] == start(model, made)[1] == 16
    assert not folder.exists()


def test_a_folder_that_cannot_be(model, folder, made):
    folder.parent.write_text("a file in its place")
    assert start(model, made)[1] == start(model, made)[1] == 16


@pytest.mark.parametrize("damage", [
    lambda content: content[:-10], lambda content: b"", lambda content: bytes(len(content)),
    lambda content: content[:-10] + bytes([content[-10] ^ 1]) + content[-9:],
    lambda content: content.replace(b'"sum"', b'"mum"'), lambda content: content.replace(b'"rows"', b'"cows"')])
@pytest.mark.thin(2)
def test_a_broken_file_is_written_anew(model, folder, made, damage):
    first = start(model, made)[0]
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    found, count = start(model, made)
    assert count == 1 and path.read_bytes() == whole
    np.testing.assert_array_equal(found, first)


@pytest.mark.parametrize("module", [
    "numflow.quant.search_kernels", "numflow.quant.layout_kernels", "numflow.quant.apart", "numflow.quant.feedback",
    "numflow.quant.inferflow_kernels", "numflow.network.quantise.quantise", "numflow.formats.gguf"])
def test_the_version_is_of_all_sources_that_quantise(module, monkeypatch):
    before, read, source = kept_tensors._quantiser(), kernel_cache.read, kernel_cache.source_of(module)
    monkeypatch.setattr(kernel_cache, "read", lambda path: read(path) + (b"#" if path == source else b""))
    kept_tensors._quantiser.cache_clear()
    try:
        assert kept_tensors._quantiser() != before
    finally:
        kept_tensors._quantiser.cache_clear()


def test_it_is_told_once(model, folder, made, capsys):
    start(model, made)
    assert capsys.readouterr().err.count("quantising to q4, kept for the next start") == 1
    start(model, made)
    assert capsys.readouterr().err == ""


def test_what_is_no_file_is_not_kept(model, folder):
    checkpoint = replace(formats.open_checkpoint(model), files={"weights": [model / "missing"]})
    assert kept_tensors.KeptTensors.open(checkpoint, None, 1 << 30) is None
