"""Pickles made to run code, to fill memory or never to end: nothing runs, and each soon gives one clear error."""

import io
import struct
import time
import tracemalloc
import zipfile

import pytest

from numflow.errors import FormatError, UnsafePickleError
from numflow.formats.pickle import read
from numflow.formats.pickle_machine import MAX_OPCODES, MAX_REQUESTED
from tests.formats import make
from tests.formats.make import dictionary, named, number, pickled, refused, stored, string, tensor, torch_zip, values

BYTES = values(12).tobytes()
A = tensor(stored("0", 12), [3, 4], [4, 1])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module: str, name: str, *args: str) -> bytes:
    return named(module, name) + b"(" + b"".join(map(string, args)) + b"tR"


TOUCH = "open('RAN', 'w')"
HOSTILE = {
    "reduce": (call("os", "system", "touch RAN"), ["os.system"]),
    "posix": (call("posix", "system", "touch RAN"), ["posix.system"]),
    "eval": (call("builtins", "eval", TOUCH), ["builtins.eval"]),
    "python 2 eval": (call("__builtin__", "eval", TOUCH), ["__builtin__.eval"]),
    "stack global": (short("builtins") + short("eval") + b"\x93(" + string(TOUCH) + b"tR", ["builtins.eval"]),
    "memo global": (short("builtins") + b"\x94" + short("exec") + b"\x940h\0h\1\x93(" + string(TOUCH) + b"tR",
                    ["builtins.exec"]),
    "duplicated name": (short("exec") + b"2\x93)R", ["exec.exec"]),
    "computed global": (call("builtins", "chr", "x") + short("eval") + b"\x93)R",
                        ["builtins.chr", "a global whose name is computed"]),
    "inst": (b"(" + string("touch RAN") + b"ios\nsystem\n", ["os.system"]),
    "obj": (b"(" + named("os", "system") + string("touch RAN") + b"o", ["os.system"]),
    "newobj": (named("subprocess", "Popen") + b"(" + string("touch RAN") + b"t\x81", ["subprocess.Popen"]),
    "newobj_ex": (named("subprocess", "Popen") + b"(" + string("touch RAN") + b"t}\x92", ["subprocess.Popen"]),
    "build": (named("os", "environ") + b"}" + string("PATH") + string("x") + b"sb", ["os.environ"]),
    "append": (named("sys", "path") + string("/tmp") + b"a", ["sys.path"]),
    "setitem": (named("os", "environ") + string("PATH") + string("x") + b"s", ["os.environ"]),
    "copyreg": (named("copyreg", "_reconstructor") + b"(" + named("os", "system") + b"NNtR",
                ["copyreg._reconstructor", "os.system"]),
    "add_extension": (named("copyreg", "add_extension") + b"(" + string("os") + string("system") + b"K\1tR\x82\1)R",
                      ["copyreg.add_extension", "copyreg extension 1"]),
    "ext1": (b"\x82\1", ["copyreg extension 1"]),
    "ext2": (b"\x83\1\2", ["copyreg extension 513"]),
    "ext4": (b"\x84\1\0\0\0", ["copyreg extension 1"]),
    "getattr": (named("builtins", "getattr") + b"(" + named("os", "path") + string("x") + b"tR",
                ["builtins.getattr", "os.path"]),
    "dotted name": (short("torch") + short("_utils._rebuild_tensor_v2.__globals__") + b"\x93",
                    ["torch._utils._rebuild_tensor_v2.__globals__"]),
    "nested pickle": (named("torch.storage", "_load_from_bytes") + b"(C\x05hello" + b"tR",
                      ["torch.storage._load_from_bytes"]),
    "torch.load": (call("torch", "load", "x"), ["torch.load"]),
    "torch hub": (call("torch.hub", "load", "x", "y"), ["torch.hub.load"]),
    "jit": (call("torch.jit", "load", "x"), ["torch.jit.load"]),
    "from type": (named("torch._tensor", "_rebuild_from_type_v2") + b"(" + named("os", "system") + b"N("
                  + string("touch RAN") + b"t}tR", ["os.system"]),
    "persistent": (b"(" + string("storage") + named("os", "system") + string("0") + string("cpu") + b"K\1tQ",
                   ["os.system"]),
    "a known name elsewhere": (named("evil", "OrderedDict") + b")R", ["evil.OrderedDict"]),
    "numpy": (named("numpy.core.multiarray", "_reconstruct") + b")R", ["numpy.core.multiarray._reconstruct"]),
    "runpy": (call("runpy", "run_path", "x"), ["runpy.run_path"]),
    "pty": (call("pty", "spawn", "sh"), ["pty.spawn"]),
    "after the tensors": (dictionary({"a": A, "b": call("os", "system", "touch RAN")}), ["os.system"]),
    "several": (dictionary({"a": call("os", "system", "x"), "b": call("shutil", "rmtree", "/"),
                            "c": call("os", "system", "y")}), ["os.system", "shutil.rmtree"]),
    "then damaged": (call("os", "system", "touch RAN") + b"\xff", ["os.system"]),
    "then truncated": (call("os", "system", "touch RAN") + b"X\xff\xff\xff\x7f", ["os.system"]),
    "unprintable": (b"co\x1b[2Js\nsystem\n", ["o\\x1b[2Js.system"]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_code_is_never_run(path, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    value, expected = HOSTILE[name]
    for made in (torch_zip(value, {"0": BYTES}), pickled(value), make.torch_legacy(value, ["0"], [(12, BYTES)])):
        path.write_bytes(made)
        with pytest.raises(UnsafePickleError, match="refused, nothing was run") as error:
            read(path)
        assert list(error.value.requested) == expected
        assert expected[0] in str(error.value)
        assert set(expected) <= set(make.requested_globals(path))
    assert not (tmp_path / "RAN").exists()


def test_protocol_0(path):
    path.write_bytes(b"cos\nsystem\n(S'touch RAN'\np0\nI1\nI01\nF1.5\nL5L\nVx\ng0\ntR.")
    with pytest.raises(UnsafePickleError, match=r"os\.system"):
        read(path)
    assert make.requested_globals(path) == ("os.system",)


def test_a_long_list_of_requests_is_cut(path):
    value = b"".join(named("m", f"f{i}") for i in range(MAX_REQUESTED + 50))
    path.write_bytes(torch_zip(value))
    with pytest.raises(UnsafePickleError, match="and 990 more") as error:
        read(path)
    assert len(error.value.requested) == MAX_REQUESTED


@pytest.mark.parametrize(("value", "match"), [
    (b"Px\n", "opcode b'P'"),                               # text persistent id
    (b"\x8f", "not one that checkpoints use"),              # set
    (b"\x97", "not one that checkpoints use"),              # out-of-band buffer
    (b"\x96" + bytes(8), "not one that checkpoints use"),   # bytearray
    (b"\xff", "not one that checkpoints use"),
    (b"\x80\x06", "protocol 6"),
    (b"R", "nothing on the stack"),
    (b"0", "nothing on the stack"),
    (b"a", "nothing on the stack"),
    (b"t", "no mark"),
    (b"1", "no mark"),
    (b"(o", "no class"),
    (b"}K\1b0b", "nothing on the stack"),
    (b"h\5", "nothing in the memo at 5"),
    (b"j\xff\xff\xff\xff", "nothing in the memo"),
    (b"}p-1\n", "out of range"),
    (b"}p99999999999\n", "out of range"),
    (b"I" + b"9" * 50 + b"\n", "digits"),
    (b"I" + b"9" * 100_000, "no end of line"),
    (b"L" + b"9" * 4000 + b"L\n", "digits"),
    (b"Ix\n", "invalid literal"),
    (b"Fx\n", "could not convert"),
    (b"\x8b\xff\xff\xff\x7f", "bytes wanted"),
    (b"\x8b\0\1\0\0" + bytes(256), "a number of 256 bytes"),
    (b"\x8a\xff" + bytes(255), "a number of 255 bytes"),
    (b"X\xff\xff\xff\xff", "bytes wanted"),
    (b"\x8e" + b"\xff" * 8, "bytes wanted"),
    (b"\x8d" + b"\xff" * 8, "bytes wanted"),
    (b"X\1\0\0\0\xff", "opcode b'X'"),
    (b"c\xff\nx\n", "opcode b'c'"),
    (b"}(K\1u", "a key without a value"),
    (b"K\1K\2a", "cannot append to int"),
    (b"](K\1K\2u", "cannot set items of list"),
    (b"K\1)R", "is not to be called"),
    (named("torch", "Size") + b")}(" + string("x") + b"K\1u\x92", "keyword arguments"),
    (b"((K\1tQ", "not a torch storage"),
    (b"(" + stored("0", 12) + b"tQ", "not a torch storage"),                              # nested persistent ids
    (b"(" + string("storage") + named("torch", "FloatStorage") + stored("0", 1) + b"NK\1tQ", "must have a type"),
    (named("torch._tensor", "_rebuild_from_type_v2") + b"(" + named("torch._tensor", "_rebuild_from_type_v2")
     + b"N)}tR", "not a tensor"),
])
def test_malformed_opcodes(path, value, match):
    refused(read, path, torch_zip(value, {"0": BYTES}), match)


def laughs(levels: int) -> bytes:
    """A tuple of two references to the previous tuple, and so on: 2 ** levels leaves if traversed."""
    return b")" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(levels))


BOMBS = {
    "billion laughs": laughs(200),
    "billion laughs as a key": b"}" + laughs(200) + b"K\1s",
    "billion laughs as an argument": named("torch", "Size") + b"(" + laughs(200) + b"tR",
    "billion laughs as a size": dictionary({"a": named("torch._utils", "_rebuild_tensor_v2") + b"(" + stored("0", 1)
                                            + number(0) + laughs(200) + laughs(200) + b"NNtR"}),
    "billion laughs as an id": laughs(200) + b"Q",
    "a list in itself": b"]q\0h\0ah\0a",
    "a dictionary in itself": b"}q\0" + string("model") + b"h\0s" + string("x") + b"h\0s",
    "deep tuples": b")" + b"\x85" * 100_000,
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "deep marks": b"(" * 100_000,
    "many references": b"(" + b"]q\0" + b"h\0" * 100_000 + b"t",
    "one long tuple checked often": b"(" + b"K\1" * 1000 + b"t\x94" + (named("torch", "Size") + b"(h\0tR0") * 1000,
    "one large dictionary under many keys": b"}q\0(" + b"".join(string(f"a{i}") + b"N" for i in range(1000)) + b"u0}("
                                            + b"".join(string(f"b{i}") + b"h\0" for i in range(3000)) + b"u",
    "large memo keys": b"]" + b"".join(b"r" + struct.pack("<I", i << 12) for i in range(2**16)),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.thin(4)
def test_bombs_are_inert(path, name):
    path.write_bytes(torch_zip(BOMBS[name], {"0": BYTES}))
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(FormatError):
        read(path)
    took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took < 20  # of the processor; well below a second, tracing takes its share
    assert peak < 100 * len(BOMBS[name]) + (1 << 20)


def test_endless_work_is_cut(path):
    """Repeated checks of a long tuple cost the square of its size, so they count as steps."""
    length = 20_000
    calls = MAX_OPCODES // length + 10
    value = b"(" + b"K\1" * length + b"t\x94" + (named("torch", "Size") + b"(h\0tR0") * calls
    refused(read, path, torch_zip(value), "steps")


def test_a_pickle_that_is_too_large(path, monkeypatch):
    monkeypatch.setattr("numflow.formats.pickle.MAX_BYTES", 100)
    refused(read, path, torch_zip(dictionary({"a": A}), {"0": BYTES}), "at most 100 are read")
    monkeypatch.setattr("numflow.formats.pickle_machine.MAX_OPCODES", 10)
    refused(read, path, make.torch_legacy(dictionary({"a": A}), ["0"], [(12, BYTES)]), "more than 10 steps")


def test_a_pickle_without_a_zip_has_the_same_limit(path, monkeypatch):
    """Its size is not stored: at most MAX_BYTES of it are read, however long the file is."""
    padding = string("p" * 900)
    data = make.torch_legacy(b"(" + padding * 3 + b"t0" + dictionary({"a": A}), ["0"], [(12, BYTES)])
    path.write_bytes(data)
    assert list(read(path)) == ["a"]
    monkeypatch.setattr("numflow.formats.pickle_machine.MAX_BYTES", 2000)
    refused(read, path, data, "bytes wanted, .* are left")


# The zip around it

GOOD = {"m/data.pkl": pickled(dictionary({"a": A})), "m/data/0": BYTES}


@pytest.mark.parametrize("name", ["../evil", "m/../../evil", "/etc/evil", "m\\evil", "C:evil", ".."])
def test_names_that_leave_the_archive(path, name):
    refused(read, path, make.zipped({**GOOD, name: b"x"}), "leads out of the archive")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_of_one_name(path):
    refused(read, path, make.zipped([*GOOD.items(), ("m/data/0", BYTES)]), "two of that name")
    refused(read, path, make.zipped([*GOOD.items(), ("m/data.pkl", pickled(call("os", "system", "x")))]),
            "two of that name")


def test_compressed_entries(path):
    refused(read, path, make.zipped({**GOOD, "m/data/0": bytes(100_000)}, zipfile.ZIP_DEFLATED), "compressed")


def patch(data: bytes, name: bytes, offset: int, value: bytes) -> bytes:
    """Change a directory record of the zip file."""
    at = data.index(name, data.index(b"PK\1\2")) - 46 + offset
    return data[:at] + value + data[at + len(value):]


@pytest.mark.parametrize(("offset", "value", "match"), [
    (8, b"\1", "encrypted"),
    (20, struct.pack("<I", 10), "compressed"),
    (20, struct.pack("<II", 1000, 1000), "1000 bytes at|overlap"),
    (20, struct.pack("<II", 2**32 - 1, 2**32 - 1), "64-bit sizes are missing"),
    (42, struct.pack("<I", 0), "another name"),
    (42, struct.pack("<I", 7), "damaged zip"),
    (42, struct.pack("<I", 2**31), "damaged zip"),
    (28, struct.pack("<H", 2**16 - 1), "longer than the directory"),
    (0, b"XX", "damaged zip"),
])
def test_lies_in_the_directory(path, offset, value, match):
    refused(read, path, patch(make.zipped(GOOD), b"m/data/0", offset, value), match)


def test_overlapping_entries(path):
    """The directory's size of data.pkl is too large, so that it overlaps the next entry."""
    whole = make.zipped(GOOD)
    size = len(GOOD["m/data.pkl"]) + 20
    refused(read, path, patch(whole, b"m/data.pkl", 20, struct.pack("<II", size, size)), "overlap")


@pytest.mark.parametrize(("offset", "value"), [
    (8, struct.pack("<HH", 60000, 60000)), (12, struct.pack("<I", 2**31)), (16, struct.pack("<I", 2**31)),
])
def test_lies_in_the_end_record(path, offset, value):
    whole = make.zipped(GOOD)
    at = whole.rindex(b"PK\5\6") + offset
    refused(read, path, whole[:at] + value + whole[at + len(value):], "damaged zip")


def test_large_zip_files_have_64_bit_sizes(path):
    """As torch writes them: sizes and offset in an extra field, the directory's offset in a zip64 end record."""
    whole = make.zipped(GOOD)
    head = whole[:whole.index(b"PK\1\2")]
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        infos = archive.infolist()
    records = b""
    for info in infos:
        extra = struct.pack("<HHHH", 9, 4, 0, 0) \
            + struct.pack("<HHQQQ", 1, 24, info.file_size, info.file_size, info.header_offset)
        records += struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 0, 0, 0, 0, 0, info.CRC, 2**32 - 1, 2**32 - 1,
                               len(info.filename), len(extra), 0, 0, 0, 0, 2**32 - 1) + info.filename.encode() + extra
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 0, 0, 0, 2, 2, len(records), len(head))
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(head) + len(records), 1)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    path.write_bytes(head + records + end64 + locator + last)
    assert read(path)["a"].f32().tobytes() == BYTES
