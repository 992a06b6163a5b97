"""Well-formed torch checkpoints: both formats, strides, sharing, wrappers; and every kind of damage."""

import struct

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats.mapped import MappedFile
from numflow.formats.pickle import read
from numflow.formats.zipped import entries
from tests.formats.make import (
    damaged,
    dictionary,
    named,
    number,
    numbers,
    pickled,
    refused,
    requested_globals,
    stored,
    string,
    survives,
    tensor,
    torch_legacy,
    torch_zip,
    values,
    with_checksums,
    zipped,
)

DATA = values(12)
BYTES = DATA.tobytes()
A = tensor(stored("0", 12), [3, 4], [4, 1])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def load(path, value: bytes, storages=None, **changed):
    path.write_bytes(torch_zip(value, {"0": BYTES} if storages is None else storages, **changed))
    return read(path)


def test_one_tensor(path):
    tensors = load(path, dictionary({"a": A, "epoch": number(3), "name": string("x"), "lr": b"G" + bytes(8)}))
    assert list(tensors) == ["a"]
    assert (tensors["a"].shape, tensors["a"].type.name) == ((3, 4), "F32")
    np.testing.assert_array_equal(tensors["a"].f32(), DATA.reshape(3, 4))
    assert not tensors["a"].raw().flags.writeable


@pytest.mark.parametrize(("shape", "stride", "offset"), [
    ([4, 3], [1, 4], 0),        # transposed
    ([2, 3], [4, 1], 5),        # a window
    ([2, 2], [8, 2], 1),        # every other
    ([3], [4], 2),              # a column
    ([2, 2, 3], [3, 6, 1], 0),  # swapped leading dimensions
    ([2, 5], [0, 1], 1),        # repeated
    ([12], [1], 0),
    ([], [], 7),
    ([0, 3], [3, 1], 12),
    ([1, 4], [2**59, 1], 8),    # the stride of a single row does not matter
])
def test_offsets_and_strides(path, shape, stride, offset):
    got = load(path, dictionary({"a": tensor(stored("0", 12), shape, stride, offset)}))["a"]
    steps = [4 * s if n > 1 else 0 for n, s in zip(shape, stride)]
    expected = np.lib.stride_tricks.as_strided(DATA[offset:], shape, steps)
    np.testing.assert_array_equal(got.f32(), expected)
    assert got.raw().shape == (got.rows, 4 * got.columns)
    flat = expected.reshape(got.rows, got.columns)
    np.testing.assert_array_equal(got.f32(range(got.rows)[-1:]), flat[-1:])


def test_shared_storages_stay_shared(path):
    tied = load(path, dictionary({"a": A, "b": A, "c": tensor(stored("0", 12), [4], [1], offset=8)}))
    first, second, third = (tied[name].raw().ctypes.data for name in "abc")
    assert first == second == third - 32


@pytest.mark.parametrize(("storage", "kind", "dtype"), [
    ("DoubleStorage", "F64", "<f8"), ("FloatStorage", "F32", "<f4"), ("HalfStorage", "F16", "<f2"),
    ("LongStorage", "I64", "<i8"), ("IntStorage", "I32", "<i4"), ("ShortStorage", "I16", "<i2"),
    ("CharStorage", "I8", "i1"), ("ByteStorage", "U8", "u1"), ("BoolStorage", "BOOL", "?"),
])
def test_storage_types(path, storage, kind, dtype):
    numbers = np.array([0, 1, 1, 0], dtype)
    got = load(path, dictionary({"a": tensor(stored("0", 4, storage), [4], [1])}), {"0": numbers.tobytes()})["a"]
    assert got.type.name == kind
    np.testing.assert_array_equal(got.f32(), numbers.astype(np.float32))


def version_3(storage: bytes, shape, stride, dtype: str, offset: int = 0) -> bytes:
    return (named("torch._utils", "_rebuild_tensor_v3") + b"(" + storage + number(offset) + numbers(shape)
            + numbers(stride) + b"\x89" + named("collections", "OrderedDict") + b")R" + named("torch", dtype) + b"tR")


