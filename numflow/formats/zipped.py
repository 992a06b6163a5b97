"""Entries of an uncompressed zip file as ranges of the file, as in torch checkpoints.

    entry*, each with a header of its own | directory: one record per entry | [64-bit end record] | end record

Only the features that torch uses are supported. A size or offset of 2^32 - 1 stands for a 64-bit value in an extra
field or record.
"""

import itertools
import struct
from dataclasses import dataclass

from numflow.formats.mapped import MappedFile, show

MAX_ENTRIES = 1_000_000

_LOCAL = struct.Struct("<4s5H3I2H")       # local header of an entry; name and extra field follow
_RECORD = struct.Struct("<4s6H3I5H2I")    # directory record; name, extra field and comment follow
_END = struct.Struct("<4s4H2IH")          # count, bytes and offset of the directory; a comment follows
_LOCATOR = struct.Struct("<4sIQI")        # offset of the 64-bit end record
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENCRYPTED, _UTF8 = 1, 1 << 11
_IN_EXTRA = 2**32 - 1


@dataclass(frozen=True)
class ZipMember:
    """Range [start, start + size) of the file, and its expected checksum."""

    start: int
    size: int
    crc: int


def entries(file: MappedFile) -> dict[str, ZipMember]:
    """All entries of an archive by name.

    Raises:
        FormatError: damaged, compressed, encrypted, overlapping or repeated entries, or names outside the archive.
    """
    count, position, end = _directory(file)
    found: dict[str, ZipMember] = {}
    for _ in range(count):
        position = _read_record(file, position, end, found)
    ordered = sorted(found.items(), key=lambda item: item[1].start)
    for (name, entry), (other, after) in itertools.pairwise(ordered):
        if entry.start + entry.size > after.start:
            raise file.fail(f"zip entries {show(name)} and {show(other)} overlap")
    return found


def _unpack(file: MappedFile, layout: struct.Struct, position: int, magic: bytes, end: int) -> list[int]:
    """Fields, without the magic number, of the structure at `position`, which must end before `end`."""
    if not 0 <= position <= end - layout.size or file.bytes(position, 4) != magic:
        raise file.fail(f"damaged zip file (is it truncated?): expected {magic!r} at byte {position}")
    return list(layout.unpack_from(file.map, position)[1:])


def _directory(file: MappedFile) -> tuple[int, int, int]:
    """Number of directory records, and their begin and end."""
    at = file.map.rfind(b"PK\5\6", max(0, file.size - _END.size - 2**16))
    if at < 0:
        raise file.fail("damaged zip file (is it truncated?): its end record is not there")
    *_, count, size, start, _ = _unpack(file, _END, at, b"PK\5\6", file.size)
    locator = at - _LOCATOR.size
    if locator >= 0 and file.bytes(locator, 4) == b"PK\6\7":
        _, at, _ = _unpack(file, _LOCATOR, locator, b"PK\6\7", file.size)
        *_, count, size, start = _unpack(file, _END64, at, b"PK\6\6", file.size)
    if start + size > at or count > size // _RECORD.size or count > MAX_ENTRIES:
        raise file.fail(f"damaged zip file: {count} directory records in {size} bytes at {start} cannot be")
    return count, start, start + size


def _read_record(file: MappedFile, position: int, end: int, found: dict[str, ZipMember]) -> int:
    """Add the entry of a directory record; returns the position of the next record."""
    (_, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes, comment_bytes, _, _, _,
     header) = _unpack(file, _RECORD, position, b"PK\1\2", end)
    position += _RECORD.size
    following = position + name_bytes + extra_bytes + comment_bytes
    if following > end:
        raise file.fail("damaged zip file: a directory record is longer than the directory")
    raw_name = file.bytes(position, name_bytes)
    name = _check_name(file, raw_name, flags, found)
    extra = file.bytes(position + name_bytes, extra_bytes)
    size, stored, header = _widen(file, name, extra, [size, stored, header])
    if flags & _ENCRYPTED:
        raise file.fail(f"zip entry {show(name)}: it is encrypted")
    if method != 0 or stored != size:
        raise file.fail(f"zip entry {show(name)}: it is compressed, which torch never does; unpack the file and zip "
                        f"it again without compression")
    *_, local_name, local_extra = _unpack(file, _LOCAL, header, b"PK\3\4", file.size)
    start = header + _LOCAL.size + local_name + local_extra
    if file.bytes(header + _LOCAL.size, local_name) != raw_name:
        raise file.fail(f"zip entry {show(name)}: its own header has another name")
    if start + size > file.size:
        raise file.fail(f"zip entry {show(name)}: {size} bytes at {start}, the file has {file.size}")
    found[name] = ZipMember(start, size, crc)
    return following


def _check_name(file: MappedFile, raw: bytes, flags: int, found: dict[str, ZipMember]) -> str:
    try:
        name = raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        raise file.fail(f"zip entry {show(raw)}: the name is not valid UTF-8") from None
    if not name or name.startswith("/") or set(name) & set("\\\0:") or ".." in name.split("/"):
        raise file.fail(f"zip entry {show(name)}: the name leads out of the archive")
    if name in found:
        raise file.fail(f"zip entry {show(name)}: there are two of that name")
    return name


def _widen(file: MappedFile, name: str, extra: bytes, values: list[int]) -> list[int]:
    """Replace values of 2^32 - 1 by the 64-bit values of extra field 1, in order."""
    if _IN_EXTRA not in values:
        return values
    wide: list[int] = []
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        position += 4 + size
        if kind == 1 and position <= len(extra):
            wide = list(struct.unpack_from(f"<{size // 8}Q", extra, position - size))
            break
    if len(wide) < values.count(_IN_EXTRA):
        raise file.fail(f"zip entry {show(name)}: its 64-bit sizes are missing")
    return [wide.pop(0) if value == _IN_EXTRA else value for value in values]
