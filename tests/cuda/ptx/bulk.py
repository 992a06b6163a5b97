"""Bulk copies (cp.async.bulk), mbarriers and cluster barriers: copies in flight, and the happens-before relation.

The bytes of a copy arrive as late as possible: when no lane can continue without them, one copy at a time; with a seed,
some arrive earlier. The checks do not depend on the time of arrival. They use vector clocks: each warp has a logical
clock, and knows for each other warp up to which of its clock values everything happens before, and for each mbarrier
which phases are complete. Block and cluster barriers pass this knowledge on, and so do arrivals at an mbarrier to those
who wait for the phase. The lanes of a warp count as one.

Reported are: accesses to memory without knowledge that the phase of the bulk copy into it is complete; copies to memory
whose earlier accesses need not have finished, or over another copy in flight; mbarriers used without synchronisation
with their initialisation; arrivals at, and copies to, a block that may exit first.
"""

from dataclasses import dataclass, field

import numpy as np

from .findings import Fault

WARP = 32
PIECE = 16             # granularity of the log of accesses, in bytes
ON_ITS_WAY = 1 << 30   # clock of an access that is still in progress
REMOTE = 24            # bits of a shared-memory address; the bits above are the block's rank in the cluster, plus 1
_NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier.

    offset: in the shared memory of all blocks. column: in the vector clocks. arrivals: expected in each phase.
    init_warp, init_clock: the warp that initialised the mbarrier, and the warp's clock then.
    pending_arrivals, pending_bytes: what the current phase still waits for. phase: number of completed phases.
    is_fenced: whether fence.mbarrier_init was executed. arrived_clock: joined vector clocks of the arrivals of this
    phase. completed_clock: the same of all completed phases. time, last: when this phase and the previous one complete
    (timeline.py).
    """

    offset: int
    block: int
    column: int
    arrivals: int
    init_warp: int
    init_clock: int
    pending_arrivals: int = 0
    pending_bytes: int = 0
    phase: int = 0
    is_fenced: bool = False
    arrived_clock: np.ndarray = field(default_factory=lambda: _NOTHING)
    completed_clock: np.ndarray = field(default_factory=lambda: _NOTHING)
    time: float = 0.0
    last: float = 0.0


@dataclass(eq=False)
class BulkCopy:
    """A bulk copy in flight to one block. mbarrier: the one to which its bytes count. offset: of the destination."""

    mbarrier: Mbarrier
    offset: int
    data: np.ndarray
    time: float


@dataclass(eq=False)
class Commit:
    """An arrival at an mbarrier that is in flight: products of a lane (tensor.py). clock: the lane's vector clock."""

    mbarrier: Mbarrier
    lane: int
    clock: np.ndarray
    time: float