def test_untyped_storages_take_the_dtype_of_the_tensor(path):
    value = dictionary({"f": version_3(stored("0", 48, "UntypedStorage"), [2, 2], [1, 2], "float32", 3),
                        "h": version_3(stored("0", 48, "UntypedStorage"), [48], [1], "float8_e5m2")})
    got = load(path, value)
    np.testing.assert_array_equal(got["f"].f32(), DATA[3:7].reshape(2, 2).T)
    assert got["h"].type.name == "F8_E5M2"


def parameter(inner: bytes) -> bytes:
    return named("torch._utils", "_rebuild_parameter") + b"(" + inner + b"\x88" + named("collections", "OrderedDict") \
        + b")RtR"


def with_attributes(shape, stride) -> bytes:
    inner = b"(" + stored("0", 12) + number(0) + numbers(shape) + numbers(stride) + b"\x89}t"
    return named("torch._tensor", "_rebuild_from_type_v2") + b"(" + named("torch._utils", "_rebuild_tensor_v2") \
        + named("torch", "Tensor") + inner + b"}tR"


def test_parameters_and_tensors_with_attributes(path):
    ordered = named("collections", "OrderedDict") + b")R(" + string("a") + parameter(A) + string("b") \
        + with_attributes([12], [1]) + b"u" + b"}(" + string("_metadata") + b"}ub"
    tensors = load(path, ordered)
    assert list(tensors) == ["a", "b"]
    np.testing.assert_array_equal(tensors["b"].f32(), DATA)


def test_other_harmless_values(path):
    size = named("torch", "Size") + b"(" + numbers([3, 4]) + b"tR"
    device = named("torch", "device") + b"(" + string("cpu") + b"tR"
    pairs = named("collections", "OrderedDict") + b"(](" + b"](" + string("x") + A + b"ee" + b"tR"
    value = dictionary({"size": size, "device": device, "dtype": named("torch", "bfloat16"), "a": A, "pairs": pairs,
                        "list": b"](K\1K\2e"})
    assert list(load(path, value)) == ["a"]


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "module", "anything"])
def test_one_wrapping_level_is_taken_off(path, key):
    assert list(load(path, dictionary({key: dictionary({"a": A}), "epoch": number(1)}))) == ["a"]


def test_the_model_is_chosen_among_dictionaries(path):
    both = {"optimizer": dictionary({"m": A}), "model": dictionary({"a": A}), "step": A}
    assert list(load(path, dictionary(both))) == ["a"]
    with pytest.raises(FormatError, match="several dictionaries: \\['x', 'y'\\]"):
        load(path, dictionary({"x": dictionary({"m": A}), "y": dictionary({"a": A})}))


@pytest.mark.parametrize(("value", "match"), [
    (dictionary({"x": number(1)}), "no tensors"),
    (dictionary({"x": dictionary({"y": dictionary({"a": A})})}), "no tensors"),
    (b"](" + A + b"e", "got list"),
    (A, "got StoredTensor"),
    (b"N", "got NoneType"),
    (b"}(" + b"X\3\0\0\0\xed\xa0\x80" + A + b"u", "not valid Unicode"),
])
def test_files_without_a_dictionary_of_tensors(path, value, match):
    refused(read, path, torch_zip(value, {"0": BYTES}), match)


def rebuilt(args: bytes, function: str = "_rebuild_tensor_v2") -> bytes:
    return dictionary({"a": named("torch._utils", function) + b"(" + args + b"tR"})


S = stored("0", 12)
TAIL = b"\x89}"


