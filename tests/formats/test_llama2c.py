"""llama2.c's three formats: one small model written in each, and published files."""

import struct

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats import detect, open_checkpoint
from numflow.formats.llama2c import _quantised, read
from numflow.formats.mapped import MappedFile
from tests.conftest import shared
from tests.formats.make import damaged, refused, survives

# dim, hidden, layers, heads, key/value heads, vocabulary, context: hidden 6 is no multiple of the groups of 4
FIELDS = (8, 6, 2, 4, 2, 10, 3)
GROUP = 4
NORMS = [*(f"blk.{i}.attn_norm.weight" for i in range(2)), *(f"blk.{i}.ffn_norm.weight" for i in range(2)),
         "output_norm.weight"]
STACKS = {"attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_gate": (6, 8),
          "ffn_down": (8, 6), "ffn_up": (6, 8)}


def model(head: bool) -> dict[str, np.ndarray]:
    """A model of integers with one scale per matrix, so that int8 groups store it without error."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (10, 8), **dict.fromkeys(NORMS, (8,)),
              **{f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in STACKS.items()},
              **({"output.weight": (10, 8)} if head else {})}
    return {name: rng.integers(-127, 128, shape).astype("<f4") / 4 for name, shape in shapes.items()}


def matrices(head: bool) -> list[str]:
    stacks = [f"blk.{i}.{name}.weight" for name in STACKS for i in range(2)]
    return ["token_embd.weight", *stacks, *(["output.weight"] if head else [])]


def version_0(tensors, head=False, fields=FIELDS) -> bytes:
    def stack(name):
        return b"".join(tensors[f"blk.{i}.{name}.weight"].tobytes() for i in range(2))

    fields = (*fields[:5], -fields[5] if head else fields[5], fields[6])
    attention = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
    parts = [tensors["token_embd.weight"].tobytes(), *map(stack, attention), stack("ffn_norm"),
             *map(stack, ["ffn_gate", "ffn_down", "ffn_up"]), tensors["output_norm.weight"].tobytes(),
             np.full(2 * 3 * 1, 7, "<f4").tobytes()]  # cosines and sines
    return struct.pack("<7i", *fields) + b"".join(parts) + (tensors["output.weight"].tobytes() if head else b"")


def header(version: int, head: bool, fields=FIELDS, group=GROUP) -> bytes:
    data = b"24ka" + struct.pack("<8i", version, *fields) + bytes([not head])
    return (data + (struct.pack("<i", group) if version == 2 else b"")).ljust(256, b"\0")


def version_1(tensors, head=False, **changed) -> bytes:
    return header(1, head, **changed) + b"".join(tensors[name].tobytes() for name in NORMS + matrices(head))


def version_2(tensors, head=False, **changed) -> bytes:
    data = header(2, head, **changed) + b"".join(tensors[name].tobytes() for name in NORMS)
    for name in matrices(head):
        codes = (tensors[name] * 4).astype(np.int8)
        data += codes.tobytes() + np.full(codes.size // GROUP, 0.25, "<f4").tobytes()
    return data


WRITERS = {0: version_0, 1: version_1, 2: version_2}


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_version_reads_back(tmp_path, version, head):
    expected = model(head)
    path = tmp_path / "model.bin"
    path.write_bytes(WRITERS[version](expected, head))
    assert detect(path) == "llama2c"
    tensors, config = read(path)
    assert config["version"] == version
    assert config["shared_classifier"] is not head
    assert (config["dim"], config["hidden_dim"], config["n_kv_heads"], config["vocab_size"]) == (8, 6, 2, 10)
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        if version < 2 or tensor.columns % config["group_size"] == 0:
            np.testing.assert_array_equal(tensor.f32(), expected[name])
        assert not tensor.raw().flags.writeable


def test_rows_of_no_whole_number_of_groups_are_read_as_the_c_program_reads_them(tmp_path):
    """Its matmul: for j = 0; j <= n - group; j += group: weight (i * n + j) gives the scale."""
    rows, columns, group = 8, 6, 4
    codes = np.arange(-24, 24).astype(np.int8)
    scales = np.arange(1, 13).astype("<f4")
    path = tmp_path / "matrix.bin"
    path.write_bytes(codes.tobytes() + scales.tobytes())
    tensor = _quantised(MappedFile(path), "w", (rows, columns), 0, group)
    expected = np.zeros((rows, columns))
    for i in range(rows):
        for j in range(0, columns - group + 1, group):
            for k in range(group):
                expected[i, j + k] = codes[i * columns + j + k] * scales[(i * columns + j) // group]
    np.testing.assert_allclose(tensor.f32(), expected, rtol=1e-6)


def test_groups_that_run_over_rows_become_smaller_blocks(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(version_2(model(False)))
    tensors, config = read(path)
    assert config["group_size"] == 4
    assert tensors["blk.0.ffn_up.weight"].type.name == "Q8_GS4"
    assert tensors["blk.0.ffn_down.weight"].type.name == "Q8_GS2"  # rows of 6
    assert tensors["blk.0.ffn_down.weight"].raw().shape == (8, 3 * 6)


def changed(position: int, value: int) -> tuple[int, ...]:
    return (*FIELDS[:position], value, *FIELDS[position + 1:])


@pytest.mark.parametrize(("made", "match"), [
    (header(1, False), "has 5[0-9]+ bytes|this one has 256"),
    (b"24ka\1\0\0\0", "too short"),
    (header(3, False), "version 3"),
    (header(0, False), "version 0"),
    *((version_1(model(False), fields=changed(i, value)), "must be positive|no multiple|this one has")
      for i in range(7) for value in (0, -1, 2**31 - 1) if i != 6 or value < 1),
    (version_1(model(False), fields=changed(3, 3)), "no multiple of n_heads"),
    (version_1(model(False), fields=changed(4, 3)), "no multiple of n_kv_heads"),
    (version_2(model(False), group=0), "group_size must be positive"),
    (version_2(model(False), group=-4), "group_size must be positive"),
    (version_2(model(False), group=7), "group_size 7 does not divide"),
    (version_2(model(False), group=8), "this one has"),
    (version_1(model(False))[:36] + b"\2" + version_1(model(False))[37:], "shared classifier must be 0 or 1"),
    (version_1(model(False)) + b"\0", "this one has"),
    (version_0(model(False)) + b"\0", "this one has"),
])
def test_broken_fields(tmp_path, made, match):
    refused(read, tmp_path / "model.bin", made, match)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_truncation_is_refused(tmp_path, version):
    whole = WRITERS[version](model(True), True)
    for length in [*range(300), *range(300, len(whole), 61), len(whole) - 1]:
        refused(read, tmp_path / "model.bin", whole[:length])


@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_damaged_header_byte(tmp_path, version):
    whole = WRITERS[version](model(False))
    size = 28 if version == 0 else 41
    for data in damaged(whole[:size]):
        survives(lambda path: read(path)[0], tmp_path / "model.bin", data + whole[size:])


def test_a_damaged_old_file_is_of_no_known_format(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(version_0(model(False))[:-4])
    with pytest.raises(FormatError, match="not a checkpoint of a known format"):
        open_checkpoint(path)


def test_published_files_agree():
    folder = shared("data", "llama2c")
    old, new, small = (open_checkpoint(folder / f"stories260K.{v}.bin") for v in ("v0", "v1", "v2.q8"))
    assert old.files["tokenizer.bin"].name == "tok512.bin"
    assert {**old.config, "version": 1} == new.config
    assert set(old.tensors) == set(new.tensors) == set(small.tensors)
    for name, tensor in old.tensors.items():
        expected = tensor.f32()
        np.testing.assert_array_equal(new.tensors[name].f32(), expected)
        if not name.endswith("ffn_down.weight"):  # rows of 172 are no whole number of groups of 8
            np.testing.assert_allclose(small.tensors[name].f32(), expected, atol=abs(expected).max() / 200)
