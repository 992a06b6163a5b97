"""PTX text as basic blocks of decoded instructions.

    kernel = parse(text)            # the text's one entry point
    kernel.parameters               # [("u64", "k_param_0"), ...]
    kernel.blocks[3].steps          # [Instruction, ...]

A block ends where control may leave it. A barrier of the whole block of threads is a block of its own, and whatever all
lanes of a warp must reach together begins one: so lanes need to wait for each other at heads of blocks only.
"""

import functools
import re
from dataclasses import dataclass, field

import numpy as np

TYPES = {"u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
         "f16": np.uint16, "bf16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
         "f16x2": np.uint32, "bf16x2": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
         "f64": np.float64, "pred": np.bool_}
OF_A_WARP = {"shfl", "vote", "mma", "wgmma", "ldmatrix", "movmatrix", "redux", "match"}
LEAVES = {"bra", "ret", "exit"}


class ParseError(Exception):
    """Text that is no PTX, or PTX that is not known here."""


@dataclass(frozen=True)
class Register:
    """A register by its number, or a special one (number -1) by its name; type: as declared."""

    name: str
    type: str
    number: int


@dataclass(frozen=True)
class Immediate:
    """A number as it is written."""

    text: str


@dataclass(frozen=True)
class Symbol:
    """A parameter, an array, or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Several:
    """{a, b, ...}"""

    parts: tuple


@dataclass(frozen=True)
class Pair:
    """a|b: two results."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Negated:
    """!p"""

    register: Register


@dataclass(eq=False)
class Instruction:
    """opcode "ld" with the parts ("global", "v4", "u32"); guard: Register, Negated or None."""

    opcode: str
    parts: tuple[str, ...]
    operands: tuple
    guard: Register | Negated | None
    text: str
    number: int

    @property
    def type(self) -> str:
        """The last part: type of the result, or of both sides."""
        return self.parts[-1] if self.parts else ""

    @property
    def is_block_barrier(self) -> bool:
        """Whether all threads of a block meet here."""
        return self.opcode in ("bar", "barrier") and not {"warp", "cluster"} & set(self.parts)

    @property
    def is_poll(self) -> bool:
        """Whether it asks for the turn of an mbarrier."""
        return self.opcode == "mbarrier" and bool({"try_wait", "test_wait"} & set(self.parts))


@dataclass
class Block:
    """Instructions in a row. waits: for nobody (0), the lanes of the warp (1), the threads of the block (2), the
    cluster (3), an mbarrier (4)."""

    steps: list[Instruction] = field(default_factory=list)
    waits: int = 0


@dataclass(eq=False)
class Kernel:
    """An entry point. shared, local: offsets of arrays by name, then their bytes; constants: arrays of the module.

    dynamic: names of shared arrays without a size, which begin behind the others.
    """

    name: str
    parameters: list[tuple[str, str]]
    blocks: list[Block]
    labels: dict[str, int]
    registers: list[str]
    shared: dict[str, int]
    shared_bytes: int
    local: dict[str, int]
    local_bytes: int
    constants: dict[str, np.ndarray]
    dynamic: tuple[str, ...]

    @functools.cached_property
    def begins(self) -> frozenset[int]:
        """Blocks that control comes to from elsewhere, or behind a branch: others only go on."""
        return frozenset(self.labels.values()) | {number + 1 for number, block in enumerate(self.blocks)
                                                  if block.steps and block.steps[-1].opcode in LEAVES}

    @functools.cached_property
    def awaits(self) -> bool:
        """Whether it waits itself for the kernels before it (programmatic dependent launch)."""
        return any(step.opcode == "griddepcontrol" and "wait" in step.parts for step in self.instructions)

    @property
    def instructions(self) -> list[Instruction]:
        """All of them in the order of the text."""
        return [step for block in self.blocks for step in block.steps]


