"""The cycles of a block that is alone on a multiprocessor: warps start together and wait for the registers they read.

A warp issues one instruction a cycle. Between two branches, an instruction starts as soon as the registers that it
reads are ready, because ptxas schedules loads ahead of instructions that do not depend on them. After a branch, a
barrier or a wait for copies, nothing starts before everything earlier has started. Contention between warps is not
modelled here (model.py has limits of issue slots, caches and banks).

A global load has the latency of DRAM if one of its 32-byte sectors is accessed for the first time; of L2 if another
block has accessed the sector; of L1 if this block has. Loads that bypass L1, and prefetches, fetch 128 bytes at a time
into L2.
"""

import functools
from typing import NamedTuple

import numpy as np

from .parse import Instruction, Negated, Pair, Register, Vector

WARP = 32
RESULT = {"shfl": 25, "movmatrix": 25, "ldmatrix": 30, "mma": 33, "ld": 30, "ex2": 20, "lg2": 20, "rcp": 20,
          "rsqrt": 20, "sqrt": 20, "sin": 20, "cos": 20, "tanh": 20}
PAIRS = 512              # float16 multiplications of one tensor core of sm_90 in a cycle
TENSOR_PAIRS = 4096      # float16 multiplications of a multiprocessor of sm_100 in a cycle (tcgen05): by the data
                         # sheet of a B200, 2.25 PFLOP/s of 148 multiprocessors at 1.86 GHz
BLOCKS = 1 << 16         # more than the number of blocks that run side by side
PLAIN = 4                # latency in cycles of any other instruction
STORES = {"st", "red", "bra", "ret", "exit", "cp", "bar", "barrier", "fence"}  # opcodes that write no register


class Latencies(NamedTuple):
    """The cycles that a load takes from DRAM (`far`), from L2 (`middle`) and from L1 (`near`)."""

    far: int = 800
    middle: int = 270
    near: int = 40


USUAL = Latencies()


