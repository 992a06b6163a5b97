"""A parser of PTX text into basic blocks of decoded instructions.

    kernel = parse(text)            # the only entry point of the text
    kernel.parameters               # [("u64", "k_param_0"), ...]
    kernel.blocks[3].steps          # [Instruction, ...]

A basic block ends with a branch or an exit. A block barrier (bar.sync) is a basic block of its own, and an instruction
that all lanes of a warp must execute together begins one. So lanes wait for each other at the beginning of basic blocks
only.
"""

import functools
import re
from dataclasses import dataclass, field

import numpy as np

TYPES = {"u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
         "f16": np.uint16, "bf16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
         "f16x2": np.uint32, "bf16x2": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
         "f64": np.float64, "pred": np.bool_}
WARP_WIDE = {"shfl", "vote", "mma", "wgmma", "ldmatrix", "movmatrix", "redux", "match"}
CONTROL = {"bra", "ret", "exit"}


class ParseError(Exception):
    """Text that is not PTX, or PTX that this parser does not support."""


@dataclass(frozen=True)
class Register:
    """A register with its index and declared type. A special register such as %tid.x has number -1."""

    name: str
    type: str
    number: int


@dataclass(frozen=True)
class Immediate:
    """An immediate operand, as written."""

    text: str


@dataclass(frozen=True)
class Symbol:
    """The name of a parameter, an array, or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]"""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """A vector operand {a, b, ...}."""

    parts: tuple


@dataclass(frozen=True)
class Pair:
    """Two destinations, a|b."""

    first: Register
    second: Register


@dataclass(frozen=True)
class Negated:
    """A negated predicate, !p."""

    register: Register


@dataclass(eq=False)
class Instruction:
    """A decoded instruction: for ld.global.v4.u32, opcode "ld" and parts ("global", "v4", "u32").

    guard: the guard predicate, or None.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple
    guard: Register | Negated | None
    text: str
    number: int

    @property
    def type(self) -> str:
        """The last part of the name: type of the result, or of all operands."""
        return self.parts[-1] if self.parts else ""

    @property
    def is_block_barrier(self) -> bool:
        """Whether this is a barrier of all threads of the block."""
        return self.opcode in ("bar", "barrier") and not {"warp", "cluster"} & set(self.parts)

    @property
    def is_warp_wide(self) -> bool:
        """Whether all lanes of a warp execute this together."""
        return self.opcode in WARP_WIDE or (self.opcode == "tcgen05" and "aligned" in self.parts)

    @property
    def is_poll(self) -> bool:
        """Whether this polls the phase of an mbarrier (try_wait, test_wait)."""
        return self.opcode == "mbarrier" and bool({"try_wait", "test_wait"} & set(self.parts))


@dataclass
class Block:
    """A basic block.

    waits: what lanes wait for at its beginning: nothing (0), the other lanes of the warp (1), all threads of the block
    (2), the cluster (3), an mbarrier (4).
    """

    steps: list[Instruction] = field(default_factory=list)
    waits: int = 0


@dataclass(eq=False)
class Kernel:
    """An entry point.

    labels: index of the basic block of each label. registers: type of each register. shared, local: offset of each
    array, and the total bytes. constants: constant arrays of the module.
    dynamic: names of shared arrays without a size (dynamic shared memory), which begin after the others.
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
        """Indices of basic blocks in the usual sense: targets of branches, and blocks after a branch or exit."""
        return frozenset(self.labels.values()) | {number + 1 for number, block in enumerate(self.blocks)
                                                  if block.steps and block.steps[-1].opcode in CONTROL}

    @functools.cached_property
    def awaits(self) -> bool:
        """Whether the kernel has griddepcontrol.wait (programmatic dependent launch)."""
        return any(step.opcode == "griddepcontrol" and "wait" in step.parts for step in self.instructions)

    @property
    def instructions(self) -> list[Instruction]:
        """All instructions in the order of the text."""
        return [step for block in self.blocks for step in block.steps]


def parse(text: str) -> Kernel:
    """Parse a PTX file with one entry point.

    Raises:
        ParseError: there is no entry point, or the text has something that is not supported.
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
    """The initialised global and constant arrays of a module, as bytes."""
    pattern = r"\.(?:global|const)\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([^}]*)\}"
    found = {}
    for name, size, values in re.findall(pattern, text):
        found[name] = np.zeros(int(size), np.uint8)
        given = [int(value, 0) for value in values.split(",")]
        found[name][:len(given)] = given
    return found


def _arrays(text: str, space: str) -> tuple[dict[str, int], int]:
    """Offsets of the arrays of a state space, and their total bytes."""
    offsets, end = {}, 0
    pattern = rf"\.{space}\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+([\w$]+)(?:\[(\d+)\])?\s*;"
    for align, bits, name, count in re.findall(pattern, text):
        alignment = int(align or int(bits) // 8)
        offsets[name] = end = -(-end // alignment) * alignment
        end += int(bits) // 8 * int(count or 1)
    return offsets, end


class _Body:
    """The conversion of statements to basic blocks. Registers that inline PTX declares in braces are scoped."""

    def __init__(self, kernel: str):
        self.blocks, self.labels, self.registers = [Block()], {}, []
        self._kernel, self._numbers, self._families, self._scopes, self._count = kernel, {}, {}, [], 0

    def read(self, body: str) -> None:
        """Convert all statements of the kernel's body."""
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
        elif (step.is_warp_wide or step.opcode in ("bar", "barrier")) and self.blocks[-1].waits in (0, 4):
            self._wait(1)
        self.blocks[-1].steps.append(step)
        if step.opcode in CONTROL:
            self.blocks.append(Block())

    def _wait(self, waits: int) -> None:
        """Begin a new basic block with this wait, or use the current one if it is empty (it may have a label)."""
        if self.blocks[-1].steps:
            self.blocks.append(Block())
        self.blocks[-1].waits = waits

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
            return Vector(tuple(map(self._operand, _split(text[1:-1]))))
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
    """Split at semicolons. Braces of scopes are statements of their own; braces of operands stay."""
    for found in re.finditer(r"\s*(?:([{}])|([^;{}\s][^;]*);)", body):
        yield found[1] or found[2].strip()


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(text[begin:index].strip())
            begin = index + 1
    parts.append(text[begin:].strip())
    return [part for part in parts if part]
