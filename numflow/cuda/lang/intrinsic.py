"""Intrinsics, each with a Python twin for the simulator and a lowering for the compiler; declarations of memory."""

from collections.abc import Callable
from dataclasses import dataclass

from numflow.cuda.lang.scalar import Scalar, f32
from numflow.cuda.lang.simulator import NOW, SimulatedPointer

ALL = {}
NAN = float("nan")
NEWER = "// from sm_90: "          # prefix of an instruction that older GPUs do not have (compiler/dependent.py)
WAIT = "griddepcontrol.wait;"      # wait for all earlier kernels


class Intrinsic:
    """A function that kernels call. how: its lowering: ("asm", results, arguments, text, flags) or (name of a
    builtin,).
    """

    def __init__(self, name: str, twin: Callable, how: tuple):
        self.name, self.twin, self.how = name, twin, how
        self.__name__, self.__doc__ = name, twin.__doc__

    def __call__(self, *args):
        return self.twin(*args)

    def __repr__(self) -> str:
        return f"<intrinsic {self.name}>"


def asm(results: tuple, arguments: tuple, text: str, *flags: str) -> Callable:
    """A decorator of a Python twin: an intrinsic that is inline PTX.

    flags: "effect" (must not be moved or removed), "memory" (accesses memory), "convergent" (all lanes of a warp
    execute it together).
    """
    return _register("asm", results, arguments, text, flags)


def builtin(name: str) -> Callable:
    """A decorator of a Python twin: an intrinsic with a lowering of its own, by this name (lowering_builtin.py)."""
    return _register(name)


def _register(*how):
    def wrap(twin):
        ALL[twin.__name__] = Intrinsic(twin.__name__, twin, how)
        return ALL[twin.__name__]
    return wrap


class SharedArray:
    """A declaration of shared memory: `count` values. A call in a kernel returns the pointer to it.

    alignment: in bytes. dynamic: dynamic shared memory, which the launch allocates and which may exceed 48 KB. A kernel
    has at most one such array, and Kernel.dynamic is its size in bytes.
    """

    def __init__(self, scalar: Scalar, count: int, alignment: int = 16, dynamic: bool = False):
        self.scalar, self.count, self.alignment, self.dynamic = scalar, count, alignment, dynamic

    def __call__(self) -> SimulatedPointer:
        return NOW.thread.block.memory(self, self.scalar, self.count)


@dataclass(frozen=True)
class LocalArray:
    """A declaration of a thread's array of `count` values. It stays in registers if all indices are constants after
    loops are unrolled."""

    scalar: Scalar
    count: int

    def __call__(self) -> list:
        return [f32(NAN) if self.scalar is f32 else 0xBAD] * self.count