def parse(text: str) -> Kernel:
    """Read a PTX file with one entry point.

    Raises:
        ParseError: there is no entry, or something is not known here.
    """
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.S)
    head = re.search(r"\.entry\s+([\w$]+)\s*(\([^)]*\))?", text)
    if head is None:
        raise ParseError("no .entry in this text")
    begin = text.index("{", head.end())
    parameters = re.findall(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,)]*?)?\s+([\w$]+)\s*[,)]", head[2] or "")
    shared, shared_bytes = _arrays(text, "shared")
    local, local_bytes = _arrays(text, "local")
    body = _Body(head[1])
    body.read(text[begin + 1:text.rindex("}")])
    return Kernel(head[1], parameters, body.blocks, body.labels, body.registers, shared, shared_bytes, local,
                  local_bytes, _constants(text[:begin]),
                  tuple(re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\]\s*;", text)))


def _constants(text: str) -> dict[str, np.ndarray]:
    """Bytes of the arrays that a module brings along."""
    pattern = r"\.(?:global|const)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([^}]*)\}"
    found = {}
    for name, size, values in re.findall(pattern, text):
        found[name] = np.zeros(int(size), np.uint8)
        given = [int(value, 0) for value in values.split(",")]
        found[name][:len(given)] = given
    return found


def _arrays(text: str, space: str) -> tuple[dict[str, int], int]:
    """Places of a space's arrays, one behind the other, and their bytes together."""
    places, end = {}, 0
    pattern = rf"\.{space}\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d+)\])?\s*;"
    for align, bits, name, count in re.findall(pattern, text):
        grain = int(align or int(bits) // 8)
        places[name] = end = -(-end // grain) * grain
        end += int(bits) // 8 * int(count or 1)
    return places, end


class _Body:
    """Statements to blocks. A register that inline assembly declares in braces is one of its own."""

    def __init__(self, kernel: str):
        self.blocks, self.labels, self.registers = [Block()], {}, []
        self._kernel, self._numbers, self._families, self._scopes, self._count = kernel, {}, {}, [], 0

    def read(self, body: str) -> None:
        """Take statements one by one."""
        for statement in _statements(re.sub(r"([\w$]+):(?=\s)", r"\1:;", body)):
            if statement == "{":
                self._count += 1
                self._scopes.append((self._count, set()))
            elif statement == "}":
                self._scopes.pop()
            elif statement.endswith(":"):
                if self.blocks[-1].steps:
                    self.blocks.append(Block())
                self.labels[statement[:-1]] = len(self.blocks) - 1
            elif statement.startswith(".reg"):
                self._declare(statement)
            elif not statement.startswith("."):
                self._add(self._instruction(statement))

    def _add(self, step: Instruction) -> None:
        if step.is_block_barrier:
            self._wait(2)
            self.blocks[-1].steps.append(step)
            self.blocks.append(Block())
            return
        if step.is_poll:
            self._wait(4)
        elif "cluster" in step.parts and "wait" in step.parts:
            self._wait(3)
        elif (step.opcode in OF_A_WARP or step.opcode in ("bar", "barrier")) and self.blocks[-1].waits in (0, 4):
            self._wait(1)
        self.blocks[-1].steps.append(step)
        if step.opcode in LEAVES:
            self.blocks.append(Block())

    def _wait(self, whom: int) -> None:
        """Have the next instruction begin a block; an empty one that is there may be a label's."""
        if self.blocks[-1].steps:
            self.blocks.append(Block())
        self.blocks[-1].waits = whom

    def _declare(self, statement: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
        for name in map(str.strip, names.split(",")):
            if "<" in name:                                   # %r<57>: %r0 .. %r56
                self._families[name[:name.index("<")]] = kind
            elif self._scopes:
                scope, own = self._scopes[-1]
                own.add(name)
                self._register(f"{name}@{scope}", kind)
            else:
                self._register(name, kind)

    def _register(self, name: str, kind: str) -> Register:
        if name not in self._numbers:
            self._numbers[name] = Register(name, kind, len(self.registers))
            self.registers.append(kind)
        return self._numbers[name]

    def _instruction(self, statement: str) -> Instruction:
        found = re.match(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.S)
        if found is None:
            raise ParseError(f"no instruction: {statement!r}")
        negated, guard, name, rest = found.groups()
        if guard:
            guard = self._operand(guard)
            guard = Negated(guard) if negated else guard
        opcode, *parts = name.replace("::", "_").split(".")
        self._count += 1
        text = " ".join(statement.split()).replace(self._kernel, "kernel")
        operands = tuple(map(self._operand, _split(rest)))
        return Instruction(opcode, tuple(parts), operands, guard or None, text, self._count)

    def _operand(self, text: str):
        if text.startswith("{"):
            return Several(tuple(map(self._operand, _split(text[1:-1]))))
        if text.startswith("["):
            base, sign, offset = re.fullmatch(r"\[([^+\-\]]+)([+-]*)(.*)\]", text.replace(" ", "")).groups()
            return Address(self._operand(base), int(offset or "0", 0) * (-1 if sign.endswith("-") else 1))
        if text.startswith("!"):
            return Negated(self._operand(text[1:]))
        if "|" in text:
            return Pair(*(self._operand(part.strip()) for part in text.split("|")))
        for scope, own in reversed(self._scopes):
            if text in own:
                return self._numbers[f"{text}@{scope}"]
        if text in self._numbers:
            return self._numbers[text]
        if text == "_":
            return Register("_", "b32", -1)
        if text.startswith("%"):
            family = re.fullmatch(r"(%[A-Za-z_]+)\d+", text)
            if family and family[1] in self._families:
                return self._register(text, self._families[family[1]])
            return Register(text, "u64" if text.endswith("64") else "u32", -1)
        return Immediate(text) if re.match(r"-?\d", text) else Symbol(text)


def _statements(body: str):
    """What semicolons part, and braces of scopes alone; those of operands stay."""
    for found in re.finditer(r"\s*(?:([{}])|([^;{}\s][^;]*);)", body):
        yield found[1] or found[2].strip()


def _split(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]
