"""An emulated x86 processor with AVX-512 or AVX-VNNI for kernels: Numba compiles for it, and an emulator runs the code.

`python -m tests.cpu.x86 avx512|avxvnni module arguments ...` runs a module as if on such a processor. Numba and LLVM
compile all kernels for it. Calls of kernels go to Bochs (package bochscpu-python), which has every instruction of a
Sapphire Rapids and of an Arrow Lake. The emulated processor sees the memory of this process at the same addresses, so
arguments and functions of the C library need no translation. Threads of a program run in turn, kernel by kernel.
Devices that exchange values within a kernel are not supported.
"""

import ctypes
import os
import runpy
import sys
import threading
from pathlib import Path

import numpy as np

# By instruction set: the processor of LLVM and of Bochs, and the features that LLVM may use.
_V3 = ("+64bit,+cx8,+cmov,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,"
       "+lzcnt,+movbe")
_V4 = _V3 + ",+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd,+avx512vnni,+avx512vbmi,+avx512vbmi2,+avx512ifma"
PROCESSORS = {
    "avx512": ("sapphirerapids", "_Z28create_sapphire_rapids_cpuidP8BX_CPU_C", _V4 + ",+avx512bf16"),
    "avxvnni": ("alderlake", "_Z23create_arrow_lake_cpuidP8BX_CPU_C", _V3 + ",+avxvnni")}
_DEFAULT = "_Z23create_corei3_cnl_cpuidP8BX_CPU_C"  # the package's default, a Cannon Lake without VNNI
_WITHOUT = ("AVX512F", "AVX512VL", "AVX512BW", "AVX512DQ", "AVX512CD")  # names of the C library
_PAGE, _HUGE, _STACK = 1 << 12, 1 << 30, 1 << 20
_PRESENT, _LARGE = 7, 128  # bits of an entry of a page table: present, writable, of the user; a page of 1 GB
_HLT, _GET_FS = 0xF4, 0x1003
_REGISTERS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")


class Emulator:
    """One emulated core in 64-bit mode, with this process's memory as pages of 1 GB."""

    def __init__(self):
        self._session = bochscpu.Session()
        self._session.missing_page_handler = self._map
        self._hook = bochscpu.Hook()
        self._hook.hlt, self._hook.exception = lambda session, core: session.stop(), self._fault
        self._at: list[int] = []                # host address of each huge page of the core
        self._tables: list[np.ndarray] = []     # one page each, from page 1 of the core on
        self._directories: dict[int, np.ndarray] = {}
        self._root, self._root_at = self._table()
        self._stack, self._end = _aligned(_STACK), _aligned(_PAGE)
        self._end[:] = _HLT
        self._error = ""

    def call(self, address: int, *arguments: int) -> None:
        """Call a function of integers."""
        self._see_memory()
        state = bochscpu.State()
        bochscpu.cpu.set_long_mode(state)
        state.cr4 |= 1 << 9 | 1 << 10 | 1 << 18   # system settings: SSE, its exceptions, XSAVE
        state.cr3, state.xcr0, state.mxcsr, state.mxcsr_mask, state.rflags = self._root_at, 0xE7, 0x1F80, 0xFFBF, 2
        state.cs = _segment(0x10, 0xA09B)
        for name in ("ds", "es", "ss", "gs"):
            setattr(state, name, _segment(0x18, 0xC093))
        state.fs = _segment(0x18, 0xC093, _thread_base())
        for register, value in zip(_REGISTERS, arguments):
            setattr(state, register, value & (1 << 64) - 1)
        stack = (self._stack.ctypes.data + _STACK - _PAGE & -64) - 8
        ctypes.c_uint64.from_address(stack).value = self._end.ctypes.data
        state.rsp, state.rip = stack, address
        self._session.cpu.state, self._error = state, ""
        self._session.run([self._hook])
        if self._error:
            raise RuntimeError(self._error)

    def _fault(self, session, core, vector, code) -> None:
        self._error = f"exception {vector} at {session.cpu.rip:#x}, of address {session.cpu.cr2:#x}"
        session.stop()

    def _table(self) -> tuple[np.ndarray, int]:
        self._tables.append(_aligned(_PAGE))
        return self._tables[-1].view(np.uint64), _PAGE * len(self._tables)

    def _see_memory(self) -> None:
        """Map a huge page of the core wherever this process has memory now."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            for at in range(begin & -_HUGE, end, _HUGE):
                if at not in self._at and at < 1 << 47:
                    self._add(at)

    def _add(self, at: int) -> None:
        self._at.append(at)
        directory, entry = at >> 39, at >> 30 & 511
        if directory not in self._directories:
            self._directories[directory], where = self._table()
            self._root[directory] = where | _PRESENT
        self._directories[directory][entry] = len(self._at) * _HUGE | _PRESENT | _LARGE

    def _map(self, address: int) -> None:
        """Return the host address of a page of the core, on its first access."""
        page = address & -_PAGE
        huge, inside = divmod(page, _HUGE)
        here = self._at[huge - 1] + inside if huge else self._tables[inside // _PAGE - 1].ctypes.data
        bochscpu.memory.page_insert(page, here)


def _aligned(size: int) -> np.ndarray:
    """Zeros aligned to a page."""
    raw = np.zeros(size + _PAGE, np.uint8)
    return raw[-raw.ctypes.data % _PAGE:][:size]


def _segment(selector: int, attributes: int, base: int = 0):
    segment = bochscpu.Segment()
    segment.present, segment.selector, segment.attr, segment.base = True, selector, attributes, base
    segment.limit = 0xFFFFFFFF
    return segment


def _thread_base() -> int:
    """Address of this thread's thread-local variables, which the C library reads."""
    base = ctypes.c_uint64()
    ctypes.CDLL(None).arch_prctl(_GET_FS, ctypes.byref(base))
    return base.value


