"""Instructions that compute one value: binder(instruction) -> function(machine) -> value of the first operand.

A binder decodes the instruction once. The function that it returns computes the values of all lanes; values of inactive
lanes are discarded.
"""

import numpy as np

from .operands import getter, wide
from .parse import TYPES

VALUES = {}
U32, U64, F32 = np.uint32, np.uint64, np.float32
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
# Correct bits of approximate instructions, relative to the result (PTX ISA, page of the instruction). ABSOLUTE: those
# whose error is absolute for results below 1.
APPROXIMATE = {"tanh": 11, "ex2": 22, "lg2": 22, "rsqrt": 22, "sqrt": 23, "rcp": 23, "div": 22, "sin": 20, "cos": 20}
ABSOLUTE = {"lg2", "sin", "cos"}


def value(*names):
    """A decorator that enters a binder into the table VALUES for these opcodes."""
    return lambda binder: VALUES.update(dict.fromkeys(names, binder)) or binder


def sources(step, kind: str = "") -> list:
    """Getters of all operands after the first."""
    return [getter(operand, kind or step.type) for operand in step.operands[1:]]


def two(step, function):
    """Apply a function to two operands of the instruction's type."""
    a, b = sources(step)
    return lambda machine: function(a(machine), b(machine))


def halves(operand):
    """A packed f16x2 operand as float16 [2 * lanes]."""
    get = wide(operand, "b32")
    return lambda machine: get(machine).view(np.float16)


def saturating(step, function):
    """Clamp the result to 0 .. 1, with NaN as 0, if the instruction has .sat."""
    if "sat" not in step.parts:
        return function
    return lambda machine: np.clip(np.nan_to_num(function(machine)), F32(0), F32(1))


@value("add", "sub", "mul")
def _arithmetic(step):
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[step.opcode]
    if step.type == "f16x2":
        a, b = map(halves, step.operands[1:])
        return lambda machine: function(a(machine), b(machine)).view(U32)
    if "wide" in step.parts:
        a, b = sources(step)
        dtype = TYPES[WIDER[step.type]]
        return lambda machine: a(machine).astype(dtype) * b(machine).astype(dtype)
    if "hi" in step.parts:
        return two(step, lambda a, b: upper(step.type, a, b))
    if step.opcode != "mul" and "cc" in step.parts:
        return _with_carry(step)
    return saturating(step, two(step, function))


@value("addc", "subc")
def _with_carry(step):
    a, b = sources(step, "u32")
    takes, gives, sign = step.opcode.endswith("c"), "cc" in step.parts, -1 if step.opcode.startswith("sub") else 1

    def run(machine):
        carry = np.asarray(machine.carry).astype(np.int64) if takes else 0
        total = a(machine).astype(np.int64) + sign * (b(machine).astype(np.int64) + carry)
        if gives:
            machine.carry = (total >> 32) & 1
        return (total & 0xFFFFFFFF).astype(U32)

    return run


def upper(kind: str, a, b):
    """The upper half of an integer product."""
    if kind in WIDER:
        dtype = TYPES[WIDER[kind]]
        bits = 8 * np.dtype(TYPES[kind]).itemsize
        return (a.astype(dtype) * b.astype(dtype) >> dtype(bits)).astype(TYPES[kind])
    a, b = np.broadcast_arrays(a, b)
    mask = (1 << 64) - 1
    return np.array([int(x) * int(y) >> 64 & mask for x, y in zip(a.ravel(), b.ravel())], U64).view(
        TYPES[kind]).reshape(a.shape)


@value("mad", "madc")
def _multiply_add(step):
    kind = next(part for part in step.parts if part in TYPES)
    a, b = (getter(operand, kind) for operand in step.operands[1:3])
    c = getter(step.operands[3], WIDER[kind] if "wide" in step.parts else kind)
    if "cc" in step.parts or step.opcode == "madc":
        return _carrying(step, kind, a, b, c)
    if "wide" in step.parts:
        dtype = TYPES[WIDER[kind]]
        return lambda machine: a(machine).astype(dtype) * b(machine).astype(dtype) + c(machine)
    if "hi" in step.parts:
        return lambda machine: upper(kind, a(machine), b(machine)) + c(machine)
    return lambda machine: a(machine) * b(machine) + c(machine)


def _carrying(step, kind, a, b, c):
    high, gives, takes = "hi" in step.parts, "cc" in step.parts, step.opcode == "madc"

    def run(machine):
        x, y = a(machine), b(machine)
        product = upper(kind, x, y) if high else x * y
        total = product.astype(U64) + c(machine).astype(U64) + (U64(1) * machine.carry if takes else U64(0))
        if gives:
            machine.carry = total >> U64(32)
        return (total & U64(0xFFFFFFFF)).astype(U32)

    return run


