"""An emulated Arm processor for kernels: Numba compiles for it, and an emulator runs the machine code.

`python -m tests.cpu.arm module arguments ...` runs a module as if on Arm. Numba and LLVM compile all kernels for the
processor that NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name. Calls of kernels go to Unicorn, which emulates AArch64 with
all its extensions. The emulated processor sees the memory of this process at the same addresses, so arguments need no
translation. Atomic operations are not atomic between emulated cores, so programs should have one thread.
"""

import ctypes
import math
import os
import platform
import runpy
import struct
import sys
import threading
from importlib import import_module

import numpy as np
import unicorn
from llvmlite import binding
from unicorn import arm64_const as arm

TRIPLE = "aarch64-unknown-linux-gnu"
_CHUNK = 1 << 20   # bytes mapped at a time; a multiple of the page
_STACK = 4 << 20
_RETURN = b"\xc0\x03\x5f\xd6"  # ret
_REGISTERS = [getattr(arm, f"UC_ARM64_REG_X{i}") for i in range(8)]


class Emulator:
    """One emulated core."""

    def __init__(self):
        self._core = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._core.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        self._core.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self._map)
        self._stack = np.zeros(_STACK, np.uint8)
        self._core.hook_add(unicorn.UC_HOOK_CODE, self._system, None, SYSTEM.begin, SYSTEM.end - 4)

    def call(self, address: int, *arguments: int) -> None:
        """Call a function of integers."""
        core, begin = self._core, self._stack.ctypes.data
        for register, value in zip(_REGISTERS, arguments):
            core.reg_write(register, value)
        core.reg_write(arm.UC_ARM64_REG_SP, (begin + _STACK) & -64)
        core.reg_write(arm.UC_ARM64_REG_LR, SYSTEM.end)
        core.emu_start(address, SYSTEM.end)

    def _map(self, core, access, address, size, value, data) -> bool:
        """Map memory on first access; an access may end in the next chunk."""
        for begin in {at & -_CHUNK for at in (address, address + size - 1)}:
            if begin < _CHUNK:
                return False
            core.mem_map_ptr(begin, _CHUNK, unicorn.UC_PROT_ALL, begin)
        return True

    def _system(self, core, address, size, data) -> None:
        """Do the work of a system function before its `ret`."""
        vector = core.reg_read(arm.UC_ARM64_REG_D0).to_bytes(8, "little")
        result = SYSTEM.functions[address](vector, *(core.reg_read(register) for register in _REGISTERS))
        if isinstance(result, bytes):
            core.reg_write(arm.UC_ARM64_REG_D0, int.from_bytes(result, "little"))
        elif result is not None:
            core.reg_write(_REGISTERS[0], result)


class System:
    """Functions that kernels call by name: each is a `ret` at an address of its own."""

    def __init__(self):
        self._code = np.frombuffer(_RETURN * 4096, np.uint8).copy()
        self.begin, self.functions = self._code.ctypes.data, {}
        self.end = self.begin + len(self._code) - 4

    def add(self, name: str, function) -> None:
        """`function` gets the registers d0, x0, x1 ... x7; it returns bytes for d0, or a value for x0, or None."""
        address = self.begin + 4 * len(self.functions)
        self.functions[address] = function
        binding.add_symbol(name, address)


SYSTEM = System()
_emulators = threading.local()


def function(address: int):
    """A callable for the compiled function at an address."""
    def call(*arguments: int) -> None:
        if not hasattr(_emulators, "of_thread"):
            _emulators.of_thread = Emulator()
        _emulators.of_thread.call(address, *arguments)
    return call


def _of_number(function, kind):
    """A function of the C library of one float or double, in the form that System.add takes."""
    function.argtypes, function.restype = [kind], kind
    return lambda vector, *_: bytes(kind(function(kind.from_buffer_copy(vector))))


def _sincos(angle: bytes, sine: int, cosine: int, *_: int) -> None:
    for address, function in ((sine, math.sin), (cosine, math.cos)):
        ctypes.c_double.from_address(address).value = function(*struct.unpack("<d", angle))


def pretend() -> None:
    """Make this process compile for Arm, and run the compiled code in the emulator."""
    platform.machine = lambda: "aarch64"
    os.environ["NUMFLOW_COMPILERS"] = "1"  # other processes would compile for this machine
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    for module in (binding, binding.targets):
        module.get_process_triple = module.get_default_triple = lambda: TRIPLE
    # has functions of the host, which are replaced below for emulated code
    import_module("numflow.cpu.runtime.compiler")
    from numflow.cpu.runtime.kernel import Kernel
    from numflow.cpu.runtime.symbols import NAMED

    library = ctypes.CDLL("libm.so.6")  # except the C library, which the module itself needs
    for name in ("cos", "sin", "exp"):
        SYSTEM.add(name, _of_number(getattr(library, name), ctypes.c_double))
        SYSTEM.add(f"{name}f", _of_number(getattr(library, f"{name}f"), ctypes.c_float))
    SYSTEM.add("sincos", _sincos)
    for name, pointer in ({name: getattr(library, name) for name in ("memcpy", "memset", "memmove")} | NAMED).items():
        fn = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 9)(ctypes.cast(pointer, ctypes.c_void_p).value)
        SYSTEM.add(name, lambda _, *integers, fn=fn: fn(*integers))
    Kernel.prototype = staticmethod(function)


if __name__ == "__main__":
    pretend()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # a normal exit would stop workers by kernels whose code is freed already
