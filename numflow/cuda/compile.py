"""From a kernel to machine code for one compute capability, with the resources it takes; no GPU is needed for it."""

import re
from dataclasses import dataclass, field

from numflow.cuda.compat import compiler, core, target
from numflow.cuda.kernel import Kernel, for_numba
from numflow.errors import DeviceError


@dataclass(frozen=True)
class Binary:
    """Machine code of a kernel. registers: per thread; spills: bytes stored; shared: bytes per block; symbol: its name
    in the code. ptx: the assembly it was made from ("" if it comes from the disk)."""

    name: str
    symbol: str
    cubin: bytes = field(repr=False)
    registers: int
    spills: int
    shared: int
    stack: int
    ptx: str = field(repr=False, default="")


def compile_kernel(kernel: Kernel, capability: tuple[int, int]) -> Binary:
    """Compile for a compute capability such as (9, 0).

    Raises:
        DeviceError: the compiler is not installed, or refuses the kernel.
    """
    ptx = to_ptx(kernel, capability)
    c = core()
    arch = f"sm_{capability[0]}{capability[1]}"
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
                  number(r"(\d+) bytes stack frame"), ptx)


def to_ptx(kernel: Kernel, capability: tuple[int, int]) -> str:
    """The kernel's PTX."""
    from numflow.cuda.lowering import lowered, numba_type

    cuda = compiler().cuda

    def convert(thing):
        if callable(thing) and hasattr(thing, "__code__"):
            return cuda.jit(device=True, fastmath=not kernel.exact, forceinline=True)(thing)
        return lowered(thing)

    bounds = (kernel.threads, kernel.blocks) if kernel.blocks else kernel.threads
    with target(capability):
        signature = compiler().types.void(*map(numba_type, kernel.signature))
        ptx, _ = cuda.compile(for_numba(kernel.body, convert), signature,
                              device=False, abi="numba", cc=capability, fastmath=not kernel.exact, output="ptx",
                              launch_bounds=bounds)
    return ptx
