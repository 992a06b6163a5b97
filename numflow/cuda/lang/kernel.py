"""Kernels and device functions: Python functions that call intrinsics. The simulator runs them; GPUs compile them.

    @kernel()
    def _scale(y: f32.ptr, x: f32.ptr, count: u32, factor: f32):
        i = block_x() * 256 + thread_index()
        if i < count:
            y[i] = x[i] * factor

Annotations are the types of parameters; a group of parameters can be one parameter (parameters.py). A function that
creates specialised kernels has the specialisation as its arguments, which the kernel's body closes over; each needs its
own `name`. `device` marks functions that kernels call.
"""

import functools
import hashlib
import inspect
import types as pytypes
from collections.abc import Callable
from dataclasses import dataclass, field

from numflow.cuda.lang.intrinsic import Intrinsic, LocalArray, SharedArray
from numflow.cuda.lang.parameters import flattened, signature_of
from numflow.cuda.lang.scalar import Pointer, Scalar

HOPPER = 9, 0       # compute capability of wgmma; newer GPUs have other instructions instead
FLOAT8 = "sm_89"    # target of conversions to 8-bit floats, and of their products (mma.sync)
FLOAT8_MAJORS = 8, 12  # major compute capabilities with these products; others emulate each by two of float16
FLOAT4 = "sm_120a"  # target of conversions to 4-bit floats, and of their products with scales of blocks
FLOAT4_MAJORS = (12,)
REGISTRY: dict[str, "Kernel"] = {}
_PLAIN: dict["DeviceFunction", Callable] = {}  # device functions as the simulator calls them


class DeviceFunction:
    """A function that kernels call. In the simulator it is an ordinary call."""

    def __init__(self, body: Callable):
        self.body, self.__name__, self.__doc__ = body, body.__name__, body.__doc__

    def __call__(self, *args):
        return self.body(*args)


def device(body: Callable) -> DeviceFunction:
    """Mark a function that kernels may call."""
    return DeviceFunction(body)


@dataclass(frozen=True)
class Kernel:
    """An entry point.

    body, parameters: the body has one parameter for each field of a group (parameters.py), as in `signature`.
    threads: threads of a block. blocks: blocks that must fit on a multiprocessor, which limits registers; 0: no limit.
    exact:  IEEE-compliant arithmetic, for kernels whose results approximations would change.
    target: of the PTX: the oldest GPUs that have its instructions, or with the suffix "a" the only ones (`has`).
    majors: major compute capabilities that the kernel is for; (): all.
    dynamic: bytes of dynamic shared memory. Static shared memory is counted by the compiler.
    """

    name: str
    body: Callable = field(repr=False)
    parameters: tuple[Scalar | Pointer | type, ...] = field(repr=False)
    threads: int = 128
    blocks: int = 0
    exact: bool = False
    target: str = "sm_80"
    dynamic: int = 0
    majors: tuple[int, ...] = ()

    @functools.cached_property
    def signature(self) -> tuple[Scalar | Pointer, ...]:
        """Types of the body's parameters."""
        return signature_of(self.parameters)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether the kernel is for GPUs of this compute capability (8.0 or newer), and these have its instructions."""
        return has(self.target, capability) and (not self.majors or capability[0] in self.majors)

    def architecture(self, capability: tuple[int, int]) -> str:
        """The target of machine code for a GPU that the kernel runs on."""
        return f"sm_{capability[0]}{capability[1]}" + "a" * self.target.endswith("a")

    @functools.cached_property
    def plain(self) -> Callable:
        """The body that the simulator runs: intrinsics are replaced by their Python twins."""
        return rewired(self.body, _twin, _PLAIN)

    @property
    def location(self) -> str:
        """file:line."""
        code = self.body.__code__
        return f"{'/'.join(code.co_filename.replace(chr(92), '/').split('/')[-3:])}:{code.co_firstlineno}"


def has(target: str, capability: tuple[int, int]) -> bool:
    """Whether GPUs of a compute capability have the instructions of a target: "sm_89" means 8.9 and newer, "sm_120a"
    means 12.x."""
    number = int(target.removeprefix("sm_").removesuffix("a"))
    return capability[0] == number // 10 if target.endswith("a") else capability >= divmod(number, 10)


def has_float8(capability: tuple[int, int]) -> bool:
    """Whether mma.sync of 8-bit floats is an instruction of its own on GPUs of a compute capability."""
    return has(FLOAT8, capability) and capability[0] in FLOAT8_MAJORS


def kernel(name: str = "", threads: int = 128, blocks: int = 0, exact: bool = False,
           target: str = "sm_80", dynamic: int = 0,
           majors: tuple[int, ...] = ()) -> Callable[[Callable], Kernel]:
    """A decorator that makes a function a kernel. Parameters as in Kernel; the default name is the function's name."""
    def wrap(body):
        hints = body.__annotations__
        parameters = tuple(hints[parameter] for parameter in body.__code__.co_varnames[:body.__code__.co_argcount])
        flat = flattened(body, parameters)
        made = Kernel(name or body.__name__.lstrip("_"), flat, parameters, threads, blocks, exact, target, dynamic,
                      majors)
        found = REGISTRY.setdefault(made.name, made)  # threads of two devices may create the same one at the same time
        assert found is made or ingredients(found.body) == ingredients(flat), f"two kernels are called {made.name}"
        return found
    return wrap


