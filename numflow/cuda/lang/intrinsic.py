"""Intrinsics: each a twin in Python and its making by the compiler; memory that kernels declare."""

from collections.abc import Callable
from dataclasses import dataclass

from numflow.cuda.lang.scalar import Scalar, f32
from numflow.cuda.lang.simulator import NOW, SimulatedPointer

ALL = {}
NAN = float("nan")
NEWER = "// from sm_90: "          # in front of an instruction that older cards do not have (compiler/dependent.py)
WAIT = "griddepcontrol.wait;"      # for all kernels before this one


class Intrinsic:
    """A function of kernels. how: what lowering.py is told: ("asm", results, arguments, text, flags) or (kind, ...)."""

    def __init__(self, name: str, twin: Callable, how: tuple):
        self.name, self.twin, self.how = name, twin, how
        self.__name__, self.__doc__ = name, twin.__doc__

    def __call__(self, *args):
        return self.twin(*args)

    def __repr__(self) -> str:
        return f"<intrinsic {self.name}>"


def asm(results: tuple, arguments: tuple, text: str, *flags: str) -> Callable:
    """The decorated twin as an instruction. flags: "effect" (not to be moved or dropped), "memory" (touches it),
    "convergent" (all lanes of a warp together)."""
    return _register("asm", results, arguments, text, flags)


def builtin(name: str) -> Callable:
    """The decorated twin as a special lowering of this name."""
    return _register(name)


def _register(*how):
    def wrap(twin):
        ALL[twin.__name__] = Intrinsic(twin.__name__, twin, how)
        return ALL[twin.__name__]
    return wrap


class SharedArray:
    """Shared memory of a block: `count` values. Called in a kernel, the pointer to it.

    alignment: in bytes. dynamic: given at the launch, which may be more than the 48 KB that a compiler gives; at most
    one of a kernel is, whose `dynamic` is its bytes.
    """

    def __init__(self, scalar: Scalar, count: int, alignment: int = 16, dynamic: bool = False):
        self.scalar, self.count, self.alignment, self.dynamic = scalar, count, alignment, dynamic

    def __call__(self) -> SimulatedPointer:
        return NOW.thread.block.memory(self, self.scalar, self.count)


@dataclass(frozen=True)
class LocalArray:
    """Registers of a thread: `count` values, to be indexed by numbers known once loops are unrolled."""

    scalar: Scalar
    count: int

    def __call__(self) -> list:
        return [f32(NAN) if self.scalar is f32 else 0xBAD] * self.count