class Touched:
    """A set of integers, each added once: sorted arrays, each less than half as long as the previous one."""

    def __init__(self):
        self._parts: list[np.ndarray] = []

    def add(self, numbers: np.ndarray) -> None:
        """Add sorted integers."""
        while self._parts and self._parts[-1].size < 2 * numbers.size:
            numbers = np.sort(np.concatenate((self._parts.pop(), numbers)), kind="stable")
        self._parts.append(numbers)

    def between(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The number of elements x with low <= x < high."""
        found = (np.searchsorted(part, high) - np.searchsorted(part, low) for part in self._parts)
        return sum(found, np.zeros(low.size, np.int64))


class Timeline:
    """The cycle counts of the warps of some blocks."""

    def __init__(self, blocks: int, warps: int, latencies: Latencies = USUAL):
        self.shape, self.latencies = (blocks, warps), latencies
        self.clock = np.zeros(blocks * warps)             # when the last instruction of each warp has started
        self._begun, self._given = (np.zeros(blocks * warps) for _ in range(2))   # since the last branch: clock, number
        self._ready: dict[int, np.ndarray] = {}           # by register: when its value is ready
        self._arrival = None                              # latency of the current load, by warp
        self._known = {False: Touched(), True: Touched()}    # (sector or line, block) accessed so far
        self._asked, self._early = np.zeros(0, np.int64), np.zeros(blocks * warps)
        self._busy = np.zeros(blocks * warps)             # when the tensor core has finished the products of each warp
        self._pipe = np.zeros(blocks)                     # when the products of each block by tcgen05 are complete
        self._open = np.zeros(blocks * warps)             # when the copies of the open group arrive
        # By warp, when the copies of each group, and of all groups before it, have arrived; by lane, the number of its
        # groups: lanes that diverge commit their parts of a group one after the other.
        self._groups: list[list[float]] = [[] for _ in range(blocks * warps)]
        self._committed = np.zeros((blocks * warps, WARP), np.int64)

    def prefetch(self, offset: np.ndarray) -> None:
        """Prefetch the cache lines with these offsets; they count as being in L2 from now on."""
        self._asked = np.union1d(self._asked, offset >> 7)

    def fetch(self, offset: np.ndarray, lanes: np.ndarray, passing: bool) -> None:
        """Set the latency of the current load from these offsets. passing: the load bypasses L1."""
        warp, places, known = lanes // WARP, (offset >> (7 if passing else 5)).astype(np.int64), self._known[passing]
        own = places * BLOCKS + warp // self.shape[1]
        new = known.between(own, own + 1) == 0
        self._arrival = np.full(self.clock.size, float(self.latencies.middle if passing else self.latencies.near))
        if new.any():
            known.add(np.unique(own[new]))
            alone = known.between(places * BLOCKS, (places + 1) * BLOCKS) == 1
            self._arrival[warp[new]] = np.maximum(self._arrival[warp[new]], self.latencies.middle)
            self._arrival[warp[new & alone & ~np.isin(offset >> 7, self._asked)]] = self.latencies.far

    def bring(self, offset: np.ndarray, lane: int) -> float:
        """Latency of a bulk copy of a lane from these offsets."""
        self.fetch(offset, np.full(offset.size, lane, np.int32), True)
        arrival, self._arrival = self._arrival, None
        return float(arrival[lane // WARP])

    def until(self, warp: int, clock: float) -> None:
        """Let a warp wait until this clock."""
        self.clock[warp] = max(self.clock[warp], clock)
        self.part(np.array([warp]))

    def step(self, step: Instruction, active: np.ndarray) -> None:
        """Advance the clocks of the warps of `active` by an instruction."""
        warps = np.flatnonzero(active.reshape(-1, WARP).any(1))
        arrival, self._arrival = self._arrival, None
        if not warps.size:
            return
        reads, writes = registers(step)
        now = self._begun[warps]
        for number in reads:
            if number in self._ready:
                now = np.maximum(now, self._ready[number][warps])
        if step.opcode == "cp":
            now = self._copy(step, warps, now, arrival, active.reshape(-1, WARP))
        elif step.opcode == "wgmma":
            now = self._multiply(step, warps, now)
        self._given[warps] += 1
        self.clock[warps] = np.maximum(np.maximum(self.clock[warps], now + 1), (self._begun + self._given)[warps])
        latency = (PLAIN if "param" in step.parts else RESULT.get(step.opcode, PLAIN)) if arrival is None \
            else arrival[warps]
        for number in writes:
            ready = self._ready.setdefault(number, np.zeros(self.clock.size))
            ready[warps] = now + latency

    def _copy(self, step: Instruction, warps: np.ndarray, now: np.ndarray, arrival, lanes: np.ndarray) -> np.ndarray:
        """cp.async, commit_group or wait_group: the clocks at which the warps continue. lanes: bool [warps, 32]."""
        if "commit_group" in step.parts:
            for warp in warps.tolist():
                groups, at = self._groups[warp], int(self._committed[warp, lanes[warp]].max())
                groups += groups[-1:] * (at - len(groups) + 1) or [0.0] * (at - len(groups) + 1)
                groups[at:] = [max(arrived, self._open[warp]) for arrived in groups[at:]]
            self._committed[warps] += lanes[warps]
            self._open[warps] = 0
        elif "wait_group" in step.parts or "wait_all" in step.parts:
            stay = int(step.operands[0].text) if "wait_group" in step.parts else 0
            for warp in warps.tolist():
                count = int(self._committed[warp, lanes[warp]].max()) - stay
                if count > 0:
                    self.clock[warp] = max(self.clock[warp], self._groups[warp][count - 1])
            self.part(warps)
            return self.clock[warps]
        elif arrival is not None:
            self._open[warps] = np.maximum(self._open[warps], now + arrival[warps])
        return now

    def _multiply(self, step: Instruction, warps: np.ndarray, now: np.ndarray) -> np.ndarray:
        """wgmma: a product occupies the tensor core of each warp after earlier products; or a wait for products."""
        if "mma_async" in step.parts:
            across = int(next(part for part in step.parts if part.startswith("m64n"))[4:].partition("k")[0])
            self._busy[warps] = np.maximum(self._busy[warps], now) + 16 * across * 16 / PAIRS
        elif "wait_group" in step.parts:   # taken as a wait for all products, which is what kernels do
            self.clock[warps] = np.maximum(self.clock[warps], self._busy[warps] + RESULT["mma"])
            self.part(warps)
            return self.clock[warps]
        return now

    def product(self, warp: int, pairs: float) -> None:
        """tcgen05.mma: a product of this many float16 multiplications occupies the tensor cores of the warp's block."""
        block = warp // self.shape[1]
        self._pipe[block] = max(self._pipe[block], self.clock[warp]) + pairs / TENSOR_PAIRS

    def products_end(self, warp: int) -> float:
        """When all products of the warp's block are complete."""
        return float(self._pipe[warp // self.shape[1]]) + RESULT["mma"]

    def part(self, warps: np.ndarray) -> None:
        """Start a new section: no later instruction of these warps starts before all earlier ones have."""
        self._begun[warps], self._given[warps] = self.clock[warps], 0

    def wait_previous(self, warps: np.ndarray) -> None:
        """griddepcontrol.wait of these warps: the cycles so far overlap with earlier kernels."""
        self.part(warps)
        self._early[warps] = self.clock[warps]

    def meet(self, active: np.ndarray) -> None:
        """A block barrier: the warps of `active` continue when the last of their block arrives."""
        of_warps = active.reshape(*self.shape, WARP).any(2)
        last = np.where(of_warps, self.clock.reshape(self.shape), 0).max(1, keepdims=True)
        self.clock = np.where(of_warps, last + 1, self.clock.reshape(self.shape)).ravel()
        self.part(np.flatnonzero(of_warps))

    def clocks(self) -> tuple[float, float]:
        """Cycles of all blocks, summed, and the part of them that overlaps with earlier kernels."""
        whole, early = (clock.reshape(self.shape) for clock in (self.clock, self._early))
        return float(whole.max(1).sum()), float(early.min(1).sum())


@functools.cache
def registers(step: Instruction) -> tuple[list[int], list[int]]:
    """Indices of the registers that an instruction reads and writes; wgmma accumulators count as neither."""
    if step.opcode == "wgmma":
        return _numbers(step.operands[1:3]), []
    stores = step.opcode in STORES or (step.opcode == "tcgen05" and "ld" not in step.parts)
    reads = _numbers(step.operands if stores else step.operands[1:]) + _numbers((step.guard,))
    return reads, [] if stores else _numbers(step.operands[:1])


def _numbers(operands) -> list[int]:
    found = []
    for operand in operands:
        if isinstance(operand, Vector):
            found += _numbers(operand.parts)
        elif isinstance(operand, Pair):
            found += _numbers((operand.first, operand.second))
        elif isinstance(operand, Negated):
            found += _numbers((operand.register,))
        elif isinstance(operand, Register):
            found += [operand.number] * (operand.number >= 0)
        elif operand is not None:
            found += _numbers((getattr(operand, "base", None),))
    return found
