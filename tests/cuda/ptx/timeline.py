"""Clocks of warps that begin together and wait for what they read: the least time of a block, whatever the card has.

Each warp gives out an instruction a clock. Between two branches an instruction begins when the registers that it reads
are there, for ptxas moves loads ahead of what does not need them; beyond a branch, a barrier or a wait for copies
nothing begins before all that stands in front of it has begun. What several warps of a multiprocessor take from each
other is not seen here (model.py has issue, caches and banks).

A load from global memory takes the latency of memory if one of its sectors of 32 bytes is touched for the first time,
of the second cache if another block touches the sector too, and of the first where this block has. What the first cache
does not keep, and what `prefetch` asks for, is brought in 128 bytes at a time, and comes from the second afterwards.
"""

import functools

import numpy as np

from .parse import Instruction, Negated, Pair, Register, Several

WARP = 32
FAR, MIDDLE, NEAR = 800, 270, 40      # clocks of a load from memory, from the second cache and from the first
RESULT = {"shfl": 25, "movmatrix": 25, "ldmatrix": 30, "mma": 33, "ld": 30, "ex2": 20, "lg2": 20, "rcp": 20,
          "rsqrt": 20, "sqrt": 20, "sin": 20, "cos": 20, "tanh": 20}
PAIRS = 512              # of float16 that a tensor core of sm_90 multiplies in a clock
BLOCKS = 1 << 16         # more than there are side by side
PLAIN = 4                # clocks until the result of any other instruction can be read
STORES = {"st", "red", "bra", "ret", "exit", "cp", "bar", "barrier", "fence"}  # that write no register


