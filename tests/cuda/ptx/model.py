"""Predicted time of a launch on a card, from counters of the machine and resources of the machine code.

    time = boundary + latency + max(memory, issue, first cache, banks)

memory: bytes touched, at the card's bandwidth or at what is under way: by Little's law a multiprocessor gets no more
bytes a clock than its resident warps have asked for and not yet met, over the latency. Resident warps come from
registers, shared memory and threads of a block; bytes that a lane has under way from the longest run of loads before
the first use of one of them, in the order of the PTX. The rest are instructions at 4 a clock, sectors at 128 bytes a
clock as if the first cache had them all, and turns of the banks at one a clock.

A prediction, which no card has confirmed: ptxas moves instructions, and what the second cache holds is not known here.
"""

from dataclasses import dataclass

from .counters import Counters
from .parse import Kernel, Pair, Register, Several


@dataclass(frozen=True)
class Card:
    """Limits: of the card, then of a multiprocessor. clock: Hz; bandwidth: bytes a second that a copy reaches; latency:
    clocks of a load from memory; boundary: seconds from one kernel of a graph to the next."""

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    latency: int = 800
    boundary: float = 1.3e-6
    issue: int = 4
    cached: int = 128
    registers: int = 65536
    shared: int = 227 << 10
    threads: int = 2048
    blocks: int = 32


CARDS = {card.name: card for card in (
    Card("H200", 132, 1.75e9, 4.3e12), Card("H100", 132, 1.75e9, 3.0e12), Card("A100", 108, 1.41e9, 1.75e12,
                                                                           shared=163 << 10),
    Card("RTX 4090", 128, 2.5e9, 0.93e12, shared=99 << 10, threads=1536, blocks=24))}


@dataclass(frozen=True)
class Resources:
    """What ptxas says: registers of a thread, bytes of shared memory and threads of a block."""

    registers: int
    shared: int
    threads: int


@dataclass(frozen=True)
class Prediction:
    """Seconds by what could bind a launch, and all of it. resident: warps of a multiprocessor; under_way: bytes."""

    memory: float
    issue: float
    sectors: float
    banks: float
    fixed: float
    resident: int
    under_way: int
    bytes: float

    @property
    def seconds(self) -> float:
        """Of the launch."""
        return self.fixed + max(self.memory, self.issue, self.sectors, self.banks)

    @property
    def binds(self) -> str:
        """Name of the largest."""
        return max(("memory", "issue", "sectors", "banks"), key=lambda name: getattr(self, name))

    def share(self, card: Card) -> float:
        """Of the bandwidth that a copy reaches."""
        return self.bytes / card.bandwidth / self.seconds


def resident_blocks(card: Card, has: Resources) -> int:
    """Blocks that a multiprocessor holds at once."""
    warps = -(-has.threads // 32)
    by_registers = card.registers // (-(-max(has.registers, 1) * 32 // 256) * 256 * warps)
    by_shared = card.shared // (has.shared + 1024)
    return min(by_registers, by_shared, card.threads // has.threads, card.blocks)


def bytes_under_way(kernel: Kernel) -> int:
    """Bytes of a lane that are asked for before one of them is used, at most: of loads within a basic block, and of
    copies in the background for as many groups as may stay open."""
    most, copied, groups = 0, 0, 0
    for block in kernel.blocks:
        waiting, here = {}, 0
        for step in block.steps:
            if any(name in waiting for name in _names(step.operands[1:] if step.opcode != "st" else step.operands)):
                waiting.clear()
            if step.opcode == "ld" and "global" in step.parts:
                names = _names(step.operands[:1])
                waiting.update(dict.fromkeys(names, _size(step) / len(names)))
            if step.opcode == "cp" and "async" in step.parts and len(step.operands) > 2:
                here += int(step.operands[2].text)
            if "wait_group" in step.parts:
                groups = max(groups, int(step.operands[0].text))
            most = max(most, int(sum(waiting.values())))
        copied = max(copied, here)
    return max(most, copied * max(groups, 1))


def _names(operands) -> list[str]:
    found = []
    for operand in operands:
        if isinstance(operand, Several):
            found += _names(operand.parts)
        elif isinstance(operand, Pair):
            found += [operand.first.name, operand.second.name]
        elif isinstance(operand, Register):
            found.append(operand.name)
        elif isinstance(getattr(operand, "base", None), Register):
            found.append(operand.base.name)
    return found


def _size(step) -> int:
    bits = int("".join(letter for letter in step.type if letter.isdigit()))
    return bits // 8 * next((int(part[1:]) for part in step.parts if part in ("v2", "v4")), 1)


def predict(card: Card, kernel: Kernel, has: Resources, counters: Counters, blocks: int) -> Prediction:
    """A launch of so many blocks, of which some were counted."""
    scale = blocks / max(counters.blocks, 1)
    clocks = card.multiprocessors * card.clock
    resident = resident_blocks(card, has)
    busy = min(blocks / card.multiprocessors, resident)             # blocks of a multiprocessor, on the average
    under_way = int(busy * has.threads * bytes_under_way(kernel))
    rate = min(card.bandwidth, max(under_way, 1) / card.latency * clocks)
    moved = counters.touched * scale
    return Prediction(
        memory=moved / rate, issue=scale * counters.instructions / (card.issue * clocks),
        sectors=scale * 32 * counters.passes("global") / (card.cached * clocks),
        banks=scale * counters.passes("shared") / clocks, fixed=card.boundary + card.latency / card.clock,
        resident=resident * -(-has.threads // 32), under_way=under_way, bytes=moved)
