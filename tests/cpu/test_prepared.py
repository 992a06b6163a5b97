"""Packed weights on disk: the second start has the same bits without packing, and stale files are never used."""

import os
import shutil
import threading
import time
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest

import numflow
from numflow import formats, kernel_cache
from numflow.cpu import context
from numflow.cpu.memory import array_file
from numflow.cpu.program import Program
from numflow.cpu.weights import prepared
from numflow.engine.quantise.quantize import quantize
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.quant.recipe import read_recipe
from tests.conftest import real_model
from tests.quant.small import write_model

IDS = [1, 2, 3, 200, 7]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Container files of one model, by recipe."""
    folder = tmp_path_factory.mktemp("made")
    source = formats.open_checkpoint(write_model(folder / "source", ffn=128))
    files = {recipe: folder / f"{recipe}.safetensors" for recipe in ("q4", "q3h", "q3h+3%")}
    for recipe, file in files.items():
        quantize(source, file, read_recipe(recipe))
    return files


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The folder of packed weights, with small weights stored too."""
    monkeypatch.setenv("NUMFLOW_PREPARED", "1")
    monkeypatch.setattr(prepared, "_SMALLEST", 1)
    monkeypatch.setattr(prepared, "folder", lambda: tmp_path / "cache" / "prepared")
    return tmp_path / "cache" / "prepared"


@pytest.fixture
def file(made, tmp_path):
    """A container file that a test may change."""
    return shutil.copy2(made["q4"], tmp_path / "model.safetensors")


@pytest.fixture
def packed(monkeypatch):
    """Names of the matrices that are packed."""
    names, pack = [], context.pack

    def recorded(raw, threads, spread):
        names.append(raw.name)
        return pack(raw, threads, spread)

    monkeypatch.setattr(context, "pack", recorded)
    return names


def run(path, packed, **options):
    """(logits, how many matrices were packed) of a start."""
    before = len(packed)
    with numflow.load(path, threads=1, **options) as model:
        return model.logits(IDS), len(packed) - before


def matrices(path, **options):
    with numflow.load(path, threads=1, **options) as model:
        return dict(model.program._weights.matrices)


def test_the_second_start_packs_nothing_and_has_the_same_bits(file, kept, packed):
    first = matrices(file)
    assert packed and len(os.listdir(kept)) == 1
    packed.clear()
    second = matrices(file)
    assert packed == [] and second.keys() == first.keys()
    for name, matrix in second.items():
        np.testing.assert_array_equal(matrix.codes, first[name].codes)
        np.testing.assert_array_equal(matrix.headers, first[name].headers)
        assert repr(matrix) == repr(first[name])
        assert matrix.codes.ctypes.data % 64 == 0 and matrix.codes.flags.writeable


def test_logits_are_the_same(file, kept, packed):
    first, count = run(file, packed)
    again, none = run(file, packed)
    assert count >= 10 and none == 0
    np.testing.assert_array_equal(first, again)


def test_off(file, kept, packed, monkeypatch):
    monkeypatch.setenv("NUMFLOW_PREPARED", "0")
    assert run(file, packed)[1] == run(file, packed)[1] >= 10
    assert not kept.exists()


def test_small_models_are_packed_each_time(file, kept, packed, monkeypatch):
    monkeypatch.setattr(prepared, "_SMALLEST", 8 << 20)
    assert run(file, packed)[1] == run(file, packed)[1] >= 10
    assert not kept.exists()


def test_only_what_numflow_made_is_kept(made, kept, packed):
    source = made["q4"].parent / "source"
    expected, count = run(source, packed, weights="q4", calibration=False)
    again, same = run(source, packed, weights="q4", calibration=False)
    assert count == same >= 10 and not kept.exists()
    np.testing.assert_array_equal(expected, again)
    run(made["q3h"], packed)
    # Weights that are quantised at load are not the content of a container.
    with_other, count = run(made["q3h"], packed, weights="q4", calibration=False)
    assert count >= 10
    assert not np.array_equal(with_other, run(made["q3h"], packed)[0])


def test_outliers_are_packed_as_ever(made, kept, packed):
    first, count = run(made["q3h+3%"], packed)
    again, same = run(made["q3h+3%"], packed)
    assert count == same
    np.testing.assert_array_equal(first, again)


def test_another_content_under_the_same_name(file, made, kept, packed):
    run(file, packed)
    (old,) = kept.iterdir()
    shutil.copy2(made["q3h"], file)
    expected = run(made["q3h"], packed)[0]
    found, count = run(file, packed)
    assert count >= 10 and not old.exists()
    np.testing.assert_array_equal(found, expected)


def test_a_byte_changed_in_place(file, kept, packed):
    first = run(file, packed)[0]
    tensor = formats.open_checkpoint(file).tensors["model.layers.0.self_attn.v_proj.weight"]
    content = file.read_bytes()
    at = content.index(tensor.raw().tobytes())
    with open(file, "r+b") as stream:
        stream.seek(at)
        stream.write(bytes([content[at] ^ 0x77]) * 8)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    changed, count = run(file, packed)
    assert count >= 10 and not np.array_equal(first, changed)


def test_another_version_of_the_code_that_packs(file, kept, packed, monkeypatch):
    run(file, packed)
    monkeypatch.setattr(prepared, "_packer", lambda: "other sources")
    assert run(file, packed)[1] >= 10
    assert len(os.listdir(kept)) == 2 and run(file, packed)[1] == 0


