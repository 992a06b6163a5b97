"""Files that are made of a model file and kept for the next starts: what they are called, and when they go.

A name is PLACE_STATE_REST.safetensors, hashes of where the model file lies, of what is in it and of all else that the
content depends on. Nothing depends on such a file: where it is missing or broken its content is made again. One goes
when nothing has used it for as long as compiled kernels are kept, when the model file has changed, or, the one that was
used least recently first, when there is no room. NUMFLOW_PREPARED=0 keeps and reads none.
"""

import contextlib
import os
import shutil
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from numflow import kernel_cache, places

PIECE = 1 << 20  # bytes that are summed at a time, while the cache holds them
_SHARE = 4       # a folder takes at most one part of so many of what the disk would have free without it


def is_on() -> bool:
    """Whether files are kept: unless $NUMFLOW_PREPARED is 0, false, no or off."""
    return os.environ.get("NUMFLOW_PREPARED", "").strip().lower() not in ("0", "false", "no", "off")


def file_name(model: Path, state: str, rest: Iterable[str | bytes]) -> str:
    """The name of a file. state: of the model file, without "_"; rest: all else that the content depends on."""
    return f"{digest([str(Path(model).absolute())])}_{state}_{digest(rest)}.safetensors"


def digest(texts: Iterable[str | bytes]) -> str:
    """A hash of texts; hashlib would load OpenSSL, which takes 3 MB."""
    content = b"\0".join(text.encode() if isinstance(text, str) else text for text in texts)
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}"


def state_of(files: Iterable[Path]) -> str:
    """Fingerprint of the state of files: names, sizes, and dates of the last write and of the last change to the entry.

    Raises:
        OSError: one of them cannot be looked at.
    """
    stats = [(Path(file).name, Path(file).stat()) for file in files]
    return digest(repr((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns)) for name, found in stats)


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """Views of uint8 [n], PIECE bytes each, the last one fewer."""
    return [array[at:at + PIECE] for at in range(0, array.nbytes, PIECE)]


def piece_sum(piece: np.ndarray) -> int:
    """Of its 64-bit words: at the speed of memory, and enough against what disks and broken writes do."""
    whole = piece.nbytes // 8 * 8
    return int(piece[:whole].view(np.uint64).sum()) ^ zlib.crc32(piece[whole:].data)


def checksum(sums: Iterable[int]) -> int:
    """Of an array, by those of its pieces."""
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums))


def prune(folder: Path) -> None:
    """Remove what was not used for as long as kernels are kept."""
    oldest = time.time() - kernel_cache.KEEP_DAYS * 86400
    with contextlib.suppress(OSError):
        _remove(path for path in folder.iterdir() if path.lstat().st_mtime < oldest)


def make_room(path: Path, nbytes: int) -> bool:
    """Make the folder of a file that is to be written; remove what the model file held before, and what was used least
    recently if there is too much. Returns whether `nbytes` may be written.

    Raises:
        OSError: the folder cannot be made or read.
    """
    places.make(path.parent)
    _remove(other for other in path.parent.iterdir() if _is_outdated(other.name, path.name))
    found = sorted((stat.st_mtime, stat.st_size, other) for other, stat in _files(path.parent))
    taken = sum(size for _, size, _ in found)
    most = (shutil.disk_usage(path.parent).free + taken) // _SHARE
    if nbytes > most:
        return False
    for _, size, other in found:
        if taken + nbytes <= most:
            break
        _remove([other])
        taken -= size
    return True


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            found.append((path, path.lstat()))
    return found


def _is_outdated(name: str, current: str) -> bool:
    """Whether a file is of what the model file held before."""
    (where, _, mine), (place, _, others) = current.partition("_"), name.partition("_")
    return where == place and mine.partition("_")[0] != others.partition("_")[0]


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        with contextlib.suppress(OSError):  # another process was faster, or reads it
            path.unlink()
