"""Operands as functions of the machine: made once for an instruction, called whenever the instruction runs.

A value is an array over all lanes, or a NumPy scalar if it is the same for all lanes (uniform): parameters, constants,
and results that depend on them alone.
"""

from collections.abc import Callable

import numpy as np

from .findings import Fault
from .parse import TYPES, Address, Immediate, Instruction, Negated, Register, Symbol, Vector

Getter = Callable    # (machine) -> value


def getter(operand, kind: str) -> Getter:
    """A function that returns the operand as a value of a type."""
    dtype = TYPES[kind]
    if isinstance(operand, Register):
        return _register(operand, dtype)
    if isinstance(operand, Negated):
        inner = _register(operand.register, np.bool_)
        return lambda machine: ~inner(machine)
    if isinstance(operand, Immediate):
        number = constant(operand.text, dtype)
        return lambda machine: number
    if isinstance(operand, Symbol):
        return lambda machine: dtype(machine.place(operand.name))
    if isinstance(operand, Vector):
        return _packed(operand, kind)
    raise Fault(f"{operand} is no value")


def _register(register: Register, dtype) -> Getter:
    if register.number < 0:
        name = register.name
        return lambda machine: _as(machine.special(name), dtype)
    number, own = register.number, TYPES[register.type]
    if own is dtype or (dtype is np.bool_ and register.type == "pred"):
        return lambda machine: machine.read(number)
    if np.dtype(own).itemsize == np.dtype(dtype).itemsize:
        return lambda machine: machine.read(number).view(dtype)
    return lambda machine: machine.read(number).astype(dtype)     # the lower part of a wider one


def _as(value, dtype):
    return value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value.astype(dtype)


def _packed(operand: Vector, kind: str) -> Getter:
    """{low, high} packed into one value."""
    size = np.dtype(TYPES[kind]).itemsize
    parts = [getter(part, f"b{8 * size // len(operand.parts)}") for part in operand.parts]

    def get(machine):
        columns = np.broadcast_arrays(*(part(machine) for part in parts), np.zeros(machine.n, np.bool_))[:-1]
        return np.ascontiguousarray(np.stack(columns, 1)).view(TYPES[kind]).ravel()

    return get


def wide(operand, kind: str) -> Getter:
    """As `getter`, but the value is always a contiguous array over all lanes."""
    get = getter(operand, kind)
    return lambda machine: machine.spread(get(machine))


def address(operand: Address) -> Getter:
    """A function that returns the address as int64, an array over all lanes or a scalar."""
    offset, base = operand.offset, operand.base
    if isinstance(base, Register):
        get = getter(base, "u64" if base.type in ("u64", "s64", "b64") else "u32")
        return lambda machine: get(machine).astype(np.int64) + offset
    if isinstance(base, Symbol):
        return lambda machine: np.int64(machine.place(base.name) + offset)
    number = np.int64(int(base.text, 0) + offset)
    return lambda machine: number


def mask_of(step: Instruction) -> Getter | None:
    """The guard predicate of an instruction as a function; None without a guard."""
    return None if step.guard is None else getter(step.guard, "pred")


def constant(text: str, dtype):
    """The value of an immediate operand."""
    if text[:2] in ("0f", "0F"):
        bits = np.uint32(int(text[2:], 16))
        return bits.view(np.float32) if dtype is np.float32 else dtype(bits)
    if text[:2] in ("0d", "0D"):
        number = np.uint64(int(text[2:], 16)).view(np.float64)
        return number if dtype is np.float64 else dtype(number)
    value = int(text.rstrip("U"), 0)
    if dtype is np.bool_ or dtype in (np.float32, np.float64):
        return dtype(value)
    size = np.dtype(dtype).itemsize
    return np.array(value & ((1 << 8 * size) - 1), f"u{size}").view(dtype)[()]
