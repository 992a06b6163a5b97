"""Predicted time of a launch on a card, from counters of the machine and resources of the machine code.

    time = boundary + max(waiting, latency + max(memory, issue, first cache, second cache, banks, tensor cores))

boundary: from the end of one kernel to the first instruction of the next, or, where the next one is there already and
waits for that end (programmatic dependent launch), to its going on. What such a kernel has asked for before it waits is
on its way while the boundary lasts: these bytes are taken off `memory`, as many as the bandwidth brings in that time,
and its first load comes from the second cache. What the first blocks of a multiprocessor do before they wait takes no
time.

memory: bytes touched, as many as the blocks that were counted touch and at most all of what they touch a part of, at
the card's bandwidth. issue: instructions at 4 a clock. first cache: sectors at 128 bytes a
clock, as if it had them all. second cache: bytes of copies and of loads that pass the first one. banks: their turns at
one a clock. tensor cores: pairs of float16 at the card's rate, of which mma.sync reaches a share on Hopper. waiting:
the clocks of a block that has a multiprocessor to itself (timeline.py), as often as blocks follow each other there: as
many run at once as registers, shared memory and threads allow. Where that binds, too few bytes are under way: by
Little's law those that are, are what moves in a clock times the latency.

A prediction, which no card has confirmed: ptxas moves instructions, what the second cache holds is not known here, and
warps of a multiprocessor hinder each other more than the larger of two times says.
"""

import math
from dataclasses import dataclass

from .counters import Counters
from .timeline import FAR, MIDDLE


@dataclass(frozen=True)
class Card:
    """Limits: of the card, then of a multiprocessor. clock: Hz; bandwidth: bytes a second that a copy reaches; latency:
    clocks of a load from memory; boundary: seconds from one kernel of a graph to the next; dependent: the same of a
    kernel that is there already, None where the card has no such launch. Both of these are assumptions: a graph's
    kernels are told to take 1.3 us, and the end of a wait a round trip through the second cache and little else.
    pairs: of float16 that its tensor cores multiply in a clock, with sums of float32; sync: share of mma.sync (0.62 on
    Hopper by published measurements); fours: how many pairs of 4-bit floats take as long as one of float16. second:
    bytes a second of the second cache; of Hopper those that published kernels without clusters move: 610 TFLOP/s with
    tiles of 128 x 256, 480 with 128 x 128.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    latency: int = FAR
    boundary: float = 1.3e-6
    dependent: float | None = None
    issue: int = 4
    cached: int = 128
    registers: int = 65536
    shared: int = 227 << 10
    threads: int = 2048
    blocks: int = 32
    pairs: int = 2048
    sync: float = 1.0
    fours: int = 4
    second: float = 4.5e12


CARDS = {card.name: card for card in (
    Card("H200", 132, 1.75e9, 4.3e12, dependent=0.7e-6, sync=0.62, second=7.2e12),
    Card("H100", 132, 1.75e9, 3.0e12, dependent=0.7e-6, sync=0.62, second=7.2e12),
    Card("A100", 108, 1.41e9, 1.75e12, shared=163 << 10, pairs=1024),
    Card("RTX 4090", 128, 2.5e9, 0.93e12, shared=99 << 10, threads=1536, blocks=24, pairs=256),
    Card("RTX 5090", 170, 2.4e9, 1.66e12, dependent=0.7e-6, shared=99 << 10, threads=1536, blocks=24, pairs=256,
         fours=8, second=7.0e12))}


@dataclass(frozen=True)
class Resources:
    """What ptxas says: registers of a thread, bytes of shared memory and threads of a block."""

    registers: int
    shared: int
    threads: int


@dataclass(frozen=True)
class Prediction:
    """Seconds by what could bind a launch. boundary, latency: before it, and of its first load. resident: warps of a
    multiprocessor; under_way: bytes that it has asked for, on the average, if waiting binds. pairs: of float16 that
    tensor cores multiply."""

    memory: float
    issue: float
    sectors: float
    second: float
    banks: float
    tensor: float
    waiting: float
    boundary: float
    latency: float
    resident: int
    under_way: int
    bytes: float
    pairs: float

    @property
    def seconds(self) -> float:
        """Of the launch."""
        return self.boundary + max(self.waiting, self.latency + max(self._limits.values()))

    @property
    def binds(self) -> str:
        """Name of the largest."""
        largest = max(self._limits, key=self._limits.get)
        return "waiting" if self.waiting > self.latency + self._limits[largest] else largest

    @property
    def _limits(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("memory", "issue", "sectors", "second", "banks", "tensor")}

    def share(self, card: Card) -> float:
        """Of the bandwidth that a copy reaches."""
        return self.bytes / card.bandwidth / self.seconds


def resident_blocks(card: Card, has: Resources) -> int:
    """Blocks that a multiprocessor holds at once."""
    warps = -(-has.threads // 32)
    by_registers = card.registers // (-(-max(has.registers, 1) * 32 // 256) * 256 * warps)
    by_shared = card.shared // (has.shared + 1024)
    return min(by_registers, by_shared, card.threads // has.threads, card.blocks)


def _products(counters: Counters, card: Card) -> float:
    """Pairs of float16 that take tensor cores as long: bytes are twice as fast."""
    found = counters.products
    return (found["wgmma"] + found["wgmma of bytes"] / 2 + found["mma"] / card.sync
            + found["mma of bytes"] / 2 / card.sync + found["mma of fours"] / card.fours / card.sync)


def predict(card: Card, has: Resources, counters: Counters, blocks: int) -> Prediction:
    """A launch of so many blocks, of which some were counted."""
    scale = blocks / max(counters.blocks, 1)
    clocks = card.multiprocessors * card.clock
    resident = resident_blocks(card, has)
    rounds = max(blocks / (card.multiprocessors * resident), 1)      # of blocks that follow each other
    of_block = max(counters.blocks, 1) * card.clock
    waiting = (rounds * counters.clocks - (0 if card.dependent is None else counters.early)) / of_block
    moved, latency = min(counters.touched * scale, counters.within or math.inf), card.latency / card.clock
    boundary, memory = card.boundary if card.dependent is None else card.dependent, moved / card.bandwidth
    if counters.ahead and card.dependent is not None:
        there = counters.ahead * min(scale, card.multiprocessors * resident / max(counters.blocks, 1))
        memory -= min(there / card.bandwidth, boundary)
        latency = MIDDLE / card.clock
    return Prediction(
        memory=memory, issue=scale * counters.instructions / (card.issue * clocks),
        sectors=scale * 32 * counters.passes("global") / (card.cached * clocks),
        second=scale * counters.second / card.second, banks=scale * counters.passes("shared") / clocks,
        tensor=scale * _products(counters, card) / (card.pairs * clocks),
        waiting=waiting, boundary=boundary, latency=latency,
        pairs=scale * sum(counters.products.values()), resident=resident * -(-has.threads // 32), bytes=moved,
        under_way=int(moved / card.multiprocessors / max(waiting, latency) * latency))