@pytest.mark.parametrize("module", ["numflow.cpu.weights.layout", "numflow.cpu.weights.pack",
                                    "numflow.cpu.weights.pack_kernels",
                                    "numflow.cpu.weights.pack_blocks", "numflow.cpu.weights.pack_own_kernels",
                                    "numflow.cpu.weights.pack_planes", "numflow.quant.layout",
                                    "numflow.quant.stored", "numflow.quant.grids"])
def test_the_version_is_of_all_sources_that_pack(module, monkeypatch):
    before, read, source = prepared._packer(), kernel_cache.read, kernel_cache.source_of(module)
    monkeypatch.setattr(kernel_cache, "read", lambda path: read(path) + (b"#" if path == source else b""))
    prepared._packer.cache_clear()
    try:
        assert prepared._packer() != before
    finally:
        prepared._packer.cache_clear()


def _cut(content):
    return content[:len(content) // 2]


def _flip(content):
    return content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:]


def _flip_header(content):
    at = content.index(b"data_offsets") + 16
    return content[:at] + b"9" + content[at + 1:]


def _no_sums(content):
    return content.replace(b'"sums"', b'"mums"')


@pytest.mark.parametrize("damage", [_cut, _flip, _flip_header, _no_sums, lambda content: b"",
                                    lambda content: bytes(len(content))])
def test_a_broken_file_is_written_anew(file, kept, packed, damage):
    first = run(file, packed)[0]
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    found, count = run(file, packed)
    assert count > 0
    np.testing.assert_array_equal(found, first)
    assert path.read_bytes() == whole and run(file, packed)[1] == 0


def test_a_folder_that_cannot_be(file, kept, packed):
    kept.parent.parent.mkdir(exist_ok=True)
    kept.parent.write_text("a file in its place")
    first = run(file, packed)
    assert first[1] == run(file, packed)[1] >= 10


def test_a_full_disk(file, kept, packed, monkeypatch):
    size = sum(m.nbytes for m in matrices(file).values())
    shutil.rmtree(kept)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(4 * size - 1))
    assert run(file, packed)[1] >= 10 and os.listdir(kept) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(4 * size))
    assert run(file, packed)[1] >= 10 and run(file, packed)[1] == 0


@pytest.mark.parametrize("devices", ["0;1", "0&1", "0&1;2&3"])
def test_slices_of_devices(file, kept, packed, devices):
    expected = run(file, packed, devices=devices)
    again = run(file, packed, devices=devices)
    assert expected[1] >= 10 and again[1] == 0
    np.testing.assert_array_equal(expected[0], again[0])
    assert len(os.listdir(kept)) == devices.count(";") + devices.count("&") + 1
    whole, count = run(file, packed)
    assert count >= 10 and whole.shape == expected[0].shape
    assert run(file, packed, devices=devices)[1] == 0


def test_writers_at_once(file, kept, packed):
    expected = run(file, packed)[0]
    shutil.rmtree(kept)
    found, threads = [], [threading.Thread(target=lambda: found.append(run(file, [])[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(np.array_equal(each, expected) for each in found)
    assert len(os.listdir(kept)) == 1 and run(file, packed)[1] == 0


def test_what_is_unused_goes_and_what_is_used_stays(file, kept, packed):
    run(file, packed)
    (path,) = kept.iterdir()
    old = time.time() - (kernel_cache.KEEP_DAYS - 1) * 86400
    stale = kept / ".left.1.part"
    stale.write_bytes(b"x")
    os.utime(stale, (old - 2 * 86400,) * 2)
    os.utime(path, (old, old))
    before = path.stat().st_mtime
    assert run(file, packed)[1] == 0
    assert os.listdir(kept) == [path.name] and path.stat().st_mtime > before + 3600


@pytest.mark.parametrize("nbytes", [0, 5, 64, (1 << 20) + 3, 9 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_come_back(tmp_path, nbytes, threads):
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    array_file.write(tmp_path / "a", {"first": values[:nbytes // 2], "x": values})
    found = array_file.ArrayFile(tmp_path / "a")
    np.testing.assert_array_equal(found.read("x", nbytes, threads), values)
    assert found.read("x", nbytes + 1, threads) is None and found.read("y", nbytes, threads) is None


def test_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMFLOW_CACHE", str(tmp_path))
    assert prepared.folder() == tmp_path / "prepared" and kernel_cache.root() == tmp_path / "kernels"


@pytest.mark.slow
def test_a_real_model(tmp_path, kept, packed):
    target = tmp_path / "real.safetensors"
    quantize(formats.open_checkpoint(real_model("SmolLM2-135M-Instruct.Q4_1.gguf")), target, read_recipe("q8"))
    expected, count = run(target, packed)
    found, none = run(target, packed)
    assert count > 100 and none == 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.merge
def test_each_form_of_a_grid_type_has_a_file(kept, packed, monkeypatch, tmp_path):
    network, checkpoint = random_network(Shape(1, 256, 4, 2, 256, 97, 64), "IQ2_S")
    (tmp_path / "model").write_bytes(b"1")
    source = WeightSource(network, replace(checkpoint, path=tmp_path / "model"))
    monkeypatch.setattr(prepared.container, "identity", lambda checkpoint: "one")
    first = {}
    for forms in (("compact", "fast"), ("compact", "fast")):
        for form in forms:
            program = Program(network, source, threads=1, iq=form)
            matrices = dict(program._weights.matrices)
            for name, matrix in first.setdefault(form, matrices).items():
                np.testing.assert_array_equal(matrices[name].codes, matrix.codes)
                np.testing.assert_array_equal(matrices[name].headers, matrix.headers)
                assert repr(matrices[name]) == repr(matrix)
            program.close()
        assert len(os.listdir(kept)) == 2
    assert len(packed) == 2 * len(first["fast"]) and first["fast"].keys() == first["compact"].keys()