_emulators = threading.local()


def function(address: int):
    """A callable for the compiled function at an address."""
    def call(*arguments: int) -> None:
        if not hasattr(_emulators, "of_thread"):
            _emulators.of_thread = Emulator()
        _emulators.of_thread.call(address, *arguments)
    return call


def _no_workers(threads, n_threads: int) -> None:
    threads.n_threads, threads.address, threads._pid = n_threads, 0, os.getpid()


def _in_turn(threads, table: np.ndarray, rows: int, fewer: bool = False) -> None:
    """Threads.run with one thread after the other."""
    for address, arguments, _ in table[:rows].tolist():
        for thread in range(threads.n_threads):
            function(address)(arguments, thread, threads.n_threads)


def _pairs(even, odd):
    """Two f32x16 as pairs of bfloat16, without the 512-bit VCVTNE2PS2BF16.

    Bochs gives both halves of its result from the second source. Intel's manual gives the upper half from the first.
    """
    from numflow.cpu.simd.bfloat16 import pairs_of_columns

    even, odd = (pairs_of_columns(row).as_("u16", 16) for row in (even, odd))
    return even.zipped(odd).as_("i32", 16)


def _choose(model: str) -> None:
    """Make Bochs create this processor model: patch its default model's function with a jump to it."""
    library, memory = ctypes.CDLL(bochscpu._bochscpu.__file__), ctypes.CDLL(None)
    own, wanted = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in (_DEFAULT, model))
    jump = b"\x48\xb8" + wanted.to_bytes(8, "little") + b"\xff\xe0"  # mov rax, wanted; jmp rax
    memory.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if memory.mprotect(own & -_PAGE, 2 * _PAGE, 7):
        raise OSError("the emulator's code cannot be changed")
    ctypes.memmove(own, jump, len(jump))


def pretend(isa: str) -> None:
    """Make this process compile for a processor, and run the compiled code in the emulator."""
    global bochscpu
    cpu, model, features = PROCESSORS[isa]
    os.environ |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features,
                   "NUMFLOW_COMPILERS": "1"}  # other processes know nothing of `_pairs`
    # The package refers to functions of a later C library, which it does not call: resolve symbols lazily.
    # Emulated code must not resolve symbols: the loader would save more registers than it has memory for.
    usual = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    import bochscpu
    import bochscpu.cpu
    import bochscpu.memory
    sys.setdlopenflags(usual)

    from numflow.cpu.runtime.kernel import Kernel
    from numflow.cpu.runtime.threads import Threads
    from numflow.cpu.simd import bfloat16

    _choose(model)
    if isa == "avx512":
        bfloat16._pairs = _pairs
    Kernel.prototype = staticmethod(function)
    Threads.__init__, Threads.run, Threads.close = _no_workers, _in_turn, lambda threads: None


def _without_avx512() -> None:
    """Restart this process with C library functions that do not need AVX-512, in case the host has it."""
    tunables = "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in _WITHOUT)
    if os.environ.get("GLIBC_TUNABLES") != tunables:
        os.environ["GLIBC_TUNABLES"] = tunables
        os.execv(sys.executable, [sys.executable, "-m", "tests.cpu.x86", *sys.argv[1:]])


if __name__ == "__main__":
    if sys.argv[1] == "avxvnni":
        _without_avx512()
    pretend(sys.argv[1])
    del sys.argv[:2]
    status = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    sys.stdout.flush()
    os._exit(status)  # a normal exit would free parts of the emulator before the objects that use them
