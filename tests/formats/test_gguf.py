"""GGUF: against the `gguf` package, and every field broken in turn."""

import struct
import time
import tracemalloc

import gguf as published
import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats.gguf import MAX_ARRAY, read, read_file
from tests.conftest import real_model
from tests.formats.make import damaged, entry, gguf, pair, refused, survives, text, u32, values

A = values(6).reshape(2, 3)
MODEL = {"pairs": [pair("general.architecture", 8, text("toy"))], "entries": [entry("a", [3, 2], 0, 0)],
         "data": A.tobytes()}


def tensors_of(path):
    return read_file(path)[0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def array(key: str, kind: int, count: int, data: bytes) -> bytes:
    return pair(key, 9, struct.pack("<IQ", kind, count) + data)


def test_type_42_has_blocks_of_64(path):
    data = np.random.default_rng(0).integers(0, 60, (3, 36), np.uint8)
    path.write_bytes(gguf(entries=[entry("a", [128, 3], 42, 0)], data=data.tobytes()))
    tensor = tensors_of(path)["a"]
    assert (tensor.type.name, tensor.nbytes, tensor.f32().shape) == ("Q2_0", 108, (3, 128))


def test_type_42_with_blocks_of_128(path):
    """A fork's meaning of type 42, for all tensors of a file: detected by a tensor whose offset is too close to the
    next."""
    data = np.random.default_rng(0).integers(0, 60, 256, np.uint8)
    path.write_bytes(gguf(entries=[entry("a", [256, 1], 42, 96), entry("b", [256, 1], 42, 0), entry("c", [8], 0, 192)],
                          data=data.tobytes()))
    assert [tensors_of(path)[name].type.name for name in "abc"] == ["Q2_0", "Q2_0", "F32"]  # there is room for both
    path.write_bytes(gguf(entries=[entry("a", [1024, 2], 42, 0), entry("b", [256, 1], 42, 544)], data=bytes(640)))
    tensors = tensors_of(path)
    assert {name: (t.type.name, t.nbytes) for name, t in tensors.items()} == {"a": ("Q2_0_128", 544),
                                                                              "b": ("Q2_0_128", 68)}
    refused(tensors_of, path, gguf(entries=[entry("a", [1024, 2], 42, 0), entry("b", [256, 1], 42, 512)],
                                   data=bytes(640)), "overlap")


def test_values_of_every_kind(path):
    scalars = [(0, "<B", 200), (1, "<b", -3), (2, "<H", 60000), (3, "<h", -300), (4, "<I", 2**32 - 1), (5, "<i", -5),
               (6, "<f", 0.5), (10, "<Q", 2**64 - 1), (11, "<q", -(2**63)), (12, "<d", 0.1)]
    pairs = [pair(f"k{kind}", kind, struct.pack(code, value)) for kind, code, value in scalars]
    pairs += [pair("true", 7, b"\1"), pair("text", 8, text("äé\n")),
              array("strings", 8, 3, text("") + text("ab") + text("▁the")), array("empty", 8, 0, b""),
              array("floats", 6, 2, struct.pack("<2f", 1, 2)), array("no_floats", 6, 0, b""),
              array("nested", 9, 2, struct.pack("<IQ2H", 2, 2, 5, 6) + struct.pack("<IQ", 8, 1) + text("x"))]
    path.write_bytes(gguf(pairs))
    metadata = read(path)[1]
    assert [metadata[f"k{kind}"] for kind, _, _ in scalars] == [value for _, _, value in scalars]
    assert metadata["true"] is True
    assert metadata["text"] == "äé\n"
    assert metadata["strings"] == ["", "ab", "▁the"]
    assert metadata["floats"] == [1.0, 2.0]
    assert metadata["empty"] == metadata["no_floats"] == []
    assert metadata["nested"] == [[5, 6], ["x"]]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_versions(path, version):
    code = "<I" if version == 1 else "<Q"
    path.write_bytes(gguf([pair("x", 8, text("y", code), code)], [entry("a", [3, 2], 0, 0, code)], A.tobytes(),
                          version))
    tensors, metadata, files = read(path)
    assert metadata == {"x": "y"}
    assert files == [path]
    assert tensors["a"].shape == (2, 3)
    np.testing.assert_array_equal(tensors["a"].f32(), A)


def test_alignment(path):
    path.write_bytes(gguf([u32("general.alignment", 64)], [entry("b", [2], 0, 64), entry("a", [3, 2], 0, 0)],
                          A.tobytes() + bytes(40) + values(2).tobytes(), align=64))
    tensors = read(path)[0]
    assert list(tensors) == ["b", "a"]
    np.testing.assert_array_equal(tensors["a"].f32(), A)
    np.testing.assert_array_equal(tensors["b"].f32(), values(2))


def test_files_of_the_published_writer(path):
    writer = published.GGUFWriter(path, "toy")
    writer.add_array("tokens", ["a", "b"])
    writer.add_float32("eps", 1e-5)
    rows = np.random.default_rng(0).standard_normal((4, 3, 64)).astype(np.float32)
    for name in ("F16", "Q8_0", "Q4_0", "BF16"):
        kind = published.GGMLQuantizationType[name]
        writer.add_tensor(name, published.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors, metadata, _ = read(path)
    assert metadata["tokens"] == ["a", "b"]
    assert metadata["general.architecture"] == "toy"
    for name, tensor in tensors.items():
        assert (tensor.type.name, tensor.shape) == (name, (4, 3, 64))
        np.testing.assert_allclose(tensor.f32(), rows, atol=0.3)


def test_a_large_vocabulary_opens_quickly():
    path = real_model("gemma-3-270m-q4_k_m.gguf")
    began = time.process_time()
    metadata = read(path)[1]
    assert time.process_time() - began < 2  # 0.2 s when measured
    assert len(metadata["tokenizer.ggml.tokens"]) == 262144


@pytest.mark.parametrize("name", [
    pytest.param("SmolLM2-135M-Instruct.Q4_1.gguf"),
    pytest.param("gemma-3-270m-q4_k_m.gguf", marks=pytest.mark.slow),  # ten seconds in the published reader
])
@pytest.mark.merge
def test_real_models_equal_the_published_reader(name):
    path = real_model(name)
    tensors, metadata, _ = read(path)
    reader = published.GGUFReader(path)
    assert [t.name for t in reader.tensors] == list(tensors)
    for theirs in reader.tensors:
        ours = tensors[theirs.name]
        assert (ours.shape, ours.type.name) == (tuple(theirs.shape[::-1].tolist()), theirs.tensor_type.name)
        assert ours.raw().ctypes.data % 32 == theirs.data.ctypes.data % 32
        np.testing.assert_array_equal(ours.raw()[-1], theirs.data.view(np.uint8).reshape(ours.rows, -1)[-1])
    for key in ("general.architecture", "tokenizer.ggml.model"):
        assert metadata[key] == reader.fields[key].contents()
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(metadata["tokenizer.ggml.tokens"]) == len(tokens.data)
    for i in (0, 1000, -1):
        assert metadata["tokenizer.ggml.tokens"][i] == tokens.contents(i)


LONG = 2**60


@pytest.mark.parametrize(("made", "match"), [
    (b"", "empty"),
    (b"GG", "magic"),
    (b"GGML" + bytes(20), "not a GGUF file"),
    (b"GGUF\0\0\0\3" + bytes(16), "big-endian"),
    (b"GGUF\4\0\0\0" + bytes(16), "version 4"),
    (b"GGUF\0\0\0\0" + bytes(16), "big-endian|version 0"),
    (gguf(counts=(LONG, 0)), "tensor count: .* cannot fit"),
    (gguf(counts=(0, LONG)), "metadata count: .* cannot fit"),
    (gguf(counts=(2**64 - 1, 2**64 - 1)), "cannot fit"),
    (gguf([u32("x", 1)] * 2), "'x': the key comes twice"),
    (gguf([pair("x", 13, b"")]), "unknown value type 13"),
    (gguf([pair("x", 2**32 - 1, b"")]), "unknown value type"),
    (gguf([text(b"\xff") + struct.pack("<IB", 0, 0)]), "not valid UTF-8"),
    (gguf([pair("x", 8, text(b"\xff"))]), "not valid UTF-8"),
    (gguf([pair("x", 8, struct.pack("<Q", LONG))]), "truncated"),
    (gguf([struct.pack("<Q", 2**64 - 1) + bytes(20)]), "truncated"),
    (gguf([array("x", 4, LONG, b"")]), "cannot fit"),
    (gguf([array("x", 4, 2, b"\0\0\0\0")], align=1), "cannot fit"),
    (gguf([array("x", 13, 1, b"\0" * 8)]), "unknown array element type 13"),
    (gguf([array("x", 0, MAX_ARRAY + 1, bytes(MAX_ARRAY + 1))]), "at most"),
    (gguf([array("x", 8, LONG, b"")]), "cannot fit"),
    (gguf([array("x", 8, 2, text("a"))], align=1), "cannot fit"),
    (gguf([array("x", 8, 1, struct.pack("<Q", LONG))]), "entry 0 of 1"),
    (gguf([array("x", 8, 2, struct.pack("<QQ", 2**64 - 1, 0))]), "entry 0 of 2"),
    (gguf([array("x", 8, 2, struct.pack("<QQ", 9, 1))], align=1), "entry"),
    (gguf([array("x", 8, 1, text(b"\xc3"))]), "entry 0 is not valid UTF-8"),
    (gguf([pair("x", 9, struct.pack("<IQ", 9, 1) * 50 + bytes(12))]), "nested more than"),
    (gguf([array("x", 9, LONG, b"")]), "cannot fit"),
    (gguf([u32("general.alignment", 0)]), "power of two"),
    (gguf([u32("general.alignment", 48)]), "power of two"),
    (gguf([pair("general.alignment", 8, text("32"))]), "power of two"),
    (gguf([array("general.alignment", 4, 1, bytes(4))]), "power of two"),
    (gguf(entries=[entry("a", [1] * 5, 0, 0)], data=bytes(64)), "5 dimensions"),
    (gguf(entries=[text("a") + struct.pack("<I", 2**32 - 1)], data=bytes(64)), "dimensions"),
    (gguf(entries=[entry("a", [3, 0], 0, 0)], data=bytes(64)), "dimension of 0"),
    (gguf(entries=[entry("a", [2**40, 2**40], 0, 0)], data=bytes(64)), "larger than any file"),
    (gguf(entries=[entry("a", [3, 2], 4, 0)], data=bytes(64)), "Q4_2 no longer exists"),
    (gguf(entries=[entry("a", [3, 2], 31, 0)], data=bytes(64)), "Q4_0_4_4 no longer exists"),
    (gguf(entries=[entry("a", [3, 2], 99, 0)], data=bytes(64)), "'a': unknown tensor type number 99"),
    (gguf(entries=[entry("a", [33, 2], 2, 0)], data=bytes(640)), "rows of 33 are no whole number of Q4_0 blocks"),
    (gguf(entries=[entry("a", [3, 2], 0, 8)], data=bytes(64)), "no multiple of the alignment"),
    (gguf(entries=[entry("a", [3, 2], 0, 2**63)], data=bytes(64)), "truncated"),
    (gguf(entries=[entry("a", [3, 2], 0, 64)], data=bytes(64)), "truncated"),
    (gguf(entries=[entry("a", [3, 2], 0, 0)] * 2, data=bytes(64)), "two of that name"),
    (gguf(entries=[entry("a", [10], 0, 0), entry("b", [3], 0, 32)], data=bytes(64)), "'a' and 'b' overlap"),
])
def test_broken_fields(path, made, match):
    refused(tensors_of, path, made, match)


def test_every_truncation_is_refused(path):
    whole = gguf(**MODEL)
    for length in range(len(whole)):
        refused(tensors_of, path, whole[:length])


def test_every_damaged_byte(path):
    whole = gguf([*MODEL["pairs"], array("list", 8, 2, text("a") + text("b"))], MODEL["entries"], MODEL["data"])
    assert survives(tensors_of, path, whole)
    outcomes = [survives(tensors_of, path, data) for data in damaged(whole)]
    assert 0 < sum(outcomes) < len(outcomes)


def test_lies_about_size_allocate_nothing(path):
    tracemalloc.start()
    for made in (gguf(counts=(LONG, 0)), gguf([array("x", 8, LONG, b"")]), gguf([array("x", 4, LONG, b"")]),
                 gguf([pair("x", 8, struct.pack("<Q", LONG))]), gguf(entries=[entry("a", [2**40], 0, 0)])):
        refused(tensors_of, path, made)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def split(folder, number: int, count: int, names: list[str], total: int, stored_count: int | None = None):
    pairs = [pair("split.no", 2, struct.pack("<H", number)),
             pair("split.count", 2, struct.pack("<H", count if stored_count is None else stored_count)),
             pair("split.tensors.count", 5, struct.pack("<i", total)), u32("part", number)]
    path = folder / f"toy-{number + 1:05}-of-{count:05}.gguf"
    path.write_bytes(gguf(pairs, [entry(n, [2], 0, 32 * i) for i, n in enumerate(names)],
                          b"".join(values(2).tobytes() + bytes(24) for _ in names)))
    return path


def test_split_files(tmp_path):
    parts = [split(tmp_path, 0, 2, ["a", "b"], 3), split(tmp_path, 1, 2, ["c"], 3)]
    for start in parts:
        tensors, metadata, files = read(start)
        assert list(tensors) == ["a", "b", "c"]
        assert metadata["part"] == 0
        assert files == parts
    assert tensors["c"].f32().tolist() == values(2).tolist()


def test_broken_splits(tmp_path):
    first = split(tmp_path, 0, 2, ["a"], 2)
    with pytest.raises(FormatError, match=r"toy-00002-of-00002\.gguf"):
        read(first)
    split(tmp_path, 1, 2, ["a"], 2)
    with pytest.raises(FormatError, match="'a' is in an earlier file"):
        read(first)
    split(tmp_path, 1, 2, ["b", "c"], 2)
    with pytest.raises(FormatError, match=r"split\.tensors\.count is 2, the files have 3"):
        read(first)
    split(tmp_path, 1, 2, ["b"], 2, stored_count=7)
    with pytest.raises(FormatError, match=r"split\.no 1 of 7"):
        read(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match="must be named"):
        read(renamed)