def rewired(body: Callable, convert: Callable, seen: dict) -> Callable:
    """A copy of a function in which intrinsics, types and device functions are replaced, for example by the compiler's.

    convert: maps an Intrinsic, a Scalar, a memory declaration or a copied device function to its replacement.
    seen:    replacements of device functions so far; copies with the same `seen` share them.
    """

    def stand_in(value):
        if isinstance(value, DeviceFunction):
            if value not in seen:
                seen[value] = convert(rewired(value.body, convert, seen))
            return seen[value]
        if isinstance(value, Intrinsic | Scalar | SharedArray | LocalArray):
            return convert(value)
        return value

    names = _names(body.__code__)
    scope = {name: stand_in(value) for name, value in body.__globals__.items() if name in names}
    cells = tuple(pytypes.CellType(stand_in(cell.cell_contents)) for cell in body.__closure__ or ())
    copy = pytypes.FunctionType(body.__code__, {**scope, "__name__": body.__module__, "__builtins__": __builtins__},
                                body.__name__, body.__defaults__, cells)
    copy.__module__, copy.__qualname__ = body.__module__, body.__qualname__
    return copy


def _twin(thing):
    """The Python twin of an intrinsic or a scalar type, for the simulator."""
    if isinstance(thing, Intrinsic):
        return thing.twin
    return thing.convert if isinstance(thing, Scalar) else thing


def ingredients(body: Callable, known: dict[Callable, str] | None = None) -> list[str]:
    """Text that determines a function: its source, and its constants, types, intrinsics and device functions by name.

    The text is the same in every process. Functions with the same text compute the same. known: digests of device
    functions so far.
    """
    known = {} if known is None else known
    names = _names(body.__code__)
    values = {name: value for name, value in body.__globals__.items() if name in names}
    cells = zip(body.__code__.co_freevars, body.__closure__ or ())
    parts = [inspect.getsource(body)]
    for name, value in sorted((values | {name: cell.cell_contents for name, cell in cells}).items()):
        if isinstance(value, DeviceFunction):
            if value.body not in known:
                text = "\n".join(ingredients(value.body, known))
                known[value.body] = hashlib.sha256(text.encode()).hexdigest()
            parts.append(f"{name} {known[value.body]}")
        elif isinstance(value, Intrinsic):
            parts.append(f"{name} {value.how}")
        elif isinstance(value, SharedArray):
            parts.append(f"{name} SharedArray {value.scalar.name} {value.count} {value.alignment} {value.dynamic}")
        elif isinstance(value, LocalArray):
            parts.append(f"{name} LocalArray {value.scalar.name} {value.count}")
        else:
            parts.append(f"{name} {value!r}")
    return parts


def _names(code) -> set[str]:
    """The global names that a function uses."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if hasattr(c, "co_names")))
