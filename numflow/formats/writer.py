"""Atomic writer of safetensors files, with at most one tensor in memory."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from numflow.errors import FormatError, RequestError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_DTYPES = {"float32": "F32", "uint8": "U8"}
_ALIGNMENT = 64
_PART = re.compile(r"\..+\.(\d+)\.part")  # name of an incomplete file: .NAME.PID.part


def found(path: Path) -> os.stat_result | None:
    """os.stat of a path; None if nothing is there.

    From Python 3.14 on, `Path.exists` hides access errors.

    Raises:
        RequestError: the name is too long, or access is denied.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None


def check_place(path: Path) -> None:
    """Refuse a path that `write` could not create, before other work is done.

    Raises:
        RequestError: the folder is missing or not writable, or the name is too long.
    """
    folder = found(path.parent)
    if folder is None or not stat.S_ISDIR(folder.st_mode):
        raise RequestError(f"{path}: no folder {path.parent}")
    found(_part(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise RequestError(f"{path}: the folder {path.parent} may not be written")


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written. `read` is called when the tensor is written, and returns an array of `nbytes` bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], np.ndarray] = field(repr=False)

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> "TensorEntry":
        """An array in memory: float32 or uint8."""
        return cls(name, _DTYPES[array.dtype.name], array.shape, array.nbytes, lambda: array)


def write(path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, str],
          written: Callable[[int], None] = lambda count: None, kept: bool = False) -> None:
    """Write a safetensors file atomically; arguments and errors as in `write_whole`."""
    write_whole(path, _header(entries, metadata), entries, written, kept)


def write_whole(path: Path, header: bytes, entries: Sequence[TensorEntry],
                written: Callable[[int], None] = lambda count: None, kept: bool = False) -> None:
    """Write a file of a header and tensors atomically. The file gets its name when it is complete. Until then, and
    after a failure or a signal, a former file is untouched. Only SIGKILL leaves an incomplete file, under a hidden
    name.

    entries:  in file order. written: called with the number of bytes written so far.
    kept:     cache file: accessible by this user only, and not synced, so a power loss may leave it incomplete.

    Raises:
        RequestError: the disk is full, or the file cannot be written.
        FormatError: an entry's data has another size than announced.
    """
    path = Path(path)
    part = _part(path)
    _remove_left_over(path)
    total = len(header) + sum(entry.nbytes for entry in entries)
    try:
        room = shutil.disk_usage(path.parent).free
        if room < total:
            raise RequestError(f"{path}: needs {total} bytes, the disk has {room} left")
        with _removed_by_signals(part), open(part, "xb", opener=_for_this_user if kept else None) as file:
            _hold(file)
            _fill(file, header, entries, written)
            file.flush()
            if not kept:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _removed_by_signals(part: Path) -> Iterator[None]:
    """Context in which a terminating signal removes the file first; Ctrl-C raises an exception anyway."""
    def end(number, frame) -> None:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    ending = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # not what nohup ignores
    try:
        for number in ending:
            signal.signal(number, end)
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _remove_left_over(path: Path) -> None:
    """Remove incomplete files of killed processes in the folder."""
    for part in path.parent.glob(".*.part"):
        match = _PART.fullmatch(part.name)
        if match and not _runs(int(match[1])):
            with contextlib.suppress(OSError):
                if not _is_written(part):
                    part.unlink()


def _is_written(part: Path) -> bool:
    """Whether an invisible process, as in another container, is writing the file.

    Raises:
        OSError: the file cannot be opened.
    """
    if fcntl is None:
        return False
    with open(os.open(part, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return True  # no incomplete file of ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _hold(file) -> None:
    """Lock an incomplete file, so that other processes do not remove it, where the file system supports locks."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _runs(pid: int) -> bool:
    """Whether a process of this id exists, as far as can be determined."""
    if os.name != "posix":  # os.kill would terminate the process there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _fill(file, header: bytes, entries: Iterable[TensorEntry], written: Callable[[int], None]) -> None:
    file.write(header)
    done = len(header)
    for entry in entries:
        data = np.ascontiguousarray(entry.read())
        if data.nbytes != entry.nbytes:
            raise FormatError(f"tensor {entry.name!r}: {data.nbytes} bytes where {entry.nbytes} were announced")
        file.write(data.reshape(-1).view(np.uint8).data)
        done += entry.nbytes
        written(done)


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Header length and header, padded so that tensor data begins at a multiple of 64."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for entry in entries:
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape),
                             "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(table, ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
