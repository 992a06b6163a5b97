"""From a kernel to machine code for one compute capability, with the resources it takes; no GPU is needed for it."""

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
from numflow.errors import DeviceError
from numflow.kernel_cache import root

PTX_FOR = (8, 0)  # oldest GPU that kernels run on; newer ones get machine code of their own from the same assembly


@dataclass(frozen=True)
class Binary:
    """Machine code of a kernel.

    symbol: its name in the code. registers: per thread. spills, stack: bytes of a thread; shared: of a block.
    doubles: whether it computes in double precision. ptx: what it was made from, "" if it comes from the disk.
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
    """The kernel from the disk, if it was compiled before from the same sources, else compiled and kept.

    Compiled kernels lie in `$NUMFLOW_CUDA_KERNELS`, else beside those of the CPU. They do not depend on the machine
    that compiled them: a folder of them may be carried to one without a compiler.

    Raises:
        DeviceError: as compile_kernel.
    """
    path = _path(kernel, capability)
    if not trust.usable(folder(), "compiled kernels"):
        return compile_kernel(kernel, capability)
    try:
        facts = json.loads(trust.read(path.with_suffix(".json")))
        return Binary(cubin=trust.read(path.with_suffix(".cubin")), **facts)
    except (OSError, ValueError, TypeError):  # not there, or not whole
        binary = compile_kernel(kernel, capability)
    facts = {name: value for name, value in asdict(binary).items() if name not in ("cubin", "ptx")}
    places.make(folder())
    _write(path.with_suffix(".cubin"), binary.cubin)
    _write(path.with_suffix(".json"), json.dumps(facts).encode())
    return binary


def is_cached(kernel: Kernel, capability: tuple[int, int]) -> bool:
    """Whether a kernel is on the disk."""
    return _path(kernel, capability).with_suffix(".json").exists()


def _path(kernel: Kernel, capability: tuple[int, int]) -> Path:
    return folder() / f"{kernel.name}-sm_{capability[0]}{capability[1]}-{digest(kernel)}"


def folder() -> Path:
    """Folder of compiled kernels."""
    named = os.environ.get("NUMFLOW_CUDA_KERNELS")
    return Path(named).expanduser() if named else root() / "cuda"


def digest(kernel: Kernel) -> str:
    """Hash of what machine code is made from: sources of the kernel and of what it calls, constants, the lowering."""
    code = kernel.body.__code__
    written = kernel.signature, code.co_varnames[:code.co_argcount], kernel.threads, kernel.blocks, kernel.exact
    result = hashlib.sha256(_lowering() + repr((*written, PTX_FOR)).encode())
    for part in ingredients(kernel.body):
        result.update(part.encode())
    return result.hexdigest()[:16]


@functools.cache
def _lowering() -> bytes:
    here = Path(__file__).parents[1]
    names = ("compiler/dependent", "compiler/lowering", "compiler/lowering_builtin", "compiler/lowering_cluster",
             "compiler/lowering_types", "lang/cluster", "lang/kernel", "lang/parameters", "lang/warpgroup")
    return b"".join((here / f"{name}.py").read_bytes() for name in names)


def _write(path: Path, data: bytes) -> None:
    """Another process may write the same file: each puts a whole one in its place."""
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
    """Machine code of a kernel's PTX, which from sm_90 on begins while the kernel before it runs (dependent.py).

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

    def number(pattern):
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    symbol = re.search(r"\.visible \.entry (\w+)", ptx)[1]
    return Binary(kernel.name, symbol, bytes(cubin), number(r"Used (\d+) registers"),
                  number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes smem"),
                  number(r"(\d+) bytes stack frame"), ".f64" in ptx, ptx)


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
    """A function that maps names in kernels to objects of the compiler, and the device functions made so far.

    Each device function is compiled once; equal ones, whoever made them, are compiled as one.
    """
    from numflow.cuda.compiler.lowering import lowered

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
    """Key of a rewired function: its code and the values that it names, numbers as they are written: 1 is not 1.0."""
    named = [(name, value) for name, value in sorted(function.__globals__.items()) if not name.startswith("__")]
    held = [("", cell.cell_contents) for cell in function.__closure__ or ()]
    return function.__code__, *((name, repr(value) if isinstance(value, int | float | tuple) else value)
                                for name, value in named + held)