@pytest.mark.parametrize(("value", "match"), [
    (rebuilt(S + number(1) + numbers([3, 4]) + numbers([4, 1]) + TAIL), "needs element 12 of a storage with 12"),
    (rebuilt(S + number(0) + numbers([4, 4]) + numbers([4, 1]) + TAIL), "needs element 15"),
    (rebuilt(S + number(13) + numbers([0]) + numbers([1]) + TAIL), "needs element 12 of"),
    (rebuilt(S + number(2**62) + numbers([1]) + numbers([1]) + TAIL), "a storage and an offset"),
    (rebuilt(S + number(-1) + numbers([1]) + numbers([1]) + TAIL), "a storage and an offset"),
    (rebuilt(S + number(0) + numbers([2]) + numbers([-1]) + TAIL), "tuples of sizes"),
    (rebuilt(S + number(0) + numbers([-2]) + numbers([1]) + TAIL), "tuples of sizes"),
    (rebuilt(S + number(0) + numbers([2**62]) + numbers([0]) + TAIL), "tuples of sizes"),
    (rebuilt(S + number(0) + numbers([2**59]) + numbers([0]) + TAIL), "too often"),
    (rebuilt(S + number(0) + numbers([2**59] * 9) + numbers([0] * 9) + TAIL), "too often"),
    (rebuilt(S + number(0) + numbers([1] * 33) + numbers([1] * 33) + TAIL), "tuples of sizes"),
    (rebuilt(S + number(0) + numbers([3]) + numbers([1, 1]) + TAIL), "differ in length"),
    (rebuilt(S + number(0) + b"(\x88t" + numbers([1]) + TAIL), "tuples of sizes"),
    (rebuilt(S + number(0) + b"](K\1e" + numbers([1]) + TAIL), "tuples of sizes"),
    (rebuilt(number(0) + number(0) + numbers([3]) + numbers([1]) + TAIL), "a storage and an offset"),
    (rebuilt(S), "argument"),
    (rebuilt(S + number(0) + numbers([3]) + numbers([1]) + b"\x89}N", "_rebuild_tensor_v3"), "needs a dtype"),
    (rebuilt(number(0), "_rebuild_parameter"), "needs a tensor"),
    (dictionary({"a": named("torch", "Size") + b"((K\1" + string("x") + b"ttR"}), "needs sizes"),
    (dictionary({"a": named("torch", "FloatStorage") + b")R"}), "is not to be called"),
    (dictionary({"a": named("torch", "Size") + b"K\1R"}), "is not to be called with int"),
    (dictionary({"a": tensor(stored("1", 12), [1], [1])}), "storage '1' is not in the zip file"),
    (dictionary({"a": tensor(stored("../0", 12), [1], [1])}), "is not in the zip file"),
    (dictionary({"a": tensor(stored("0", 13), [1], [1])}), "takes 52 bytes, the zip file has 48"),
    (dictionary({"a": tensor(stored("0", 2**59), [1], [1])}), "the zip file has 48"),
    (dictionary({"a": A, "b": tensor(stored("0", 12, "IntStorage"), [1], [1])}), "described in two ways"),
    (dictionary({"a": b"K\1Q"}), "not a torch storage"),
    (dictionary({"a": b"(" + string("storage") + b"NK\1K\1K\1tQ"}), "must have a type"),
    (dictionary({"a": stored("0", -1)}), "must have a type"),
])
def test_lies_about_tensors(path, value, match):
    refused(read, path, torch_zip(value, {"0": BYTES}), match)


def test_the_zip_must_be_whole(path):
    whole = torch_zip(dictionary({"a": A}), {"0": BYTES})
    assert survives(read, path, whole)
    for length in range(len(whole)):
        refused(read, path, whole[:length])


def test_every_damaged_byte_of_a_zip(path):
    whole = torch_zip(dictionary({"a": A}), {"0": BYTES})
    outcomes = [survives(read, path, data) for data in damaged(whole)]
    assert 0 < sum(outcomes) < len(outcomes)


def test_every_damaged_byte_of_a_pickle_with_a_right_checksum(path):
    whole = torch_zip(dictionary({"a": tensor(stored("0", 12), [4, 3], [1, 4])}), {"0": BYTES})
    path.write_bytes(whole)
    span = entries(MappedFile(path))["m/data.pkl"]
    outcomes = []
    for data in damaged(whole[span.start:span.start + span.size]):
        changed = whole[:span.start] + data + whole[span.start + span.size:]
        outcomes.append(survives(read, path, with_checksums(changed)))
    assert 0 < sum(outcomes) < len(outcomes)


def test_a_damaged_pickle_does_not_pass_its_checksum(path):
    whole = torch_zip(dictionary({"weight": A}), {"0": BYTES})
    refused(read, path, whole.replace(b"weight", b"wEight"), "checksum")


@pytest.mark.parametrize(("made", "match"), [
    (zipped({"m/other": b"x"}), "not a torch checkpoint"),
    (zipped({"m/data.pkl": pickled(b"}"), "n/data.pkl": pickled(b"}")}), "not a torch checkpoint"),
    (torch_zip(b"}", {}, {"m/code/x.py": b""}), "TorchScript"),
    (torch_zip(b"}", {}, {"m/constants.pkl": b""}), "TorchScript"),
    (torch_zip(b"}", {}, {"m/byteorder": b"big"}), "little-endian"),
    (torch_zip(b"}", {}, {"m/data.pkl ": b"", "../m": b""}), "leads out"),
])
def test_other_zip_files(path, made, match):
    refused(read, path, made, match)


