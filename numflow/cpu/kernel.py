"""What a CPU kernel is: a C function `fn(args, thread, n_threads)`, and how it reads its arguments.

`args` is the address of an int64 array. By convention args[0] is the address of the batch header (below); the rest
is what the binder of the op put there: addresses, strides, sizes, and floats as bit patterns:

    @kernel
    def _scale(args, thread, n_threads):
        rows = i64(i64(args, 0), i64(args, 1))          # a field of the header
        x, factor = f32_ptr(i64(args, 2)), f64(args, 3)

    Call.of(step, _scale, ctx.header, ctx.rows(view), address, 0.5)

A kernel is compiled on its first use, cached on disk, and touches nothing but memory it is given the address of.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from numflow import kernel_cache
from numflow.cpu.interrupt import held_back
from numflow.ops import Step

# Fields of the batch header, an int64 array: counts of the batch, then addresses of int32 arrays.
N_TOKENS, N_LOGIT_ROWS, N_ROUTES, N_SEQUENCES = 0, 1, 2, 3
TOKENS = 4           # i32 [T]
POSITIONS = 5        # i32 [T]
TYPES = 6            # i32 [T], zeros where the batch has none
SEQUENCE_OF = 7      # i32 [T], sequence of each row
STARTS = 8           # i32 [B + 1]
LENGTHS = 9          # i32 [B], keys of each sequence once the batch is written: last position + 1
BLOCKS = 10          # i32 [B, BLOCKS_STRIDE]
BLOCKS_STRIDE = 11   # elements from one row of BLOCKS to the next
LOGIT_ROWS = 12      # i32 [R]
CROSS_BLOCKS = 13    # i32 [B, CROSS_STRIDE]
CROSS_STRIDE = 14
CROSS_LENGTHS = 15   # i32 [B]
HEADER_FIELDS = 16

# The header field that counts the rows of a buffer, by Buffer.rows.
ROW_FIELD = {"tokens": N_TOKENS, "logits": N_LOGIT_ROWS, "routes": N_ROUTES}

# No relaxed float rules: a kernel computes what it says, so that a vector body, its tail and a tile of any height agree
# bit for bit. Where a * b + c should be fused, the kernel calls `fma`.
FASTMATH = False

Argument = int | float | bool | np.ndarray

_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_SIGNATURE = types.void(types.int64, types.int64, types.int64)
_lock = threading.RLock()

# Called as listener(kernel name, seconds, loaded from disk) after each kernel has been made ready.
on_compile: list[Callable[[str, float, bool], None]] = []
compile_seconds = {"compiled": 0.0, "loaded": 0.0}


class Kernel:
    """A module-level function `fn(args, thread, n_threads)` that becomes a C function when `address` is first read."""

    def __init__(self, fn: Callable[[int, int, int], None]):
        self.fn, self.name = fn, fn.__name__.lstrip("_")
        self._compiled: Any = None
        self._function: Any = None
        self.__doc__, self.__module__ = fn.__doc__, fn.__module__

    @property
    def location(self) -> str:
        """Where to read it: "numflow/cpu/norm.py:12"."""
        path, project = Path(self.fn.__code__.co_filename), Path(__file__).parent.parent.parent
        name = path.relative_to(project).as_posix() if project in path.parents else path.name
        return f"{name}:{self.fn.__code__.co_firstlineno}"

    @property
    def address(self) -> int:
        """Address of the C function; compiles it or loads it from the cache on first use."""
        self.prepare()
        return self._compiled.address

    def __call__(self, args: int, thread: int = 0, n_threads: int = 1) -> None:
        """Run it once, outside the GIL; `args` is an address."""
        self.prepare()
        self._function(args, thread, n_threads)

    def prepare(self) -> None:
        """Compile it or load it from the cache, unless that has been done."""
        if self._compiled is None:
            with _lock, held_back():
                if self._compiled is None:
                    compiled = self._compile()
                    self._function = _PROTOTYPE(compiled.address)
                    self._compiled = compiled

    def _compile(self) -> Any:
        begin, config = time.perf_counter(), numba.config
        saved, config.CACHE_DIR = config.CACHE_DIR, str(kernel_cache.folder(self.fn.__module__))
        try:
            compiled = numba.cfunc(_SIGNATURE, cache=True, fastmath=FASTMATH, error_model="numpy")(self.fn)
        finally:
            config.CACHE_DIR = saved
        seconds, loaded = time.perf_counter() - begin, compiled.cache_hits > 0
        compile_seconds["loaded" if loaded else "compiled"] += seconds
        if not loaded:
            kernel_cache.prune()
        for listener in on_compile:
            listener(self.name, seconds, loaded)
        return compiled


def kernel(fn: Callable[[int, int, int], None]) -> Kernel:
    """Decorator that makes a module-level function a Kernel; the helpers it calls are module globals."""
    return Kernel(fn)


@dataclass(frozen=True)
class Call:
    """A kernel bound to its arguments. `keep` holds every array whose address stands in `args`."""

    step: Step | None
    kernel: Kernel
    args: np.ndarray
    keep: tuple = field(default=(), repr=False)

    @classmethod
    def of(cls, step: Step | None, kernel: Kernel, *values: Argument, keep: tuple = ()) -> "Call":
        """A call with `values` as arguments: int as is, float as float64 bits (read with f64), array as its address."""
        args = np.array([_word(value) for value in values], np.int64)
        return cls(step, kernel, args, (*keep, *(v for v in values if isinstance(v, np.ndarray))))

    def __call__(self, thread: int = 0, n_threads: int = 1) -> None:
        self.kernel(self.args.ctypes.data, thread, n_threads)


def _word(value: Argument) -> int:
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(f"a kernel takes C-contiguous arrays, got strides {value.strides} for shape {value.shape}")
        return value.ctypes.data
    if isinstance(value, float | np.floating):
        return int(np.float64(value).view(np.int64))
    return int(value)


# Memory, from inside kernels. An address is an int64; p = f32_ptr(address) is indexed like an array, unchecked.

def _pointer(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def pointer(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], llvm_type.as_pointer())
        return types.CPointer(numba_type)(types.int64), codegen
    return pointer


f32_ptr = _pointer(types.float32, ir.FloatType())
i64_ptr = _pointer(types.int64, ir.IntType(64))
i32_ptr = _pointer(types.int32, ir.IntType(32))
u16_ptr = _pointer(types.uint16, ir.IntType(16))
u8_ptr = _pointer(types.uint8, ir.IntType(8))
i8_ptr = _pointer(types.int8, ir.IntType(8))


def _argument(numba_type: types.Type, llvm_type: ir.Type) -> Any:
    @intrinsic
    def argument(typingctx, args_address, index):
        def codegen(context, builder, signature, args):
            base = builder.inttoptr(args[0], llvm_type.as_pointer())
            return builder.load(builder.gep(base, [args[1]]))
        return numba_type(types.int64, types.int64), codegen
    return argument


i64 = _argument(types.int64, ir.IntType(64))
f64 = _argument(types.float64, ir.DoubleType())


def _bitcast(source: types.Type, target: types.Type, llvm_target: ir.Type) -> Any:
    @intrinsic
    def bitcast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_target)
        return target(source), codegen
    return bitcast


f32_bits = _bitcast(types.float32, types.int32, ir.IntType(32))
f32_from_bits = _bitcast(types.int32, types.float32, ir.FloatType())


@numba.njit(inline="always")
def share(n, thread, n_threads):
    """begin, end of this thread's even share of n items; the shares of all threads follow each other."""
    return n * thread // n_threads, n * (thread + 1) // n_threads
