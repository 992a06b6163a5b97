"""Copies in bulk, the mbarriers that they tell, barriers of clusters: what is on its way, and who knows what is done.

Bytes land as late as they may: when nobody can go on without them, one copy at a time, or under a seed at some time
before. Whether an access is in order does not depend on that: each warp has a clock, and knows of each other warp up to
which of its clocks all is done, and of each mbarrier which turns are over. Barriers hand on what is known, and so do
arrivals to those who wait for them. Lanes of a warp are taken to be one.

Noted are: memory touched before the warp knows that the turn of the copy into it is over; copies begun over memory
whose accesses the warp does not know to be done, or over another copy; mbarriers used by those who cannot know that
they are made; arrivals at, and copies to, a block that can end without knowing of them.
"""

from dataclasses import dataclass, field

import numpy as np

from .findings import Fault

WARP = 32
PIECE = 16             # bytes of the grain at which accesses are kept
ON_ITS_WAY = 1 << 30   # clock of an access that has not ended
REMOTE = 24            # bits of an address within a block; above them is the rank in the cluster, plus one
_NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False)
class Count:
    """An mbarrier. place: in the memory of all blocks; column: of what is known; maker, made: warp, and its clock then;
    left, owed: arrivals and bytes that its turn waits for; told: what those who arrived in this turn know, done: and in
    turns before; time, last: clocks of the turn and of the one before."""

    place: int
    block: int
    column: int
    arrivals: int
    maker: int
    made: int
    left: int = 0
    owed: int = 0
    turn: int = 0
    shown: bool = False
    told: np.ndarray = field(default_factory=lambda: _NOTHING)
    done: np.ndarray = field(default_factory=lambda: _NOTHING)
    time: float = 0.0
    last: float = 0.0


@dataclass(eq=False)
class Flight:
    """Bytes on their way to a place of one block, of which a count is told."""

    count: Count
    place: int
    data: np.ndarray
    time: float


