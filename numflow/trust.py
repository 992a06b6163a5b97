"""Trust in caches: compiled code in a cache is run, so only this user or root may have written it.

As ssh asks of keys: a folder or file belongs to this user or to root, and neither its group nor others may write it.
"""

import os
import stat
import warnings
from pathlib import Path


def why_not(*paths: Path) -> str | None:
    """The fault of the first of these folders or files that is not to be relied on; None if there is none.

    What is not there has no fault.
    """
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # whoever uses it finds out
            continue
        if fault := _fault(found):
            return f"{path} {fault}"
    return None


def inside(folder: Path) -> str | None:
    """The same of the files in a folder. Who cannot enter the folder cannot write them, whatever their mode."""
    closed = os.name == "posix" and not stat.S_IMODE(os.stat(folder).st_mode) & (stat.S_IXGRP | stat.S_IXOTH)
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat()
            except FileNotFoundError:  # another process was faster
                continue
            if stat.S_ISDIR(found.st_mode):
                continue
            if not stat.S_ISREG(found.st_mode):
                return f"{entry.path} is no file"
            if fault := _fault(found, may_be_written=closed):
                return f"{entry.path} {fault}"
    return None


def read(path: Path) -> bytes:
    """The content of a file to be relied on.

    Raises:
        OSError: it is not there, no file (a pipe is not waited for), or not to be relied on, which is warned of.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        fault = _fault(found) if stat.S_ISREG(found.st_mode) else "is no file"
        if fault:
            warn(f"{path} {fault}", "it is made again")
            raise PermissionError(fault)
        return file.read()


def readable(path: Path) -> bool:
    """Whether a file is there and to be relied on; warns where it is there and is not."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    fault = _fault(found) if stat.S_ISREG(found.st_mode) else "is no file"
    if fault:
        warn(f"{path} {fault}", "it is made again")
    return fault is None


def usable(folder: Path, what: str) -> bool:
    """Whether files of a cache folder may be read and written; warns where not. what: they are, for the warning."""
    why = why_not(folder.parent, folder)
    if why:
        warn(why, f"{what} there are not used")
    return why is None


def warn(why: str, then: str) -> None:
    """Warn of something that is not to be relied on; the same line once."""
    warnings.warn(f"{why}: {then}; NUMFLOW_CACHE names a folder of your own", stacklevel=3)


def _fault(found: os.stat_result, may_be_written: bool = False) -> str | None:
    if os.name != "posix":  # where neither number says who may write
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not may_be_written:
        return f"may be written by others (mode {mode:04o}; `chmod go-w` ends that)"
    return None
