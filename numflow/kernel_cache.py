"""Cache folders of compiled kernels, one per version of a kernel's sources, and features of the target processor.

Numba's disk cache detects changes in the file of a function, but not in files of functions that it calls. So each
kernel module gets a folder named by a hash of its source, of all numflow modules that it imports (directly or not), and
of the compiler's versions and CPU settings. Folders that were not used for KEEP_DAYS are removed.
"""

import atexit
import functools
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

from numflow import places, trust

X86 = platform.machine() in ("x86_64", "AMD64")  # SSE2 is available
ARM = platform.machine() in ("aarch64", "arm64", "ARM64")  # NEON is available
KEEP_DAYS = 30
_LINUX_ON_ARM = {"asimd": "neon", "asimddp": "dotprod"}  # Linux's names of features -> LLVM's
_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(r"^\s*(?:from +(numflow[\w.]*) +import +(\([^)]*\)|.*)|import +(numflow[\w.]*))", re.M)


def root(what: str = "kernels") -> Path:
    """Cache folder of all compiled kernels, or of another kind of files."""
    return places.cache(what)


@functools.cache
def folder(module: str) -> Path:
    """Writable cache folder for the kernels of `module` ("numflow.cpu.linear.embed"), unique to its sources."""
    name = f"{module.rpartition('.')[2]}-{fingerprint(module)}"
    path = _writable_root() / name
    path.mkdir(mode=0o700, exist_ok=True)
    if why := trust.why_not(path) or trust.inside(path):
        path = _temporary_root(f"{why}: kernels of its folder are not used") / name
        path.mkdir(mode=0o700, exist_ok=True)
    os.utime(path)
    return path


def is_shared(module: str) -> bool:
    """Whether other processes of this user have the same folder for the kernels of a module; it is not temporary."""
    return folder(module).parent == root()


@functools.cache
def prune() -> None:
    """Remove the folders that were not used for KEEP_DAYS, once per process; other processes may do the same."""
    oldest = time.time() - KEEP_DAYS * 86400
    for path in _writable_root().iterdir():
        try:
            if path.is_dir() and path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # another process removed the folder first
            continue


@functools.cache
def _writable_root() -> Path:
    path = Path("~")
    try:
        path = root()
        if why := trust.why_not(path.parent, path):
            return _temporary_root(f"{why}: compiled kernels in {path} are not used")
        places.make(path)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        return _temporary_root(f"compiled kernels cannot be kept in {path} ({error.strerror})")


@functools.cache
def _temporary_root(why: str) -> Path:
    """Temporary folder of this process."""
    fallback = Path(tempfile.mkdtemp(prefix="numflow-kernels-"))
    atexit.register(shutil.rmtree, fallback, ignore_errors=True)
    warnings.warn(f"{why}, every start compiles them anew; set NUMFLOW_CACHE to a folder of your own that can be "
                  "written", stacklevel=3)
    return fallback


def fingerprint(module: str) -> str:
    """Hash of the sources of `module` and of all its imports from numflow, and of the compiler's settings."""
    content = b"".join(name.encode() + read(_file(name)) for name in sorted(_sources(module)))
    content += _compiler().encode()
    return f"{zlib.crc32(content):08x}{zlib.adler32(content):08x}"  # hashlib would load OpenSSL: 3 MB


def setting(name: str) -> str | None:
    """Setting of Numba in the environment, such as CPU_NAME."""
    return os.environ.get(f"NUMBA_{name}")


@functools.cache
def processor_flags() -> tuple[str, ...]:
    """Features of the first processor in Linux's names, on x86 ("flags") and Arm ("Features"); () elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    named = "Features" if ARM else "flags"  # an emulator may show the file of its host
    return next((tuple(line.partition(":")[2].split()) for line in lines if line.startswith(named)), ())


def features() -> frozenset[str]:
    """Processor features that compiled code may use: NUMBA_CPU_FEATURES if set, else those of the host."""
    given = setting("CPU_FEATURES")
    if given is not None:
        return frozenset(f[1:] for f in given.split(",") if f.startswith("+"))
    if setting("CPU_NAME") == "generic":  # Numba then compiles for the baseline of the architecture
        return frozenset()
    flags = processor_flags()
    if flags:  # Linux: no need to import LLVM; its names have no underscores
        return frozenset(_LINUX_ON_ARM.get(flag, flag.replace("_", "")) for flag in flags)
    if ARM and sys.platform == "darwin":  # all of Apple's have both, whatever LLVM knows of a new one
        return frozenset(("neon", "dotprod"))
    from llvmlite import binding

    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def has_floor() -> bool:
    """Whether rounding a float down is an instruction; on x86 it is one of SSE4.1."""
    return not X86 or not features().isdisjoint(("sse41", "sse4.1"))


@functools.cache
def _compiler() -> str:
    """Versions and settings that code depends on, without importing the compiler."""
    packages = [_version(name) for name in ("numba", "llvmlite")]
    settings = [str(setting(name)) for name in ("CPU_NAME", "CPU_FEATURES", "OPT")]
    return " ".join([*packages, platform.python_version(), platform.machine(), *settings, *processor_flags()])


def _version(package: str) -> str:
    """Fingerprint of an installed package's version."""
    spec = importlib.util.find_spec(package)
    source = Path(spec.origin).with_name("_version.py") if spec is not None and spec.origin else None
    return source.read_text() if source is not None and source.exists() else package


def _sources(module: str) -> set[str]:
    """`module`, which may be outside numflow, and all numflow modules that it imports, directly or not."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in found and _file(name) is not None:
            found.add(name)
            todo += _imported(name)
    return found


def _file(module: str) -> Path | None:
    """Source file of a numflow module, or of a loaded module."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    return _modules().get(module) or (Path(loaded) if loaded else None)


@functools.cache
def _imported(module: str) -> tuple[str, ...]:
    """Modules that a module imports from numflow. An imported name may be a module or a name inside a module."""
    text = read(_file(module)).decode()
    names = (name for source, inside, plain in _IMPORT.findall(text)
             for name in (source or plain, *(f"{source}.{name}" for name in re.findall(r"\w+", inside))))
    return tuple(name for name in names if name in _modules())


@functools.cache
def _modules() -> dict[str, Path]:
    """Module name -> source file, of all numflow modules."""
    found = {}
    for folder, _, files in os.walk(_PACKAGE):
        package = ".".join(Path(folder).relative_to(_PACKAGE.parent).parts)
        for file in files:
            if file.endswith(".py"):
                name = package if file == "__init__.py" else f"{package}.{file[:-3]}"
                found[name] = Path(folder, file)
    return found


def source_of(module: str) -> Path | None:
    """Source file of a numflow module; None if there is none."""
    return _modules().get(module)


@functools.cache
def read(path: Path) -> bytes:
    return path.read_bytes()
