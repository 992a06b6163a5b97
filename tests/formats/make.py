"""Files made byte by byte, and ways to damage them."""

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from numflow.errors import FormatError, NumflowError
from numflow.formats.mapped import MappedFile
from numflow.formats.pickle import _Reader


def values(count: int) -> np.ndarray:
    """float32 [count], all values distinct."""
    return np.arange(count, dtype="<f4") / 8 - 1


def refused(read, path: Path, data: bytes, match: str = ".") -> str:
    """`read(path)` of a file with these bytes raises FormatError, naming the file. Returns the message."""
    path.write_bytes(data)
    with pytest.raises(FormatError, match=match) as error:
        read(path)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def survives(read, path: Path, data: bytes) -> bool:
    """Whether `read(path)` of these bytes gives readable tensors; only a NumflowError may be raised."""
    path.write_bytes(data)
    try:
        tensors = read(path)
    except NumflowError:
        return False
    for tensor in tensors.values():
        assert tensor.raw().nbytes == tensor.nbytes
    return True


def requested_globals(path: Path) -> tuple[str, ...]:
    """Every global ("module.name") that a pickle or torch checkpoint imports, in order, up to any damage."""
    reader = _Reader(MappedFile(path))
    try:
        reader.load()
    except FormatError:
        if not reader.requested:
            raise
    return tuple(reader.requested)


def damaged(data: bytes) -> Iterator[bytes]:
    """The file with each of its bytes changed in three ways."""
    for i in range(len(data)):
        for byte in {0, 255, data[i] ^ 0x80, (data[i] + 1) % 256} - {data[i]}:
            yield data[:i] + bytes([byte]) + data[i + 1:]


# safetensors

def safetensors(header: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


# GGUF

def text(value: str | bytes, code: str = "<Q") -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack(code, len(data)) + data


def pair(key: str, kind: int, value: bytes, code: str = "<Q") -> bytes:
    return text(key, code) + struct.pack("<I", kind) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, 4, struct.pack("<I", value))


def entry(name: str, dims: list[int], kind: int, offset: int, code: str = "<Q") -> bytes:
    """A tensor's entry in the GGUF tensor table; dims innermost first."""
    sizes = b"".join(struct.pack(code, d) for d in dims)
    return text(name, code) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def gguf(pairs: list[bytes] = (), entries: list[bytes] = (), data: bytes = b"", version: int = 3, align: int = 32,
         counts: tuple[int, int] | None = None) -> bytes:
    tensors, metadata = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<I" + ("II" if version == 1 else "QQ"), version, tensors, metadata)
    head += b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % align) + data


# Pickles, opcode by opcode

def string(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(items) -> bytes:
    return b"(" + b"".join(map(number, items)) + b"t"


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def stored(key: str, count: int, kind: str = "FloatStorage", more: bytes = b"") -> bytes:
    """The persistent id of a storage, and the opcode that loads it."""
    return b"(" + string("storage") + named("torch", kind) + string(key) + string("cpu") + number(count) + more + b"tQ"


def tensor(storage: bytes, shape, stride, offset: int = 0, function: str = "_rebuild_tensor_v2") -> bytes:
    return (named("torch._utils", function) + b"(" + storage + number(offset) + numbers(shape) + numbers(stride)
            + b"\x89" + named("collections", "OrderedDict") + b")RtR")


def dictionary(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(string(name) + value for name, value in items.items()) + b"u"


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def torch_zip(value: bytes, storages: dict[str, bytes] = {}, extra: dict[str, bytes] = {}) -> bytes:  # noqa: B006
    """A zip checkpoint whose data.pkl has this value."""
    return zipped({"m/data.pkl": pickled(value), **{f"m/data/{k}": v for k, v in storages.items()}, **extra})


def zipped(files: dict[str, bytes] | list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    import io

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.compress_type = method
            archive.writestr(info, data)
    return buffer.getvalue()


def with_checksums(data: bytes) -> bytes:
    """A zip file whose data.pkl was changed, with both of its checksums corrected."""
    import io

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = archive.getinfo("m/data.pkl")
    start = info.header_offset + 30 + len("m/data.pkl")
    crc = struct.pack("<I", zlib.crc32(data[start:start + info.file_size]))
    return data.replace(struct.pack("<I", info.CRC), crc)


def torch_legacy(value: bytes, keys: list[str], storages: list[tuple[int, bytes]], little: bool = True,
                 magic: int = 0x1950A86A20F9469CFC6C, version: int = 1001) -> bytes:
    machine = dictionary({"protocol_version": number(version), "little_endian": b"\x88" if little else b"\x89"})
    parts = [number(magic), number(version), machine, value, b"](" + b"".join(map(string, keys)) + b"e"]
    data = b"".join(struct.pack("<q", count) + content for count, content in storages)
    return b"".join(map(pickled, parts)) + data