class Bulk:
    """Copies, counts and clusters of one launch."""

    def __init__(self, machine):
        self.machine, grid = machine, machine.grid
        self.of_block, warps = grid.threads // WARP, machine.n // WARP
        self.known = np.zeros((warps, warps), np.int32)    # [who, of whom]; behind the warps, turns of counts
        np.fill_diagonal(self.known, 1)
        self.counts: dict[int, Count] = {}
        self._number = np.full(machine.shared.bytes.size // 8, -1)          # of counts by place, for these two
        self._makers, self._turns = (np.zeros(0, np.int32) for _ in range(2))
        self.flights: list[Flight] = []
        pieces = machine.shared.bytes.size // PIECE
        self.touched = np.zeros((pieces, self.of_block), np.int32)          # clocks of accesses by warps of the block
        self.column, self.turn = np.zeros(pieces, np.int32), np.zeros(pieces, np.int32)   # of the last copy: its count
        self.polled = np.zeros(machine.n, bool)             # lanes that were told once that they must wait
        self.came, self.went = np.zeros(machine.n, np.int32), np.zeros(machine.n, np.int32)   # barriers of the cluster
        self.met: dict[tuple[int, int], np.ndarray] = {}    # what those who came know, by cluster and number
        self.times: dict[tuple[int, int], float] = {}
        self.abroad: list[tuple[int, int, int, int, str]] = []   # block, warp, clock, column or -1, what

    # ---- who knows what

    def _clock(self, warp: int) -> int:
        return int(self.known[warp, warp])

    def _hand_on(self, warp: int) -> np.ndarray:
        """What a warp knows, itself included; what it does from here on is later."""
        told = self.known[warp].copy()
        self.known[warp, warp] += 1
        return told

    def _learn(self, warp: int, told: np.ndarray) -> None:
        own = self.known[warp]
        np.maximum(own[:told.size], told, out=own[:told.size])

    def meet(self, mask) -> None:
        """Lanes of these blocks have passed a barrier."""
        for block in np.flatnonzero(self.machine.active(mask).reshape(self.machine.blocks, -1).any(1)).tolist():
            warps = slice(block * self.of_block, (block + 1) * self.of_block)
            self.known[warps] = self.known[warps].max(0)
            at = np.arange(warps.start, warps.stop)
            self.known[at, at] += 1

    # ---- accesses

    def touch(self, step, offset, lanes) -> None:
        """Lanes access shared memory at these places."""
        piece, warp = offset // PIECE, lanes // WARP
        self._is_there(step, piece, warp)
        self.touched[piece, warp % self.of_block] = self.known[warp, warp]

    def _is_there(self, step, piece, warp) -> None:
        column = self.column[piece]
        if column.any():
            of = column > 0
            if (self.known[warp[of], column[of]] <= self.turn[piece[of]]).any():
                self.machine.note(f"shared memory is touched before the turn of its mbarrier is over: {step.text}")

    def keep(self, offset, lanes) -> None:
        """Accesses of these lanes go on in the background."""
        self.touched[offset // PIECE, lanes // WARP % self.of_block] = ON_ITS_WAY

    def release(self, offset, lanes) -> None:
        """They have ended."""
        warp = lanes // WARP
        self.touched[offset // PIECE, warp % self.of_block] = self.known[warp, warp]

    # ---- mbarriers

    def make(self, place: int, lane: int, arrivals: int) -> None:
        """mbarrier.init."""
        warp, block = lane // WARP, place // self.machine.shared.pitch
        self.known = np.concatenate((self.known, np.zeros((len(self.known), 1), np.int32)), 1)
        self.counts[place] = Count(place, block, self.known.shape[1] - 1, arrivals, warp, self._clock(warp), arrivals)
        self._number[place // 8] = self._turns.size
        self._makers, self._turns = np.append(self._makers, np.int32(warp)), np.append(self._turns, np.int32(0))

    def show(self, mask) -> None:
        """fence.mbarrier_init of these lanes."""
        warps = set((self.machine.lanes(mask) // WARP).tolist())
        for count in self.counts.values():
            count.shown = count.shown or count.maker in warps

    def count_at(self, step, place: int, warp: int, far: bool = False) -> Count:
        """The mbarrier at a place, as this warp finds it. far: from another block, or for the copy engine."""
        if place not in self.counts:
            raise Fault(f"no mbarrier was made where one is used: {step.text}")
        count = self.counts[place]
        if warp != count.maker and self.known[warp, count.maker] < count.made:
            self.machine.note(f"an mbarrier is used by those who cannot know that it was made: {step.text}")
        if far and not count.shown:
            self.machine.note(f"an mbarrier is used elsewhere without fence.mbarrier_init: {step.text}")
        return count

    def arrive(self, step, place: int, lane: int, nbytes: int = 0) -> None:
        """A lane arrives, and says how many bytes will come."""
        warp = lane // WARP
        own = place // self.machine.shared.pitch == warp // self.of_block
        count = self.count_at(step, place, warp, not own)
        if not own:
            self.abroad.append((count.block, warp, self._clock(warp), -1, step.text))
        count.told = _joined(count.told, self._hand_on(warp))
        count.owed += nbytes
        count.left -= 1
        if count.left < 0:
            self.machine.note(f"more threads arrive at an mbarrier than it has: {step.text}")
        count.time = max(count.time, self._now(warp))
        self._end_turn(count)

    def _end_turn(self, count: Count) -> None:
        if count.left or count.owed:
            return
        count.done = _joined(count.done, count.told)
        count.told, count.last, count.time = _NOTHING, max(count.last, count.time), 0.0
        count.turn, count.left = count.turn + 1, count.arrivals
        self._turns[self._number[count.place // 8]] = count.turn

    def is_over(self, step, places, parities, lanes) -> np.ndarray:
        """Whether the turn is over that each lane asks for."""
        number, warp = self._number[places // 8], lanes // WARP
        if (number < 0).any() or (self.known[warp, self._makers[number]] == 0).any():
            for place, who in set(zip(places.tolist(), warp.tolist())):
                self.count_at(step, place, who)
        return self._turns[number] & 1 != parities & 1

    def missing(self, places) -> str:
        """What the turns of these counts wait for."""
        counts = [self.counts[place] for place in sorted(set(places.tolist()))]
        return ", ".join(f"turn {count.turn} of an mbarrier lacks {count.left} arrivals and {count.owed} bytes"
                         for count in counts[:2])

    def learn_turns(self, places, lanes) -> None:
        """These lanes have seen turns end."""
        for place, warp in set(zip(places.tolist(), (lanes // WARP).tolist())):
            count = self.counts[place]
            self._learn(warp, count.done)
            self.known[warp, count.column] = max(self.known[warp, count.column], count.turn)
            if self.machine.timeline:
                self.machine.timeline.until(warp, count.last)

    # ---- copies

    def send(self, step, places, counts, data: np.ndarray, lane: int, latency: float) -> None:
        """A lane begins a copy to places of some blocks, each with a count of its own."""
        warp, time = lane // WARP, self._now(lane // WARP) + latency
        for place, at in zip(places, counts):
            block = place // self.machine.shared.pitch
            own = block == warp // self.of_block
            count = self.count_at(step, at, warp, True)
            piece = np.arange(place // PIECE, (place + data.size) // PIECE)
            if (self.touched[piece] > self.known[warp, block * self.of_block:(block + 1) * self.of_block]).any():
                self.machine.note(f"a bulk copy goes to memory that may still be in use: {step.text}")
            column = self.column[piece]
            if ((column > 0) & (self.known[warp, column] <= self.turn[piece])).any():
                self.machine.note(f"a bulk copy goes where another may be on its way: {step.text}")
            self.column[piece], self.turn[piece] = count.column, count.turn
            if not own:
                self.abroad.append((block, warp, count.turn, count.column, step.text))
            self.flights.append(Flight(count, place, data, time))

    def land(self, number: int) -> None:
        """The bytes of a copy have come."""
        flight, machine = self.flights.pop(number), self.machine
        place, size = flight.place, flight.data.size
        if not machine.alive.reshape(machine.blocks, -1)[flight.count.block].any():
            machine.note("a bulk copy comes to a block that has ended")
        machine.shared.bytes[place:place + size] = flight.data
        machine.shared.written[place:place + size] = True
        if machine.tiles:
            machine.tiles.unfenced[place // 4:(place + size) // 4] = 0
        flight.count.owed -= size
        flight.count.time = max(flight.count.time, flight.time)
        self._end_turn(flight.count)

    def _now(self, warp: int) -> float:
        return float(self.machine.timeline.clock[warp]) if self.machine.timeline else 0.0

    # ---- clusters

    def come(self, mask) -> None:
        """barrier.cluster.arrive."""
        machine = self.machine
        lanes = machine.lanes(mask)
        for warp in sorted(set((lanes // WARP).tolist())):
            key = warp // self.of_block // machine.grid.cluster, int(self.came[warp * WARP])
            self.met[key] = _joined(self.met.get(key, _NOTHING), self._hand_on(warp))
            self.times[key] = max(self.times.get(key, 0.0), self._now(warp))
        self.came[lanes] += 1

    def all_came(self) -> np.ndarray:
        """Lanes whose cluster has come to the barrier that they wait for next."""
        machine = self.machine
        size = machine.grid.cluster * machine.grid.threads
        came = np.where(machine.alive, self.came, np.iinfo(np.int32).max).reshape(-1, size).min(1)
        return self.went < np.repeat(came, size)

    def go(self, mask) -> None:
        """barrier.cluster.wait."""
        machine = self.machine
        lanes = machine.lanes(mask)
        for warp in sorted(set((lanes // WARP).tolist())):
            key = warp // self.of_block // machine.grid.cluster, int(self.went[warp * WARP])
            self._learn(warp, self.met[key])
            if machine.timeline:
                machine.timeline.until(warp, self.times[key])
        self.went[lanes] += 1

    def end(self) -> None:
        """All threads have ended."""
        if self.flights:
            self.machine.note("blocks end while bulk copies are on their way to them")
        for block, warp, clock, column, text in self.abroad:
            known = self.known[block * self.of_block:(block + 1) * self.of_block]
            if (known[:, warp] < clock if column < 0 else known[:, column] <= clock).all():
                self.machine.note(f"a block may have ended when another reaches for it: {text}")
        if (self.came != self.went).any():
            self.machine.note("threads end between barrier.cluster.arrive and wait")


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What both know; mbarriers that were made later are behind those of before."""
    size = max(a.size, b.size)
    return np.maximum(np.pad(a, (0, size - a.size)), np.pad(b, (0, size - b.size)))