class Touched:
    """Whole numbers, each added once; sorted arrays of which each has less than half of the one before."""

    def __init__(self):
        self._parts: list[np.ndarray] = []

    def add(self, numbers: np.ndarray) -> None:
        """Add sorted numbers."""
        while self._parts and self._parts[-1].size < 2 * numbers.size:
            numbers = np.sort(np.concatenate((self._parts.pop(), numbers)), kind="stable")
        self._parts.append(numbers)

    def between(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """How many are at least `low` and below `high`."""
        found = (np.searchsorted(part, high) - np.searchsorted(part, low) for part in self._parts)
        return sum(found, np.zeros(low.size, np.int64))


class Timeline:
    """Clocks of the warps of some blocks side by side."""

    def __init__(self, blocks: int, warps: int):
        self.shape = blocks, warps
        self.clock = np.zeros(blocks * warps)             # when all that a warp was given has begun
        self._begun, self._given = (np.zeros(blocks * warps) for _ in range(2))   # since the last branch: clock, number
        self._ready: dict[int, np.ndarray] = {}           # by register: when it can be read
        self._arrival = None                              # of the load that runs now, by warp
        self._known = {False: Touched(), True: Touched()}    # by blocks, in sectors and in lines
        self._asked, self._early = np.zeros(0, np.int64), np.zeros(blocks * warps)
        self._busy = np.zeros(blocks * warps)             # until when the tensor cores have products of these warps
        self._open = np.zeros(blocks * warps)             # when the copies of the open group have arrived
        self._groups: list[list[float]] = [[] for _ in range(blocks * warps)]

    def ask(self, offset: np.ndarray) -> None:
        """Lines with these places are asked for, and taken to be in the second cache from now on."""
        self._asked = np.union1d(self._asked, offset >> 7)

    def fetch(self, offset: np.ndarray, lanes: np.ndarray, passing: bool) -> None:
        """Lanes read from these places in global memory. passing: by a load that the first cache does not keep."""
        warp, places, known = lanes // WARP, (offset >> (7 if passing else 5)).astype(np.int64), self._known[passing]
        own = places * BLOCKS + warp // self.shape[1]
        new = known.between(own, own + 1) == 0
        self._arrival = np.full(self.clock.size, float(MIDDLE if passing else NEAR))
        if new.any():
            known.add(np.unique(own[new]))
            alone = known.between(places * BLOCKS, (places + 1) * BLOCKS) == 1
            self._arrival[warp[new]] = np.maximum(self._arrival[warp[new]], MIDDLE)
            self._arrival[warp[new & alone & ~np.isin(offset >> 7, self._asked)]] = FAR

    def bring(self, offset: np.ndarray, lane: int) -> float:
        """Clocks until a copy from these places, which a lane has begun, has come."""
        self.fetch(offset, np.full(offset.size, lane, np.int32), True)
        arrival, self._arrival = self._arrival, None
        return float(arrival[lane // WARP])

    def until(self, warp: int, clock: float) -> None:
        """A warp waits for what comes at this clock."""
        self.clock[warp] = max(self.clock[warp], clock)
        self.part(np.array([warp]))

    def step(self, step: Instruction, active: np.ndarray) -> None:
        """Lanes of `active` have run an instruction."""
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
            now = self._copy(step, warps, now, arrival)
        elif step.opcode == "wgmma":
            now = self._multiply(step, warps, now)
        self._given[warps] += 1
        self.clock[warps] = np.maximum(np.maximum(self.clock[warps], now + 1), (self._begun + self._given)[warps])
        latency = (PLAIN if "param" in step.parts else RESULT.get(step.opcode, PLAIN)) if arrival is None \
            else arrival[warps]
        for number in writes:
            ready = self._ready.setdefault(number, np.zeros(self.clock.size))
            ready[warps] = now + latency

    def _copy(self, step: Instruction, warps: np.ndarray, now: np.ndarray, arrival) -> np.ndarray:
        """cp.async, or the end of a group, or a wait: when the warps go on."""
        if "commit_group" in step.parts:
            for warp in warps.tolist():
                self._groups[warp].append(self._open[warp])
            self._open[warps] = 0
        elif "wait_group" in step.parts or "wait_all" in step.parts:
            stay = int(step.operands[0].text) if "wait_group" in step.parts else 0
            for warp in warps.tolist():
                groups = self._groups[warp]
                self.clock[warp] = max([self.clock[warp], *groups[:len(groups) - stay]])
                self._groups[warp] = groups[len(groups) - stay:] if stay else []
            self.part(warps)
            return self.clock[warps]
        elif arrival is not None:
            self._open[warps] = np.maximum(self._open[warps], now + arrival[warps])
        return now

    def _multiply(self, step: Instruction, warps: np.ndarray, now: np.ndarray) -> np.ndarray:
        """A product of a warpgroup, which the tensor core of each warp's quarter takes when it has done with those
        before, or a wait for products."""
        if "mma_async" in step.parts:
            across = int(next(part for part in step.parts if part.startswith("m64n"))[4:].partition("k")[0])
            self._busy[warps] = np.maximum(self._busy[warps], now) + 16 * across * 16 / PAIRS
        elif "wait_group" in step.parts:   # for all, which is what kernels do
            self.clock[warps] = np.maximum(self.clock[warps], self._busy[warps] + RESULT["mma"])
            self.part(warps)
            return self.clock[warps]
        return now

    def part(self, warps: np.ndarray) -> None:
        """Nothing of what follows begins before all that these warps were given has."""
        self._begun[warps], self._given[warps] = self.clock[warps], 0

    def settle(self, warps: np.ndarray) -> None:
        """These warps wait for the kernels before theirs: what they have done so far was beside those."""
        self.part(warps)
        self._early[warps] = self.clock[warps]

    def meet(self, active: np.ndarray) -> None:
        """Lanes of `active` pass a barrier of their blocks."""
        of_warps = active.reshape(*self.shape, WARP).any(2)
        last = np.where(of_warps, self.clock.reshape(self.shape), 0).max(1, keepdims=True)
        self.clock = np.where(of_warps, last + 1, self.clock.reshape(self.shape)).ravel()
        self.part(np.flatnonzero(of_warps))

    def clocks(self) -> tuple[float, float]:
        """Clocks of all blocks, one after the other, and those of them that are beside the kernels before."""
        whole, early = (clock.reshape(self.shape) for clock in (self.clock, self._early))
        return float(whole.max(1).sum()), float(early.min(1).sum())


@functools.cache
def registers(step: Instruction) -> tuple[list[int], list[int]]:
    """Numbers of the registers that an instruction reads, and of those that it writes; sums of wgmma are neither."""
    if step.opcode == "wgmma":
        return _numbers(step.operands[1:3]), []
    stores = step.opcode in STORES
    reads = _numbers(step.operands if stores else step.operands[1:]) + _numbers((step.guard,))
    return reads, [] if stores else _numbers(step.operands[:1])


def _numbers(operands) -> list[int]:
    found = []
    for operand in operands:
        if isinstance(operand, Several):
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
