"""CPU kernels: C functions `fn(args, thread, n_threads)`, and how they get their arguments.

`args` is the address of an int64 array. By convention args[0] is the address of the batch header (below). The binder of
the op fills in the others: addresses, strides, sizes, and floats as bit patterns:

    @kernel
    def scale(args, thread, n_threads):
        rows = i64(i64(args, 0), i64(args, 1))          # a field of the header
        x, factor = f32_ptr(i64(args, 2)), f64(args, 3)

    Call.of(step, CODE.kernel("scale"), ctx.header, ctx.rows(view), address, 0.5)

A kernel of more than 12 arguments has named slots, declared beside its binder:

    SLOTS = slots("header rows x x_stride y y_stride ...")
    i64(args, SLOTS.x_stride)                           # in the kernel
    Call.named(step, CODE.kernel("attention"), SLOTS, header=ctx.header, rows=ctx.rows(view), **ctx.strided("x", view))

Kernels that differ only in constants are stamps of a factory, a function that returns the kernel for its constants:

    def scale_by(factor):
        def kernel(args, thread, n_threads):
            ...
        return kernel

    CODE = Code("numflow.cpu.scale_kernels", stamps={"double": ("scale_by", (2,)), "treble": ("scale_by", (3,))})

A kernel is compiled on first use and cached on disk. It accesses only memory whose address it is given. Binders name
the kernels of a module (`Code`) without importing it: the compiler is imported only when a kernel must be compiled, and
never in a process whose kernels are all cached (machine_code.py).
"""

import ctypes
import re
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from numflow import kernel_cache
from numflow.cpu.runtime import code_files
from numflow.cpu.runtime.interrupt import held_back
from numflow.ops import Step, View

# Fields of the batch header, an int64 array: counts of the batch, then addresses of arrays.
N_TOKENS, N_LOGIT_ROWS, N_ROUTES, N_SEQUENCES = 0, 1, 2, 3
TOKENS = 4           # i32 [T]
POSITIONS = 5        # i32 [T]
TYPES = 6            # i32 [T], zeros if the batch has none
SEQUENCE_OF = 7      # i32 [T], sequence of each row
STARTS = 8           # i32 [B + 1]
LENGTHS = 9          # i32 [B], keys of each sequence once the batch is written: last position + 1
BLOCKS = 10          # i32 [B, BLOCKS_STRIDE]
BLOCKS_STRIDE = 11   # elements from one row of BLOCKS to the next
LOGIT_ROWS = 12      # i32 [R]
CROSS_BLOCKS = 13    # i32 [B, CROSS_STRIDE]
CROSS_STRIDE = 14
CROSS_LENGTHS = 15   # i32 [B]
FREQUENCIES = 16     # f32 [B, FREQUENCIES_STRIDE], of sequences whose rotary frequencies depend on their length
FREQUENCIES_STRIDE = 17
STATE_SLOTS = 18     # i32 [B], slots of the sequences in the memory of recurrent steps
ADAPTERS = 19        # i32 [T], the adapter of each row, -1 for none
WANTED_ADAPTERS = 20  # i32 [R]
HEADER_FIELDS = 21   # followed, for each window of the network, by the address of its block table and the stride

# Header field with the number of rows of a buffer, by Buffer.rows.
ROW_FIELD = {"tokens": N_TOKENS, "logits": N_LOGIT_ROWS, "routes": N_ROUTES}

MOST_BY_POSITION = 12  # most positional arguments; with more, a binder passes them by name


class Scratch(NamedTuple):
    """Scratch memory that steps share, as an argument.

    name: identifies the memory. written: whether the call's step writes it.
    """

    name: str
    array: np.ndarray
    written: bool = True


Argument = int | float | bool | np.ndarray | Scratch
Stamps = Mapping[str, tuple[str, tuple[str | int, ...]]]  # kernel name -> name of its factory, constants

_lock = threading.RLock()

# Called as listener(kernel name, seconds, loaded from disk) after each kernel has been made ready.
on_compile: list[Callable[[str, float, bool], None]] = []
compile_seconds = {"compiled": 0.0, "loaded": 0.0}


