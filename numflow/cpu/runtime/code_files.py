"""Machine code of numflow's kernels on disk: object files, each followed by a checksum."""

import os
import warnings
import zlib
from pathlib import Path
from typing import Any

from numflow import kernel_cache, trust
from numflow.cpu.runtime import machine_code
from numflow.cpu.runtime.machine_code import MachineCode, UnknownCodeError

_CHECKSUM = 4  # bytes
_ENTRY = "cfunc."  # prefix of the symbol of a kernel's C function


def load(module: str, name: str) -> MachineCode | None:
    """Load a kernel of a numflow module into memory; None if it is not on disk, or damaged."""
    path = _path(module, name)
    if path is None:
        return None
    try:
        content = trust.read(path)
    except OSError:
        return None
    elf = content[:-_CHECKSUM]
    if content != _with_checksum(elf):
        return None
    try:
        return MachineCode(elf, _ENTRY)
    except UnknownCodeError:
        return None


def exists(module: str, name: str) -> bool:
    """Whether a kernel is on disk."""
    path = _path(module, name)
    return path is not None and path.exists()


def save(module: str, name: str, compiled: Any) -> None:
    """Save a kernel that Numba has compiled, if kernels of its module are `kept`."""
    path = _path(module, name)
    if path is None:
        return
    from numflow.cpu.runtime.compiler import object_file

    elf = object_file(compiled)
    try:
        MachineCode(elf, _ENTRY)
    except UnknownCodeError:
        return  # not loadable: compiled at every start
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with open(part, "xb", opener=_for_this_user) as file:
            file.write(_with_checksum(elf))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        warnings.warn(f"a compiled kernel cannot be kept in {path.parent} ({error.strerror})", stacklevel=2)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _with_checksum(elf: bytes) -> bytes:
    return elf + zlib.crc32(elf).to_bytes(_CHECKSUM, "little")


def kept(module: str) -> bool:
    """Whether this module caches kernels of a module: numflow's own, on a platform that the linker supports.

    The folder's name depends on numflow's sources only. For other modules Numba's own cache tracks the sources.
    """
    return machine_code.supported() and kernel_cache.source_of(module) is not None


def _path(module: str, name: str) -> Path | None:
    return kernel_cache.folder(module) / f"{name}.o" if kept(module) else None
