"""Trust in caches: compiled code in a cache is executed, so only this user or root may write the cache.

As ssh requires for keys: a folder or file belongs to this user or to root, and neither group nor others may write it.
"""

import os
import stat
import warnings
from pathlib import Path


def why_not(*paths: Path) -> str | None:
    """Reason why one of the folders or files is not trusted; None if all are trusted.

    A missing path is trusted.
    """
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # the user of the path will notice
            continue
        if fault := _fault(found):
            return f"{path} {fault}"
    return None


def inside(folder: Path) -> str | None:
    """Reason why a file in a folder is not trusted; None if all are. In a folder that others cannot enter, file modes
    do not matter."""
    closed = os.name == "posix" and not stat.S_IMODE(os.stat(folder).st_mode) & (stat.S_IXGRP | stat.S_IXOTH)
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat()
            except FileNotFoundError:  # another process removed the file
                continue
            if stat.S_ISDIR(found.st_mode):
                continue
            if not stat.S_ISREG(found.st_mode):
                return f"{entry.path} is no file"
            if fault := _fault(found, may_be_written=closed):
                return f"{entry.path} {fault}"
    return None


def read(path: Path) -> bytes:
    """Content of a trusted file.

    Raises:
        OSError: the file is missing, no regular file (a pipe is not waited for), or not trusted (with a warning).
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
    """Whether a file exists and is trusted; warns if it exists and is not trusted."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    fault = _fault(found) if stat.S_ISREG(found.st_mode) else "is no file"
    if fault:
        warn(f"{path} {fault}", "it is made again")
    return fault is None


def usable(folder: Path, what: str) -> bool:
    """Whether a cache folder is trusted; warns if not. what: its files, for the warning."""
    why = why_not(folder.parent, folder)
    if why:
        warn(why, f"{what} there are not used")
    return why is None


def warn(why: str, then: str) -> None:
    """Warn of a path that is not trusted; each line is shown once."""
    warnings.warn(f"{why}: {then}; NUMFLOW_CACHE names a folder of your own", stacklevel=3)


def _fault(found: os.stat_result, may_be_written: bool = False) -> str | None:
    if os.name != "posix":  # ids and modes have no meaning there
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not may_be_written:
        return f"may be written by others (mode {mode:04o}; `chmod go-w` ends that)"
    return None