class Bulk:
    """Bulk copies, mbarriers and cluster barriers of one launch."""

    def __init__(self, machine):
        self.machine, grid = machine, machine.grid
        self.of_block, warps = grid.threads // WARP, machine.n // WARP
        self.clocks = np.zeros((warps, warps), np.int32)    # vector clocks [warp, warp]; further columns: phases
        np.fill_diagonal(self.clocks, 1)
        self.mbarriers: dict[int, Mbarrier] = {}
        self._number = np.full(machine.shared.bytes.size // 8, -1)          # index of the mbarrier at each word
        self._makers, self._phases = (np.zeros(0, np.int32) for _ in range(2))
        self.in_flight: list[BulkCopy | Commit] = []
        pieces = machine.shared.bytes.size // PIECE
        self.access_clock = np.zeros((pieces, self.of_block), np.int32)     # clock of each warp's last access
        self.column, self.phase = (np.zeros(pieces, np.int32) for _ in range(2))   # mbarrier and phase of the last copy
        self.polled = np.zeros(machine.n, bool)             # lanes that have polled an incomplete phase once
        self.arrived, self.waited = (np.zeros(machine.n, np.int32) for _ in range(2))   # cluster barriers of each lane
        self.arrival_clocks: dict[tuple[int, int], np.ndarray] = {}    # joined, by cluster and number of the barrier
        self.times: dict[tuple[int, int], float] = {}
        self.remote_accesses: list[tuple[int, int, int, int, str]] = []   # block, warp, clock, column or -1, text

    # ---- vector clocks

    def _clock(self, warp: int) -> int:
        return int(self.clocks[warp, warp])

    def _publish(self, warp: int) -> np.ndarray:
        """A copy of a warp's vector clock; then advance the warp's own clock."""
        published = self.clocks[warp].copy()
        self.clocks[warp, warp] += 1
        return published

    def _learn(self, warp: int, published: np.ndarray) -> None:
        own = self.clocks[warp]
        np.maximum(own[:published.size], published, out=own[:published.size])

    def meet(self, mask) -> None:
        """A block barrier of these lanes: join the vector clocks of the block's warps."""
        for block in np.flatnonzero(self.machine.active(mask).reshape(self.machine.blocks, -1).any(1)).tolist():
            warps = slice(block * self.of_block, (block + 1) * self.of_block)
            self.clocks[warps] = self.clocks[warps].max(0)
            at = np.arange(warps.start, warps.stop)
            self.clocks[at, at] += 1

    # ---- accesses

    def access(self, step, offset, lanes) -> None:
        """Check and log accesses of these lanes to shared memory."""
        piece, warp = offset // PIECE, lanes // WARP
        self._check_copied(step, piece, warp)
        self.access_clock[piece, warp % self.of_block] = self.clocks[warp, warp]

    def _check_copied(self, step, piece, warp) -> None:
        column = self.column[piece]
        if column.any():
            of = column > 0
            if (self.clocks[warp[of], column[of]] <= self.phase[piece[of]]).any():
                self.machine.note("shared memory is accessed before the mbarrier phase of the bulk copy into it is "
                                  f"complete: {step.text}")

    def begin_access(self, offset, lanes) -> None:
        """Mark accesses of these lanes as still in progress (tiles that wgmma reads)."""
        self.access_clock[offset // PIECE, lanes // WARP % self.of_block] = ON_ITS_WAY

    def end_access(self, offset, lanes) -> None:
        """Mark accesses of these lanes as finished."""
        warp = lanes // WARP
        self.access_clock[offset // PIECE, warp % self.of_block] = self.clocks[warp, warp]

    # ---- mbarriers

    def init(self, offset: int, lane: int, arrivals: int) -> None:
        """mbarrier.init."""
        warp, block = lane // WARP, offset // self.machine.shared.pitch
        self.clocks = np.concatenate((self.clocks, np.zeros((len(self.clocks), 1), np.int32)), 1)
        self.mbarriers[offset] = Mbarrier(offset, block, self.clocks.shape[1] - 1, arrivals, warp, self._clock(warp),
                                          arrivals)
        self._number[offset // 8] = self._phases.size
        self._makers, self._phases = np.append(self._makers, np.int32(warp)), np.append(self._phases, np.int32(0))

    def fence_init(self, mask) -> None:
        """fence.mbarrier_init of these lanes."""
        warps = set((self.machine.lanes(mask) // WARP).tolist())
        for mbarrier in self.mbarriers.values():
            mbarrier.is_fenced = mbarrier.is_fenced or mbarrier.init_warp in warps

    def mbarrier_at(self, step, offset: int, warp: int, remote_use: bool = False) -> Mbarrier:
        """The mbarrier at an offset, checked for use by this warp. remote_use: by another block or a bulk copy."""
        if offset not in self.mbarriers:
            raise Fault(f"no mbarrier was made where one is used: {step.text}")
        mbarrier = self.mbarriers[offset]
        if warp != mbarrier.init_warp and self.clocks[warp, mbarrier.init_warp] < mbarrier.init_clock:
            self.machine.note(f"an mbarrier is used without synchronisation with its initialisation: {step.text}")
        if remote_use and not mbarrier.is_fenced:
            self.machine.note("an mbarrier is used by another block or a bulk copy without fence.mbarrier_init: "
                              f"{step.text}")
        return mbarrier

    def arrive(self, step, offset: int, lane: int, nbytes: int = 0) -> None:
        """mbarrier.arrive of a lane, which announces `nbytes` bytes (expect_tx)."""
        warp = lane // WARP
        own = offset // self.machine.shared.pitch == warp // self.of_block
        mbarrier = self.mbarrier_at(step, offset, warp, not own)
        if not own:
            self.remote_accesses.append((mbarrier.block, warp, self._clock(warp), -1, step.text))
        mbarrier.arrived_clock = _joined(mbarrier.arrived_clock, self._publish(warp))
        mbarrier.pending_bytes += nbytes
        mbarrier.pending_arrivals -= 1
        if mbarrier.pending_arrivals < 0:
            self.machine.note(f"more threads arrive at an mbarrier than it expects: {step.text}")
        mbarrier.time = max(mbarrier.time, self._now(warp))
        self._complete_phase(mbarrier)

    def _complete_phase(self, mbarrier: Mbarrier) -> None:
        if mbarrier.pending_arrivals or mbarrier.pending_bytes:
            return
        mbarrier.completed_clock = _joined(mbarrier.completed_clock, mbarrier.arrived_clock)
        mbarrier.arrived_clock, mbarrier.last, mbarrier.time = _NOTHING, max(mbarrier.last, mbarrier.time), 0.0
        mbarrier.phase, mbarrier.pending_arrivals = mbarrier.phase + 1, mbarrier.arrivals
        self._phases[self._number[mbarrier.offset // 8]] = mbarrier.phase

    def is_complete(self, step, offsets, parities, lanes) -> np.ndarray:
        """Whether the phase with each lane's parity is complete."""
        index, warp = self._number[offsets // 8], lanes // WARP
        if (index < 0).any() or (self.clocks[warp, self._makers[index]] == 0).any():
            for offset, user in set(zip(offsets.tolist(), warp.tolist())):
                self.mbarrier_at(step, offset, user)
        return self._phases[index] & 1 != parities & 1

    def missing(self, offsets) -> str:
        """Text: what the phases of these mbarriers still wait for."""
        mbarriers = [self.mbarriers[offset] for offset in sorted(set(offsets.tolist()))]
        return ", ".join(f"phase {mbarrier.phase} of an mbarrier lacks {mbarrier.pending_arrivals} arrivals and "
                         f"{mbarrier.pending_bytes} bytes" for mbarrier in mbarriers[:2])

    def learn_phases(self, offsets, lanes) -> None:
        """These lanes have seen phases complete: join the clocks of the arrivals into their warps' clocks."""
        for offset, warp in set(zip(offsets.tolist(), (lanes // WARP).tolist())):
            mbarrier = self.mbarriers[offset]
            self._learn(warp, mbarrier.completed_clock)
            self.clocks[warp, mbarrier.column] = max(self.clocks[warp, mbarrier.column], mbarrier.phase)
            if self.machine.timeline:
                self.machine.timeline.until(warp, mbarrier.last)

    # ---- copies

    def start_copy(self, step, offsets, mbarriers, data: np.ndarray, lane: int, latency: float) -> None:
        """Start a copy of a lane to one or several blocks, each with an mbarrier of its own."""
        warp, time = lane // WARP, self._now(lane // WARP) + latency
        for offset, mbarrier_offset in zip(offsets, mbarriers):
            block = offset // self.machine.shared.pitch
            own = block == warp // self.of_block
            mbarrier = self.mbarrier_at(step, mbarrier_offset, warp, True)
            piece = np.arange(offset // PIECE, (offset + data.size) // PIECE)
            if (self.access_clock[piece] > self.clocks[warp, block * self.of_block:(block + 1) * self.of_block]).any():
                self.machine.note(f"a bulk copy goes to memory that may still be in use: {step.text}")
            column = self.column[piece]
            if ((column > 0) & (self.clocks[warp, column] <= self.phase[piece])).any():
                self.machine.note(f"a bulk copy overlaps another that may be in flight: {step.text}")
            self.column[piece], self.phase[piece] = mbarrier.column, mbarrier.phase
            if self.machine.tensor:
                self.machine.tensor.check_write(step, PIECE * piece, PIECE, np.full(piece.size, lane, np.int32))
            if not own:
                self.remote_accesses.append((block, warp, mbarrier.phase, mbarrier.column, step.text))
            self.in_flight.append(BulkCopy(mbarrier, offset, data, time))

    def complete_copy(self, number: int) -> None:
        """Let the bytes of a copy arrive, or the products of a commit; the products of a lane end in order."""
        if isinstance(self.in_flight[number], Commit):
            lane = self.in_flight[number].lane
            number = next(at for at, other in enumerate(self.in_flight) if getattr(other, "lane", -1) == lane)
        copy, machine = self.in_flight.pop(number), self.machine
        if isinstance(copy, Commit):
            self._complete_products(copy)
            return
        offset, size = copy.offset, copy.data.size
        if not machine.alive.reshape(machine.blocks, -1)[copy.mbarrier.block].any():
            machine.note("a bulk copy arrives at a block that has exited")
        machine.shared.bytes[offset:offset + size] = copy.data
        machine.shared.written[offset:offset + size] = True
        if machine.tiles:
            machine.tiles.unfenced[offset // 4:(offset + size) // 4] = 0
        copy.mbarrier.pending_bytes -= size
        copy.mbarrier.time = max(copy.mbarrier.time, copy.time)
        self._complete_phase(copy.mbarrier)

    def _complete_products(self, commit: Commit) -> None:
        mbarrier = commit.mbarrier
        mbarrier.arrived_clock = _joined(mbarrier.arrived_clock, commit.clock)
        mbarrier.pending_arrivals -= 1
        if mbarrier.pending_arrivals < 0:
            self.machine.note("more arrivals of tcgen05.commit at an mbarrier than it expects")
        mbarrier.time = max(mbarrier.time, commit.time)
        self._complete_phase(mbarrier)

    def _now(self, warp: int) -> float:
        return float(self.machine.timeline.clock[warp]) if self.machine.timeline else 0.0

    # ---- clusters

    def cluster_arrive(self, mask) -> None:
        """barrier.cluster.arrive."""
        machine = self.machine
        lanes = machine.lanes(mask)
        for warp in sorted(set((lanes // WARP).tolist())):
            key = warp // self.of_block // machine.grid.cluster, int(self.arrived[warp * WARP])
            self.arrival_clocks[key] = _joined(self.arrival_clocks.get(key, _NOTHING), self._publish(warp))
            self.times[key] = max(self.times.get(key, 0.0), self._now(warp))
        self.arrived[lanes] += 1

    def cluster_complete(self) -> np.ndarray:
        """Lanes whose whole cluster has arrived at the barrier that they wait for."""
        machine = self.machine
        size = machine.grid.cluster * machine.grid.threads
        arrived = np.where(machine.alive, self.arrived, np.iinfo(np.int32).max).reshape(-1, size).min(1)
        return self.waited < np.repeat(arrived, size)

    def cluster_wait(self, mask) -> None:
        """barrier.cluster.wait."""
        machine = self.machine
        lanes = machine.lanes(mask)
        for warp in sorted(set((lanes // WARP).tolist())):
            key = warp // self.of_block // machine.grid.cluster, int(self.waited[warp * WARP])
            self._learn(warp, self.arrival_clocks[key])
            if machine.timeline:
                machine.timeline.until(warp, self.times[key])
        self.waited[lanes] += 1

    def end(self) -> None:
        """Checks after all threads have exited."""
        if any(isinstance(copy, BulkCopy) for copy in self.in_flight):
            self.machine.note("blocks exit while bulk copies to them are in flight")
        for block, warp, clock, column, text in self.remote_accesses:
            clocks = self.clocks[block * self.of_block:(block + 1) * self.of_block]
            if (clocks[:, warp] < clock if column < 0 else clocks[:, column] <= clock).all():
                self.machine.note(f"a block may exit before a remote access to it: {text}")
        if (self.arrived != self.waited).any():
            self.machine.note("threads exit between barrier.cluster.arrive and wait")


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The join (element-wise maximum) of two vector clocks; the shorter one lacks mbarriers that were made later."""
    size = max(a.size, b.size)
    return np.maximum(np.pad(a, (0, size - a.size)), np.pad(b, (0, size - b.size)))
