"""llama.cpp's imatrix files: both formats written, read back and read by other programs; damaged files; renamed
tensors.
"""

import struct

import gguf
import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.network.quantise.calibration import Calibration, is_calibration, read_calibration
from numflow.network.quantise.imatrix_files import for_tensors, write_imatrix

Q, DOWN, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.1.ffn_up_exps.weight"
RNG = np.random.default_rng(0)
FOUND = {Q: RNG.random(8, np.float32), DOWN: RNG.random(12, np.float32), EXPERTS: RNG.random((3, 8), np.float32)}
FACTS = {"tokens": 1024, "context": 512}


@pytest.mark.parametrize("name", ["a.gguf", "a.dat", "a.imatrix"])
def test_both_forms_come_back(tmp_path, name):
    write_imatrix(Calibration(FOUND, facts=FACTS), tmp_path / name)
    assert is_calibration(tmp_path / name)
    back = read_calibration(tmp_path / name)
    assert list(back.importances) == [Q, DOWN, EXPERTS] and not back.moments
    for tensor, values in FOUND.items():
        np.testing.assert_allclose(back.importances[tensor].ravel(), values.ravel(), rtol=1e-6)
    assert back.facts["tokens"] == (1024 if name == "a.gguf" else 0)


def test_what_others_read(tmp_path):
    write_imatrix(Calibration(FOUND, facts=FACTS), tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {key: reader.get_field(key).contents() for key in ("general.type", "imatrix.chunk_count",
                                                              "imatrix.chunk_size")} == {
        "general.type": "imatrix", "imatrix.chunk_count": 2, "imatrix.chunk_size": 512}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors[f"{EXPERTS}.counts"].shape) == [1, 3] and list(tensors[f"{EXPERTS}.in_sum2"].shape) == [8, 3]
    np.testing.assert_allclose(tensors[f"{Q}.in_sum2"].data / tensors[f"{Q}.counts"].data, FOUND[Q], rtol=1e-6)


def old(*entries: tuple[str, int, np.ndarray], tail: bytes = b"") -> bytes:
    made = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        made += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size) + values.tobytes()
    return made + tail


def test_the_old_form_has_sums_over_calls(tmp_path):
    (tmp_path / "x").write_bytes(old((Q, 4, 4 * FOUND[Q]), (DOWN, 1, FOUND[DOWN]), tail=struct.pack("<i", 4)))
    found = read_calibration(tmp_path / "x")
    np.testing.assert_allclose(found.importances[Q], FOUND[Q], rtol=1e-6)
    np.testing.assert_array_equal(found.importances[DOWN], FOUND[DOWN])


def test_a_name_with_a_new_line_is_one_line(tmp_path):
    (tmp_path / "x").write_bytes(old((Q, 1, FOUND[Q]), ("a\nb", 1, FOUND[Q]))[:-4])
    with pytest.raises(FormatError) as error:
        read_calibration(tmp_path / "x")
    assert "'a\\nb' ends after the file" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("data", "message"), [
    (old((Q, 1, FOUND[Q]))[:-4], "attn_q.weight ends after the file"),
    (struct.pack("<ii", 2, 19) + Q.encode() + struct.pack("<ii", 1, 1 << 30), "attn_q.weight ends after the file"),
    (struct.pack("<ii", 2, 19) + Q.encode() + struct.pack("<ii", 1, -1), "attn_q.weight ends after the file"),
    (old((Q, 1, -FOUND[Q])), "attn_q.weight: mean squares should be finite and not negative"),
    (old((Q, 1, FOUND[Q] * np.float32(np.inf))), "attn_q.weight: mean squares should be finite"),
    (old((Q, 1, np.full(8, 0x7F800001, "<u4"))), "attn_q.weight: mean squares should be finite"),  # signalling NaNs
    (old((Q, 1, FOUND[Q][:0]), tail=bytes(8)), "attn_q.weight: mean squares should be finite")])
def test_damaged_files_of_the_old_form(tmp_path, data, message):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_calibration(tmp_path / "x")


