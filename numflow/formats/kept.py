"""Cache files derived from a model file: their names, and their removal.

A name is PATH_STATE_REST.safetensors: hashes of the model file's path, of the model file's state, and of everything
else that the content depends on. A missing or broken cache file is made again. A cache file is removed when it was not
used for as long as compiled kernels are kept, when the model file has changed, or, least recently used first, when the
disk is full. NUMFLOW_PREPARED=0 disables the cache.
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

PIECE = 1 << 20  # bytes summed at a time, which fit in the CPU cache
_SHARE = 4       # a folder takes at most 1 / _SHARE of the disk space that would be free without it


def is_on() -> bool:
    """Whether the cache is enabled: unless $NUMFLOW_PREPARED is 0, false, no or off."""
    return os.environ.get("NUMFLOW_PREPARED", "").strip().lower() not in ("0", "false", "no", "off")


def file_name(model: Path, state: str, rest: Iterable[str | bytes]) -> str:
    """Name of a cache file. state: state of the model file, without "_". rest: everything else the content depends
    on."""
    return f"{digest([str(Path(model).absolute())])}_{state}_{digest(rest)}.safetensors"


def digest(texts: Iterable[str | bytes]) -> str:
    """A hash of texts. hashlib is avoided, because it loads OpenSSL, which takes 3 MB."""
    content = b"\0".join(text.encode() if isinstance(text, str) else text for text in texts)
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}"


def state_of(files: Iterable[Path]) -> str:
    """Fingerprint of files: names, sizes, mtime and ctime.

    Raises:
        OSError: a file cannot be accessed.
    """
    stats = [(Path(file).name, Path(file).stat()) for file in files]
    return digest(repr((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns)) for name, found in stats)


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """Views of uint8 [n] of PIECE bytes each, the last one shorter."""
    return [array[start:start + PIECE] for start in range(0, array.nbytes, PIECE)]


def piece_sum(piece: np.ndarray) -> int:
    """Sum of the 64-bit words of a piece: as fast as memory, and sufficient against disk errors and partial writes."""
    whole = piece.nbytes // 8 * 8
    return int(piece[:whole].view(np.uint64).sum()) ^ zlib.crc32(piece[whole:].data)


def checksum(sums: Iterable[int]) -> int:
    """Checksum of an array from the sums of its pieces."""
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums))


def prune(folder: Path) -> None:
    """Remove files that were not used for as long as kernels are kept."""
    oldest = time.time() - kernel_cache.KEEP_DAYS * 86400
    with contextlib.suppress(OSError):
        _remove(path for path in folder.iterdir() if path.lstat().st_mtime < oldest)


def make_room(path: Path, nbytes: int) -> bool:
    """Prepare writing a cache file: create its folder, remove files of former states of the model file, and, if
    space is short, the least recently used files. Returns whether `nbytes` may be written.

    Raises:
        OSError: the folder cannot be created or read.
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
    """Whether a file belongs to a former state of the model file."""
    (current_path, _, current_rest), (path, _, rest) = current.partition("_"), name.partition("_")
    return current_path == path and current_rest.partition("_")[0] != rest.partition("_")[0]


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        with contextlib.suppress(OSError):  # another process was faster, or reads it
            path.unlink()
