"""safetensors: against the published package, and every field broken in turn."""

import json
import tracemalloc

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats import open_checkpoint
from numflow.formats.safetensors import MAX_HEADER_BYTES, read
from tests.conftest import real_model
from tests.formats.make import damaged, refused, safetensors, survives, values

A, B = values(6).reshape(2, 3), values(4)
DATA = A.tobytes() + B.tobytes()


def header(**changed) -> dict:
    a = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    b = {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]}
    return {"a": {**a, **changed}, "b": b}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_values_and_order(path):
    path.write_bytes(safetensors({"__metadata__": {"format": "pt"}, **dict(reversed(header().items()))}, DATA))
    tensors = read(path)
    assert list(tensors) == ["a", "b"]
    assert (tensors["a"].shape, tensors["a"].rows, tensors["a"].type.name) == ((2, 3), 2, "F32")
    np.testing.assert_array_equal(tensors["a"].f32(), A)
    np.testing.assert_array_equal(tensors["b"].f32(), B)
    assert not tensors["a"].raw().flags.writeable


def test_scalars_empty_tensors_and_padded_headers(path):
    text = json.dumps({"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                       "e": {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]}}).encode() + b"    "
    path.write_bytes(safetensors(text, values(1).tobytes()))
    tensors = read(path)
    assert tensors["s"].f32().shape == ()
    assert tensors["e"].f32().shape == (0, 7)
    path.write_bytes(safetensors({}))
    assert read(path) == {}


def test_files_of_the_published_package(path):
    from safetensors.numpy import save_file

    made = {name: np.arange(12).reshape(3, 4).astype(dtype)
            for name, dtype in (("f2", "f2"), ("f4", "f4"), ("f8", "f8"), ("i8", "i8"), ("u1", "u1"), ("b", "?"))}
    save_file(made, path)
    for name, tensor in read(path).items():
        np.testing.assert_array_equal(tensor.f32(), made[name].astype(np.float32))


def test_a_real_model_equals_the_published_package():
    from safetensors import safe_open

    path = real_model("all-MiniLM-L6-v2", "model.safetensors")
    tensors = read(path)
    with safe_open(path, "np") as published:
        assert set(published.keys()) == set(tensors)
        for name in list(tensors)[::10]:
            np.testing.assert_array_equal(tensors[name].f32(), published.get_tensor(name).astype(np.float32))


@pytest.mark.parametrize(("made", "match"), [
    (b"", "empty"),
    (b"\0\0\0", "too short"),
    (safetensors(header(), DATA, length=MAX_HEADER_BYTES + 1), "at most 100000000"),
    (safetensors(header(), DATA, length=2**63), "header length 9223372036854775808"),
    (safetensors(header(), DATA, length=10_000), "only .* bytes follow"),
    (safetensors(b"[1]"), "expected a JSON object"),
    (safetensors(b"{\xff}"), "not valid JSON"),
    (safetensors(b'{"a": 1' + b"1" * 5000 + b"}"), "not valid JSON"),
    (safetensors(b'{"a":' + b"[" * 90_000), "nested too deeply"),
    (safetensors({"__metadata__": []}), "__metadata__"),
    (safetensors({"a": 3}), "'a': expected an object"),
    (safetensors(b'{"a":{}, "a":{}}'), "'a' comes twice"),
    (safetensors(header(dtype="C64"), DATA), "'C64' is not supported"),
    (safetensors(header(dtype=["F32"]), DATA), "dtype a list|dtype \\['F32'\\]"),
    (safetensors(header(shape=[-2, -3]), DATA), "shape must be"),
    (safetensors(header(shape=[2.0, 3]), DATA), "shape must be"),
    (safetensors(header(shape=[True, 6]), DATA), "shape must be"),
    (safetensors(header(shape="23"), DATA), "shape must be"),
    (safetensors(header(shape=None), DATA), "shape must be"),
    (safetensors(header(shape=[[[2]]]), DATA), "shape must be"),
    (safetensors(header(shape=[1] * 33), DATA), "33 dimensions"),
    (safetensors(header(shape=[2**32, 2**32]), DATA), "larger than any file"),
    (safetensors(header(shape=[0, 2**63]), DATA), "larger than any file"),
    (safetensors(header(shape=[2, 4]), DATA), "takes 32 bytes, data_offsets span 24"),
    (safetensors(header(data_offsets=[0]), DATA), "data_offsets must be"),
    (safetensors(header(data_offsets=[24, 0]), DATA), "data_offsets must be"),
    (safetensors(header(data_offsets=[-8, 24]), DATA), "data_offsets must be"),
    (safetensors(header(data_offsets=[0.0, 24]), DATA), "data_offsets must be"),
    (safetensors(header(data_offsets=[0, 28]), DATA), "data_offsets"),
    (safetensors(header(data_offsets=[4, 28]), DATA), "without gap"),
    (safetensors(header(data_offsets=[24, 48]), DATA), "without gap"),
    (safetensors(header(), DATA[:-1]), "truncated"),
    (safetensors(header(), DATA + b"\0"), "describes"),
    (safetensors(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "not valid Unicode"),
])
def test_broken_fields(path, made, match):
    refused(read, path, made, match)


def test_every_truncation_is_refused(path):
    whole = safetensors(header(), DATA)
    for length in range(len(whole)):
        refused(read, path, whole[:length])


def test_every_damaged_byte(path):
    whole = safetensors(header(), DATA)
    assert survives(read, path, whole)
    outcomes = [survives(read, path, data) for data in damaged(whole)]
    assert 0 < sum(outcomes) < len(outcomes)  # changed values are not seen, changed headers are


def test_lies_about_size_allocate_nothing(path):
    tracemalloc.start()
    refused(read, path, safetensors(header(shape=[2**40, 2**10], data_offsets=[0, 2**52]), DATA))
    refused(read, path, safetensors(header(), DATA, length=99_999_999))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def shards(folder, weight_map: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, value in (("one", A), ("two", B)):
        head = {name: {"dtype": "F32", "shape": list(value.shape), "data_offsets": [0, value.nbytes]}}
        (folder / f"{name}.safetensors").write_bytes(safetensors(head, value.tobytes()))


def test_sharded(tmp_path):
    shards(tmp_path, {"two": "two.safetensors", "one": "one.safetensors"})
    whole = open_checkpoint(tmp_path)
    assert list(whole.tensors) == ["one", "two"]
    assert [p.name for p in whole.files["weights"]] == ["one.safetensors", "two.safetensors"]
    assert whole.nbytes == 40
    by_shard = open_checkpoint(tmp_path / "two.safetensors")
    assert list(by_shard.tensors) == ["one", "two"]
    (tmp_path / "one.safetensors").rename(tmp_path / "other.safetensors")
    assert list(open_checkpoint(tmp_path / "other.safetensors").tensors) == ["one"]  # the index does not list it


def test_shards_without_an_index(tmp_path):
    shards(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").unlink()
    assert list(open_checkpoint(tmp_path).tensors) == ["one", "two"]
    (tmp_path / "three.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes())
    with pytest.raises(FormatError, match="'one' is in another file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("weight_map", "match"), [
    ({}, "weight_map"),
    ([], "weight_map"),
    ({"one": "two.safetensors"}, "'one' is in this file, but it is not"),
    ({"one": "gone.safetensors"}, "gone.safetensors"),
    ({"one": "../one.safetensors"}, "not the name of a file beside it"),
    ({"one": "/etc/passwd"}, "not the name of a file beside it"),
    ({"one": "sub\\one.safetensors"}, "not the name of a file beside it"),
    ({"one": ".."}, "not the name of a file beside it"),
    ({"one": ""}, "not the name of a file beside it"),
    ({"one": "x" * 300}, "cannot be opened: .* too long|1 of 1 files are missing"),
    ({"one": 1}, "not the name of a file beside it"),
    ({"one": None}, "not the name of a file beside it"),
])
def test_broken_indexes(tmp_path, weight_map, match):
    shards(tmp_path, weight_map)
    with pytest.raises(FormatError, match=match):
        open_checkpoint(tmp_path)


def test_two_floats_in_a_byte_are_that_byte(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}
    (tmp_path / "a.safetensors").write_bytes(safetensors(header, bytes(range(6))))
    tensor = read(tmp_path / "a.safetensors")["a"]
    assert tensor.type.name == "U8" and tensor.shape == (2, 3) and tensor.raw().tolist() == [[0, 1, 2], [3, 4, 5]]
    for shape in ([], [4, 3]):
        header["a"] |= {"shape": shape}
        (tmp_path / "a.safetensors").write_bytes(safetensors(header, bytes(range(6))))
        with pytest.raises(FormatError, match="F4 .* is no whole number of bytes in a row"):
            read(tmp_path / "a.safetensors")
