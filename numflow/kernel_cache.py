"""Where compiled kernels are kept: one folder per version of the sources a kernel is made of.

Numba's disk cache sees edits in the file of a function, not in the files it calls into. So each kernel module gets a
folder named by a hash of its own source, of every numflow module it imports (directly or not) and of the versions
and CPU settings the compiler works with. Folders that nothing has used for KEEP_DAYS are removed.
"""

import atexit
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

KEEP_DAYS = 30
_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(r"^\s*(?:from +(numflow[\w.]*) +import +(\([^)]*\)|.*)|import +(numflow[\w.]*))", re.M)


def root() -> Path:
    """Folder of all compiled kernels: $NUMFLOW_CACHE, else the user's cache folder of this platform."""
    if "NUMFLOW_CACHE" in os.environ:
        return Path(os.environ["NUMFLOW_CACHE"]).expanduser() / "kernels"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(base).expanduser() / "numflow" / "kernels"


@functools.cache
def folder(module: str) -> Path:
    """A writable folder for the compiled kernels of `module` ("numflow.cpu.norm"), unique to its sources."""
    path = _writable_root() / f"{module.rpartition('.')[2]}-{_fingerprint(module)}"
    path.mkdir(exist_ok=True)
    os.utime(path)
    return path


@functools.cache
def prune() -> None:
    """Remove the folders that were not used for KEEP_DAYS, once in a process; another may be doing the same."""
    oldest = time.time() - KEEP_DAYS * 86400
    for path in _writable_root().iterdir():
        try:
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # the other process was faster
            continue


@functools.cache
def _writable_root() -> Path:
    path = root()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="numflow-kernels-"))
        atexit.register(shutil.rmtree, fallback, ignore_errors=True)
        warnings.warn(f"compiled kernels cannot be kept in {path} ({error.strerror}): every start compiles them anew; "
                      "set NUMFLOW_CACHE to a folder that can be written", stacklevel=2)
        return fallback


def _fingerprint(module: str) -> str:
    """Hash of the sources of `module` and of what it imports from numflow, and of the compiler's settings."""
    digest = hashlib.sha256(_compiler().encode())
    for path in sorted(_sources(module)):
        digest.update(str(path.relative_to(_PACKAGE.parent)).encode() + _read(path))
    return digest.hexdigest()[:16]


@functools.cache
def _compiler() -> str:
    import llvmlite
    import numba

    return " ".join([numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine(),
                     str(numba.config.CPU_NAME), str(numba.config.CPU_FEATURES), str(numba.config.OPT)])


def _sources(module: str) -> set[Path]:
    """Files of `module` and of all numflow modules it imports, directly or not."""
    found, todo = set(), [module]
    while todo:
        path = _path(todo.pop())
        if path is None or path in found:
            continue
        found.add(path)
        todo += _imported(path)
    return found


@functools.cache
def _imported(path: Path) -> tuple[str, ...]:
    """Names that a source file imports from numflow: modules, and what may be one or something inside one."""
    return tuple(name for source, names, plain in _IMPORT.findall(_read(path).decode())
                 for name in (source or plain, *(f"{source}.{name}" for name in re.findall(r"\w+", names))))


@functools.cache
def _path(module: str) -> Path | None:
    """Source file of a numflow module; None where `module` names something inside a module."""
    path = os.path.join(_PACKAGE.parent, *module.split("."))
    return next((Path(p) for p in (f"{path}.py", os.path.join(path, "__init__.py")) if os.path.isfile(p)), None)


@functools.cache
def _read(path: Path) -> bytes:
    return path.read_bytes()