@value("fma")
def _fma(step):
    if step.type == "f16x2":
        a, b, c = map(halves, step.operands[1:])
        return lambda machine: (a(machine).astype(np.float64) * b(machine) + c(machine)).astype(np.float16).view(U32)
    a, b, c = sources(step)
    downward = "rm" in step.parts

    def run(machine):      # in float64, in which the product of two float32 is exact
        exact = a(machine).astype(np.float64) * b(machine) + c(machine)
        if step.type == "f64":
            return exact
        result = exact.astype(F32)
        return np.where(result > exact, np.nextafter(result, F32(-np.inf)), result) if downward else result

    return saturating(step, run)


@value("div")
def _divide(step):
    if step.type in ("f32", "f64"):
        return _approximated(step, two(step, np.divide))
    dtype = TYPES[step.type]

    def whole(a, b):
        b = np.where(b == 0, dtype(1), b).astype(dtype)      # inactive lanes may have 0
        if step.type[0] == "u":
            return a // b
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(dtype)

    return two(step, whole)


@value("rem")
def _remainder(step):
    dtype = TYPES[step.type]

    def rest(a, b):
        b = np.where(b == 0, dtype(1), b).astype(dtype)
        return (a % b if step.type[0] == "u" else np.fmod(a, b)).astype(dtype)

    return two(step, rest)