class Kernel:
    """A function `fn(args, thread, n_threads)` of a module, compiled to a C function when `address` is first read.

    line: first line in the module's source. fn: the function; None: imported when it must be compiled.
    name, constants: of a stamp, whose function is `function(*constants)`.
    """

    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

    def __init__(self, module: str, function: str, line: int, fn: Callable[[int, int, int], None] | None = None,
                 name: str = "", constants: tuple[str | int, ...] = ()):
        self.module, self.function, self.name, self._line = module, function, name or function.lstrip("_"), line
        self._fn, self._constants = fn, constants
        self._code: Any = None  # keeps the machine code in memory
        self._call: Any = None

    @classmethod
    def of(cls, origin: list) -> "Kernel":
        """The kernel with this `origin`."""
        module, function, line, name, constants = origin
        return cls(module, function, line, None, name, tuple(constants))

    @property
    def origin(self) -> list:
        """Module, function, line, name and constants, as JSON: the kernel for another process."""
        return [self.module, self.function, self._line, self.name, list(self._constants)]

    @property
    def ready(self) -> bool:
        """Whether the kernel is compiled or loaded."""
        return self._call is not None

    @property
    def fn(self) -> Callable[[int, int, int], None]:
        """The Python function."""
        if self._fn is None:
            attribute = getattr(import_module(self.module), self.function)
            self._fn = _named(attribute(*self._constants), self.name) if self._constants else attribute.fn
        return self._fn

    @property
    def file(self) -> str:
        """Name on disk; of a stamp, with its constants, which the module's sources do not contain."""
        return "-".join([self.function, *map(str, self._constants)]) if self._constants else self.name

    @property
    def location(self) -> str:
        """Source location: "numflow/cpu/elementwise/norm_kernels.py:12"."""
        source = kernel_cache.source_of(self.module) or Path(self.fn.__code__.co_filename)
        project = Path(__file__).parents[3]
        return f"{source.relative_to(project).as_posix() if project in source.parents else source.name}:{self._line}"

    @property
    def address(self) -> int:
        """Address of the C function; compiles it or loads it from disk on first use."""
        self.prepare()
        return self._code.address

    def __call__(self, args: int, thread: int = 0, n_threads: int = 1) -> None:
        """Run the kernel once, outside the GIL; `args` is an address."""
        self.prepare()
        self._call(args, thread, n_threads)

    def prepare(self) -> None:
        """Compile the kernel or load it from disk, unless that is done already."""
        if self._call is None:
            with _lock, held_back():
                if self._call is None:
                    self._code = self._make()
                    self._call = self.prototype(self._code.address)

    def _make(self) -> Any:
        """Load or compile the kernel; returns an object with an `address`."""
        begin = time.perf_counter()
        code = code_files.load(self.module, self.file)
        loaded = code is not None
        if code is None:
            from numflow.cpu.runtime.compiler import compile_kernel  # numba

            code, loaded = compile_kernel(self.fn, keep=not code_files.kept(self.module))
            code_files.save(self.module, self.file, code)
        seconds = time.perf_counter() - begin
        compile_seconds["loaded" if loaded else "compiled"] += seconds
        if not loaded:
            kernel_cache.prune()
        for listener in on_compile:
            listener(self.name, seconds, loaded)
        return code


def kernel(fn: Callable[[int, int, int], None]) -> Kernel:
    """Decorator that makes a function a Kernel. Helpers that it calls must be module globals."""
    return Kernel(fn.__module__, fn.__name__, fn.__code__.co_firstlineno, fn)


def _named(fn: Callable[[int, int, int], None], name: str) -> Callable[[int, int, int], None]:
    """Name a factory's function after its kernel, in symbols and in Numba's cache files."""
    fn.__name__ = fn.__qualname__ = name
    return fn


class Code:
    """The kernels of modules, found by reading their sources; a module is imported only to compile a kernel.

    stamps: kernels made by factories of these modules.
    """

    def __init__(self, *modules: str, stamps: Stamps = MappingProxyType({})):
        self.modules, self.stamps, self._kernels = modules, stamps, dict[str, Kernel]()
        self._finding = threading.Lock()

    def kernel(self, name: str) -> Kernel:
        """The kernel with this name.

        Raises:
            KeyError: there is none.
        """
        return self.kernels()[name]

    def kernels(self) -> dict[str, Kernel]:
        """All of them by name.

        Raises:
            KeyError: a stamp names a factory that no module has.
        """
        if not self._kernels:
            with self._finding:  # devices are threads: all must see the same complete dictionary
                self._kernels = self._kernels or self._found()
        return self._kernels

    def _found(self) -> dict[str, Kernel]:
        factories: dict[str, tuple[str, int]] = {}
        kernels: dict[str, Kernel] = {}
        for module in self.modules:
            for function, line, is_kernel in _functions(module):
                if is_kernel:
                    kernels[function.lstrip("_")] = Kernel(module, function, line)
                else:
                    factories[function] = module, line
        for name, (function, constants) in self.stamps.items():
            module, line = factories[function]
            kernels[name] = Kernel(module, function, line, None, name, constants)
        return kernels