def test_byte_order_and_other_entries_are_accepted(path):
    extra = {"m/byteorder": b"little", "m/version": b"3\n", "m/.format_version": b"1"}
    path.write_bytes(torch_zip(dictionary({"a": A}), {"0": BYTES}, extra))
    np.testing.assert_array_equal(read(path)["a"].f32(), DATA.reshape(3, 4))


def test_the_older_format(path):
    value = dictionary({"a": tensor(stored("7", 12), [4, 3], [1, 4]), "b": tensor(stored("8", 2), [2], [1])})
    path.write_bytes(torch_legacy(value, ["8", "7"], [(2, values(2).tobytes()), (12, BYTES)]))
    tensors = read(path)
    np.testing.assert_array_equal(tensors["a"].f32(), DATA.reshape(3, 4).T)
    np.testing.assert_array_equal(tensors["b"].f32(), values(2))


def test_parts_of_storages_in_the_older_format(path):
    part = stored("7", 12, more=b"(" + string("v") + number(4) + number(6) + b"t")
    whole = stored("7", 12, more=b"N")
    value = dictionary({"a": tensor(part, [2, 2], [1, 3], offset=1), "b": tensor(whole, [12], [1])})
    path.write_bytes(torch_legacy(value, ["7"], [(12, BYTES)]))
    tensors = read(path)
    np.testing.assert_array_equal(tensors["a"].f32(), DATA[[[5, 8], [6, 9]]])
    np.testing.assert_array_equal(tensors["b"].f32(), DATA)
    outside = stored("7", 12, more=b"(" + string("v") + number(8) + number(6) + b"t")
    refused(read, path, torch_legacy(dictionary({"a": tensor(outside, [2], [1])}), ["7"], [(12, BYTES)]), "outside it")


VALUE = dictionary({"a": A})


@pytest.mark.parametrize(("made", "match"), [
    (torch_legacy(VALUE, ["0"], [(12, BYTES)], magic=1), "not a torch checkpoint"),
    (torch_legacy(VALUE, ["0"], [(12, BYTES)], little=False), "little-endian"),
    (torch_legacy(VALUE, ["0"], [(11, BYTES)]), "12 elements expected"),
    (torch_legacy(VALUE, ["0"], [(-1, BYTES)]), "12 elements expected"),
    (torch_legacy(VALUE, ["0"], [(12, BYTES[:-1])]), "truncated"),
    (torch_legacy(VALUE, [], []), "storage '0' is not in the file"),
    (torch_legacy(VALUE, ["0", "1"], [(12, BYTES)] * 2), "no tensor uses"),
    (torch_legacy(VALUE, ["0", "0"], [(12, BYTES)] * 2), "one twice"),
    (pickled(VALUE), "not a torch checkpoint"),
    (pickled(number(0x1950A86A20F9469CFC6C)) + pickled(number(1)), "torch protocol 1, expected 1001"),
])
def test_broken_older_files(path, made, match):
    refused(read, path, made, match)


def test_every_truncation_of_the_older_format(path):
    whole = torch_legacy(VALUE, ["0"], [(12, BYTES)])
    for length in range(len(whole)):
        refused(read, path, whole[:length])


def test_every_damaged_byte_of_the_older_format(path):
    outcomes = [survives(read, path, data) for data in damaged(torch_legacy(VALUE, ["0"], [(12, BYTES)]))]
    assert 0 < sum(outcomes) < len(outcomes)


def test_what_a_checkpoint_asks_for(path):
    path.write_bytes(torch_zip(VALUE, {"0": BYTES}))
    expected = ("torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "collections.OrderedDict")
    assert requested_globals(path) == expected
    path.write_bytes(torch_legacy(VALUE, ["0"], [(12, BYTES)])[:-20])
    assert requested_globals(path) == expected
    path.write_bytes(b"PK\3\4" + struct.pack("<Q", 0))
    with pytest.raises(FormatError):
        requested_globals(path)
