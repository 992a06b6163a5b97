"""Compilation of a kernel to machine code for one compute capability, with its resource usage. No GPU is needed."""

import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from numflow import places, trust
from numflow.cuda.compiler.compat import compiler, core, target, uncollected
from numflow.cuda.compiler.dependent import DEPENDENT_FROM, dependent
from numflow.cuda.lang.kernel import Kernel, ingredients, rewired
from numflow.cuda.lang.tensor_memory import BLACKWELL
from numflow.errors import DeviceError
from numflow.kernel_cache import root

PTX_FOR = (8, 0)  # PTX is generated for the oldest supported GPU; newer GPUs get machine code from the same PTX


@dataclass(frozen=True)
class Binary:
    """Machine code (cubin) of a kernel.

    symbol: the kernel's name in the cubin. registers: per thread. spills, stack: bytes per thread. shared: static
    shared memory of a block in bytes. doubles: whether the code has double-precision instructions. ptx: the PTX it was
    assembled from; "" if the binary comes from the disk cache.
    """

    name: str
    symbol: str
    cubin: bytes = field(repr=False)
    registers: int
    spills: int
    shared: int
    stack: int
    doubles: bool = False
    ptx: str = field(repr=False, default="")


def cached(kernel: Kernel, capability: tuple[int, int]) -> Binary:
    """The kernel from the disk cache, if it was compiled from the same sources before; else compile and store it.

    The cache is in `$NUMFLOW_CUDA_KERNELS`, by default beside the cache of CPU kernels. Binaries do not depend on the
    machine that compiled them, so the folder can be copied to a machine without a compiler.

    Raises:
        DeviceError: as compile_kernel.
    """
    path = _path(kernel, capability)
    if not trust.usable(folder(), "compiled kernels"):
        return compile_kernel(kernel, capability)
    try:
        fields = json.loads(trust.read(path.with_suffix(".json")))
        return Binary(cubin=trust.read(path.with_suffix(".cubin")), **fields)
    except (OSError, ValueError, TypeError):  # missing or incomplete
        binary = compile_kernel(kernel, capability)
    fields = {name: value for name, value in asdict(binary).items() if name not in ("cubin", "ptx")}
    places.make(folder())
    _write(path.with_suffix(".cubin"), binary.cubin)
    _write(path.with_suffix(".json"), json.dumps(fields).encode())
    return binary


def is_cached(kernel: Kernel, capability: tuple[int, int]) -> bool:
    """Whether a kernel is in the disk cache."""
    return _path(kernel, capability).with_suffix(".json").exists()


def _path(kernel: Kernel, capability: tuple[int, int]) -> Path:
    return folder() / f"{kernel.name}-sm_{capability[0]}{capability[1]}-{digest(kernel)}"


def folder() -> Path:
    """Folder of the disk cache of compiled kernels."""
    named = os.environ.get("NUMFLOW_CUDA_KERNELS")
    return Path(named).expanduser() if named else root() / "cuda"


def digest(kernel: Kernel) -> str:
    """Hash of everything that determines the machine code: sources of the kernel and of all functions it calls, their
    constants, and the sources of the lowering."""
    code = kernel.body.__code__
    settings = kernel.signature, code.co_varnames[:code.co_argcount], kernel.threads, kernel.blocks, kernel.exact
    result = hashlib.sha256(_lowering() + repr((*settings, PTX_FOR)).encode())
    if kernel.target == BLACKWELL:
        result.update(_sources("compiler/lowering_tensor", "lang/tensor_memory"))
    for part in ingredients(kernel.body):
        result.update(part.encode())
    return result.hexdigest()[:16]


@functools.cache
def _lowering() -> bytes:
    return _sources("compiler/dependent", "compiler/lowering", "compiler/lowering_builtin", "compiler/lowering_cluster",
                    "compiler/lowering_types", "lang/cluster", "lang/kernel", "lang/parameters", "lang/warpgroup")


@functools.cache
def _sources(*names: str) -> bytes:
    root_folder = Path(__file__).parents[1]
    return b"".join((root_folder / f"{name}.py").read_bytes() for name in names)


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically: another process may write the same file, so write a temporary file and rename it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def compile_kernel(kernel: Kernel, capability: tuple[int, int]) -> Binary:
    """Compile for a compute capability such as (9, 0).

    Raises:
        DeviceError: the compiler is not installed, or refuses the kernel.
    """
    return assembled(kernel, to_ptx(kernel, PTX_FOR), capability)


def assembled(kernel: Kernel, ptx: str, capability: tuple[int, int]) -> Binary:
    """Assemble a kernel's PTX. From sm_90 on, add instructions for programmatic dependent launch (dependent.py).

    Raises:
        DeviceError: the assembler refuses it.
    """
    c = core()
    arch = kernel.architecture(capability)
    if capability >= DEPENDENT_FROM:
        ptx = dependent(ptx, arch if arch.endswith("a") else "sm_90")
    else:
        ptx = ptx.replace(".target sm_80", f".target {kernel.target}")
    linker = c.Linker(c.ObjectCode.from_ptx(ptx.encode()),
                      options=c.LinkerOptions(arch=arch, ptxas_options=["-v"]))
    try:
        cubin = linker.link("cubin").code
    except Exception as error:
        raise DeviceError(f"kernel {kernel.name} does not assemble for {arch}: {error}; "
                          f"{linker.get_error_log()}") from error
    log = linker.get_info_log()

    def figure(pattern):
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    symbol = re.search(r"\.visible \.entry (\w+)", ptx)[1]
    return Binary(kernel.name, symbol, bytes(cubin), figure(r"Used (\d+) registers"),
                  figure(r"(\d+) bytes spill stores"), figure(r"(\d+) bytes smem"),
                  figure(r"(\d+) bytes stack frame"), ".f64" in ptx, ptx)


@functools.lru_cache(maxsize=4)
def to_ptx(kernel: Kernel, capability: tuple[int, int]) -> str:
    """The kernel's PTX."""
    from numflow.cuda.compiler.lowering_types import numba_type

    bounds = (kernel.threads, kernel.blocks) if kernel.blocks else kernel.threads
    convert, seen = _helpers(kernel.exact, capability)
    with target(capability), uncollected():
        signature = compiler().types.void(*map(numba_type, kernel.signature))
        ptx, _ = compiler().cuda.compile(rewired(kernel.body, convert, seen), signature,
                                         device=False, abi="numba", cc=capability, fastmath=not kernel.exact,
                                         output="ptx", launch_bounds=bounds)
    return ptx


@functools.cache
def _helpers(exact: bool, capability: tuple[int, int]) -> tuple[Callable, dict]:
    """A function that maps names in kernels to the compiler's objects, and a dict of the device functions seen so far.

    Each device function is compiled once. Device functions with equal content share one compilation.
    """
    from numflow.cuda.compiler.lowering_tensor import lowered

    made = {}

    def convert(thing):
        if not (callable(thing) and hasattr(thing, "__code__")):
            return lowered(thing)
        key = content(thing)
        if key not in made:
            made[key] = compiler().cuda.jit(device=True, fastmath=not exact, forceinline=True)(thing)
        return made[key]

    return convert, {}


def content(function: Callable) -> tuple:
    """Key of a rewired function: its code object and the values of its globals and closure. Numbers are compared by
    their repr, because 1 == 1.0 but they compile differently."""
    globals_used = [(name, value) for name, value in sorted(function.__globals__.items()) if not name.startswith("__")]
    closure = [("", cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__code__, *((name, repr(value) if isinstance(value, int | float | tuple) else value)
                                for name, value in globals_used + closure)