def _functions(module: str) -> Iterator[tuple[str, int, bool]]:
    """Names and lines of the functions in the source of a module of numflow, and whether they are kernels."""
    source = kernel_cache.source_of(module)
    if source is None:
        raise KeyError(module)
    text = kernel_cache.read(source).decode()
    for match in _FUNCTION.finditer(text):
        yield match[2], text.count("\n", 0, match.start()) + 1, match[1] is not None


_FUNCTION = re.compile(r"^(@kernel\s+)?def (\w+)\(", re.M)


def slots(names: str) -> Any:
    """The slots of a kernel's arguments: a named tuple of positions, which are constants to compiled code."""
    fields = names.split()
    return namedtuple("Slots", fields)(*range(len(fields)))


@dataclass(frozen=True)
class Call:
    """A kernel bound to its arguments.

    keep:    arrays whose address is in `args`, kept alive.
    scratch: arguments that are memory shared with other steps.
    joined:  whether no barrier is needed before it: each thread may continue from the step's previous call.
    makes:   (view, kind) of the operand that it makes. The call is omitted while that operand is valid, until a step
             writes the view's columns.
    """

    step: Step | None
    kernel: Kernel
    args: np.ndarray
    keep: tuple = field(default=(), repr=False)
    joined: bool = False
    scratch: tuple[Scratch, ...] = field(default=(), repr=False)
    makes: tuple[View, int] | None = None

    @classmethod
    def named(cls, step: Step | None, kernel: Kernel, slots: Any, /, *, keep: tuple = (), joined: bool = False,
              **values: Argument) -> "Call":
        """A call with a value for each of the kernel's slots.

        Raises:
            TypeError: slots without a value, or values without a slot.
        """
        missing, unknown = set(slots._fields) - set(values), set(values) - set(slots._fields)
        if missing or unknown:
            raise TypeError(f"kernel {kernel.name}: " + "; ".join(
                f"{problem} {', '.join(sorted(names))}" for problem, names in
                (("no value for", missing), ("no slot", unknown)) if names))
        return cls._made(step, kernel, [values[name] for name in slots._fields], keep, joined)

    @classmethod
    def of(cls, step: Step | None, kernel: Kernel, *values: Argument, keep: tuple = (), joined: bool = False) -> "Call":
        """A call with `values` as arguments: int as is, float as float64 bits (read with f64), array as its address.

        Raises:
            TypeError: there are more than MOST_BY_POSITION.
        """
        if len(values) > MOST_BY_POSITION:
            raise TypeError(f"kernel {kernel.name}: {len(values)} arguments by position; more than {MOST_BY_POSITION} "
                            "are given by name")
        return cls._made(step, kernel, values, keep, joined)

    @classmethod
    def _made(cls, step: Step | None, kernel: Kernel, values: Sequence[Argument], keep: tuple, joined: bool) -> "Call":
        scratch = tuple(value for value in values if isinstance(value, Scratch))
        unwrapped = [value.array if isinstance(value, Scratch) else value for value in values]
        args = np.array([_word(value) for value in unwrapped], np.int64)
        return cls(step, kernel, args, (*keep, *(v for v in unwrapped if isinstance(v, np.ndarray))), joined, scratch)

    def __call__(self, thread: int = 0, n_threads: int = 1) -> None:
        self.kernel(self.args.ctypes.data, thread, n_threads)


def _word(value: int | float | bool | np.ndarray) -> int:
    """An argument as int64: an array's address, the bits of a float64, or an integer."""
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError(f"a kernel takes C-contiguous arrays, got strides {value.strides} for shape {value.shape}")
        return value.ctypes.data
    if isinstance(value, float | np.floating):
        return int(np.float64(value).view(np.int64))
    return int(value)