def write_gguf(path, tensors, kind="imatrix"):
    writer = gguf.GGUFWriter(path, "")
    writer.add_type(kind)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(("tensors", "kind", "message"), [
    ({f"{Q}.in_sum2": FOUND[Q], f"{Q}.counts": ONE}, "model", "no imatrix: its general.type is 'model'"),
    ({f"{Q}.counts": ONE}, "imatrix", "an imatrix of no matrices"),
    ({f"{Q}.in_sum2": FOUND[Q]}, "imatrix", r"expected \.in_sum2 and \.counts"),
    ({f"{Q}.in_sum2": FOUND[Q].astype(np.float16), f"{Q}.counts": ONE}, "imatrix", "both F32"),
    ({f"{Q}.in_sum2": FOUND[Q], f"{Q}.counts": np.ones(2, np.float32)}, "imatrix", "sums of 1 matrices, counts of 2"),
    ({f"{Q}.in_sum2": FOUND[Q], f"{Q}.counts": -ONE}, "imatrix", "numbers from 0"),
    ({f"{Q}.in_sum2": FOUND[Q] * np.nan, f"{Q}.counts": ONE}, "imatrix", "finite and not negative")])
def test_damaged_files_of_gguf(tmp_path, tensors, kind, message):
    write_gguf(tmp_path / "x", tensors, kind)
    with pytest.raises(FormatError, match=message):
        read_calibration(tmp_path / "x")


def test_experts_that_no_token_reached(tmp_path):
    sums = np.array([[2, 4], [0, 0], [6, 8]], np.float32)
    write_gguf(tmp_path / "x", {f"{EXPERTS}.in_sum2": sums, f"{EXPERTS}.counts": np.array([[2], [0], [1]], np.float32),
                                f"{Q}.in_sum2": np.zeros(4, np.float32), f"{Q}.counts": np.zeros(1, np.float32)})
    found = read_calibration(tmp_path / "x").importances
    np.testing.assert_allclose(found[EXPERTS], [[1, 2], [8 / 3, 4], [6, 8]])
    np.testing.assert_array_equal(found[Q], np.ones(4))


def test_names_of_other_files():
    """A fused matrix, a stack made of single experts, single experts made from a stack, and a name that needs no
    mapping."""
    c = Calibration({"l.0.q": FOUND[Q], "e.0": np.full(4, 1, np.float32), "e.1": np.full(4, 2, np.float32),
                     "s.w": np.stack([np.full(4, 3.0), np.full(4, 4.0)]).astype(np.float32), "same": FOUND[DOWN],
                     "blk.7.attn_v.weight": FOUND[Q], "flat": np.arange(8, dtype=np.float32)})
    own = {"l.0.q": ("blk.0.attn_q",), "e.0": ("blk.1.ffn_up_exps",), "e.1": ("blk.1.ffn_up_exps",),
           "s.w": ("blk.2.ffn_up_exps",), "other": ("blk.0.attn_k",)}
    wanted = {"fused": ("blk.0.attn_k", "blk.0.attn_q"), "stack": ("blk.1.ffn_up_exps",),
              "x.0": ("blk.2.ffn_up_exps",), "x.1": ("blk.2.ffn_up_exps",), "same": ("blk.3.ffn_down",),
              "v_proj": ("blk.7.attn_v",), "unknown": ("blk.9.attn_q",), "flat": ("blk.8.ffn_up_exps",)}
    found = for_tensors(c, own, wanted, lambda name: 8 if name in ("fused", "v_proj") else 12 if name == "same" else 4)
    np.testing.assert_array_equal(found.importances["fused"], FOUND[Q])
    np.testing.assert_array_equal(found.importances["stack"], [[1] * 4, [2] * 4])
    np.testing.assert_array_equal(found.importances["x.1"], [4] * 4)
    np.testing.assert_array_equal(found.importances["same"], FOUND[DOWN])
    np.testing.assert_array_equal(found.importances["v_proj"], FOUND[Q])
    np.testing.assert_array_equal(found.importances["flat"], [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert found.importance("unknown") is None