@value("and", "or", "xor")
def _logic(step):
    return two(step, {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[step.opcode])


@value("not", "neg", "abs", "cvta", "popc", "clz", "brev")
def _unary(step):
    (a,) = sources(step, step.type)
    if step.opcode == "cvta":
        return a
    if step.opcode == "clz":
        bits = 8 * np.dtype(TYPES[step.type]).itemsize
        get = wide(step.operands[1], step.type)
        return lambda machine: (bits - np.frexp(get(machine).astype(np.longdouble))[1]).astype(U32)
    if step.opcode == "popc":
        return lambda machine: np.bitwise_count(a(machine)).astype(U32)
    if step.opcode == "brev":
        get = wide(step.operands[1], "b32")
        return lambda machine: np.packbits(np.unpackbits(get(machine)[:, None].view(np.uint8), 1)[:, ::-1], 1,
                                           ).reshape(-1, 4).view(U32).ravel()
    function = {"not": np.invert, "neg": np.negative, "abs": np.abs}[step.opcode]
    return lambda machine: function(a(machine))


@value("min", "max")
def _extreme(step):
    least = step.opcode == "min"
    if step.type in ("f32", "f64"):
        both = np.minimum if least else np.maximum
        return two(step, both if "NaN" in step.parts else np.fmin if least else np.fmax)
    return two(step, np.minimum if least else np.maximum)


@value("copysign")
def _copysign(step):
    return two(step, lambda sign, number: np.copysign(number, sign))


@value("shl", "shr")
def _shift(step):
    dtype, signed = TYPES[step.type], step.type[0] == "s"
    bits = 8 * np.dtype(dtype).itemsize
    a, by = getter(step.operands[1], step.type), getter(step.operands[2], "u32")
    left = step.opcode == "shl"

    def run(machine):
        number, count = a(machine), by(machine)
        beyond = count >= bits
        if not np.any(beyond):
            count = count.astype(dtype)
            return number << count if left else number >> count
        count = np.where(beyond, 0, count).astype(dtype)
        if left:
            return np.where(beyond, dtype(0), number << count).astype(dtype)
        return np.where(beyond, number >> dtype(bits - 1) if signed else dtype(0), number >> count).astype(dtype)

    return run


@value("shf")
def _funnel(step):
    low, high, by = (getter(operand, "b32") for operand in step.operands[1:])
    right, wraps = "r" in step.parts, "wrap" in step.parts

    def run(machine):
        both = high(machine).astype(U64) << U64(32) | low(machine).astype(U64)
        count = by(machine).astype(U64)
        count = count & U64(31) if wraps else np.minimum(count, U64(32))
        return (both >> count if right else both << count >> U64(32)).astype(U32)

    return run


@value("bfi")
def _insert(step):
    a, into = (getter(operand, step.type) for operand in step.operands[1:3])
    place, length = (getter(operand, "u32") for operand in step.operands[3:])
    dtype = TYPES[step.type]

    def run(machine):
        at = place(machine).astype(U64)
        mask = ((U64(1) << length(machine).astype(U64)) - U64(1)) << at
        return (into(machine).astype(U64) & ~mask | a(machine).astype(U64) << at & mask).astype(dtype)

    return run


@value("bfe")
def _extract(step):
    a, dtype, signed = getter(step.operands[1], step.type), TYPES[step.type], step.type[0] == "s"
    place, length = (getter(operand, "u32") for operand in step.operands[2:])

    def run(machine):
        size = length(machine).astype(np.int64)
        field = a(machine).astype(np.int64) >> place(machine).astype(np.int64) & (1 << size) - 1
        if signed:
            field = np.where(field >> np.maximum(size - 1, 0) & 1, field - (1 << size), field)
        return field.astype(dtype)

    return run


@value("lop3")
def _lop3(step):
    operands = [getter(operand, "b32") for operand in step.operands[1:4]]
    table = int(step.operands[4].text, 0)

    def run(machine):
        a, b, c = (operand(machine) for operand in operands)
        terms = [(a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                 for row in range(8) if table >> row & 1]
        return np.bitwise_or.reduce(np.broadcast_arrays(*terms)) if terms else U32(0)

    return run


@value("prmt")
def _permute(step):
    low, high, select = (getter(operand, "b32") for operand in step.operands[1:4])

    def run(machine):
        both = low(machine).astype(U64) | high(machine).astype(U64) << U64(32)
        names, result = select(machine), U32(0)
        for place in range(4):
            name = names >> U32(4 * place) & U32(15)
            byte = (both >> (name & U32(7)).astype(U64) * U64(8)).astype(U32) & U32(255)
            if np.any(name > 7):
                byte = np.where(name > 7, np.where(byte > 127, U32(255), U32(0)), byte)
            result = result | byte << U32(8 * place)
        return result

    return run


@value("dp4a")
def _dot_of_bytes(step):
    a, b = (wide(operand, "b32") for operand in step.operands[1:3])
    kinds, c = [np.int8 if part == "s32" else np.uint8 for part in step.parts[-2:]], getter(step.operands[3], "s32")

    def run(machine):
        x, y = (get(machine).view(kind).reshape(-1, 4).astype(np.int32) for get, kind in zip((a, b), kinds))
        return np.einsum("ij,ij->i", x, y) + c(machine)

    return run


@value("selp")
def _select(step):
    a, b = (getter(operand, step.type) for operand in step.operands[1:3])
    which = getter(step.operands[3], "pred")
    return lambda machine: np.where(which(machine), a(machine), b(machine))


@value("mov")
def _move(step):
    return getter(step.operands[1], step.type)


@value("tanh", "ex2", "lg2", "rsqrt", "sqrt", "rcp", "sin", "cos")
def _special(step):
    function = {"tanh": np.tanh, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos,
                "rsqrt": lambda x: x.dtype.type(1) / np.sqrt(x), "rcp": np.reciprocal}[step.opcode]
    (a,) = sources(step)
    return _approximated(step, lambda machine: function(a(machine)))


def _approximated(step, function):
    """Round the result to the number of correct bits that is documented."""
    if step.type != "f32" or not {"approx", "full"} & set(step.parts):
        return function
    bits, absolute = APPROXIMATE[step.opcode], step.opcode in ABSOLUTE
    drop, grid = U32(24 - bits), F32(2.0**bits)

    def run(machine):
        exact = np.asarray(function(machine), F32)
        if not machine.checks.approximate:
            return exact
        raw = exact.view(U32)
        near = ((raw + (U32(1) << drop >> U32(1))) & ~((U32(1) << drop) - U32(1))).view(F32)
        near = np.where(np.isfinite(exact), near, exact)
        return np.where(np.abs(exact) < 1, np.rint(exact * grid) / grid, near) if absolute else near

    return run


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def compared(step):
    """A function that computes the predicate of setp."""
    a, b = (getter(operand, step.type) for operand in step.operands[1:3])
    how, joined = step.parts[0], next((part for part in step.parts[1:] if part in ("and", "or", "xor")), None)
    if how in ("nan", "num"):
        function = _unordered if how == "nan" else (lambda x, y: ~_unordered(x, y))
    elif step.type in ("f32", "f64") and how not in COMPARE:
        function = lambda x, y: COMPARE[how[:-1]](x, y) | _unordered(x, y)      # equ, neu, ltu, ...  # noqa: E731
    elif step.type in ("f32", "f64") and how == "ne":
        function = lambda x, y: (x != y) & ~_unordered(x, y)                    # noqa: E731
    else:
        function = COMPARE[how]
    if joined is None:
        return lambda machine: function(a(machine), b(machine))
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joined]
    other = getter(step.operands[3], "pred")
    return lambda machine: join(function(a(machine), b(machine)), other(machine))


def _unordered(a, b):
    return np.isnan(a) | np.isnan(b)
