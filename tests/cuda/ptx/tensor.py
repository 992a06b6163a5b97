"""tcgen05: products from tiles in shared memory to tensor memory, started by one thread.

Each block has tensor memory of its own: 128 lanes and 512 columns of 32 bits. A product is computed when it is started.
Its commit arrives at an mbarrier as late as possible, like a bulk copy (bulk.py). Until a warp knows that the phase is
complete, and has executed tcgen05.fence::after_thread_sync since, these errors are reported: loads of the product's
columns, and writes to the tiles that it reads. Other checks: columns that are not allocated, not written or not freed;
lanes of other warps; loaded registers that are used before tcgen05.wait::ld; columns that are overwritten while they
may be loaded; tiles without fence.proxy.async; products of several lanes; descriptors with invalid fields.
"""

from dataclasses import dataclass

import numpy as np

from .bulk import PIECE, WARP, Commit
from .clusters import _offsets
from .effects import effect
from .findings import Fault
from .operands import address, wide
from .races import WRITE

LANES, COLUMNS = 128, 512
UNCOMMITTED = -1
BINDERS = {}        # by the second part of the name of an instruction; those of products: tensor_products.py


@dataclass(eq=False)
class Tag:
    """What must be complete before columns or tiles may be used again: a phase of an mbarrier (bulk.py), by its column
    in the vector clocks; UNCOMMITTED before the commit, 0 for nothing."""

    column: np.ndarray
    phase: np.ndarray

    @classmethod
    def of(cls, count: int) -> "Tag":
        """Tags of nothing."""
        return cls(np.zeros(count, np.int32), np.zeros(count, np.int32))

    def missing(self, index: np.ndarray, clocks: np.ndarray) -> bool:
        """Whether something at these places may be pending for a warp with these clocks."""
        column = self.column[index]
        known = column > 0
        return bool((column == UNCOMMITTED).any()
                    or (clocks[column[known]] <= self.phase[index][known]).any())


class TensorMemory:
    """The tensor memory of the blocks of one launch, and the products that are pending.

    words, written: [block, lane, column]. allocated: [block, column]. products: tags of columns; owner: the lanes that
    have started their last products. tiles: tags of pieces of shared memory that products read. scales: tags of columns
    from which products read scales. loaded: clock of each warp's last load of a column.
    """

    def __init__(self, machine):
        self.machine, blocks, warps = machine, machine.blocks, machine.grid.threads // WARP
        self.words = np.full((blocks, LANES, COLUMNS), np.nan, np.float32)
        self.written = np.zeros(self.words.shape, bool)
        self.allocated, self.closed = np.zeros((blocks, COLUMNS), bool), np.zeros(blocks, bool)
        self.products = Tag.of(blocks * COLUMNS)
        self.owner = np.full(blocks * COLUMNS, -1, np.int32)
        self.tiles, self.scales = Tag.of(machine.shared.bytes.size // PIECE), Tag.of(blocks * COLUMNS)
        self.started: dict[int, list] = {}             # by lane: places of products, tiles and scales before the commit
        self.committed: dict[int, dict[int, int]] = {}  # by lane: phases of mbarriers that its commits complete
        self.loaded = np.zeros((blocks * COLUMNS, warps), np.int32)
        self.released = np.zeros(blocks * warps, np.int32)      # clock of each warp's last fence before a barrier
        self.acquired = np.zeros((blocks * warps, blocks * warps), np.int32)    # clocks at its last fence after one
        self.loading: dict[int, np.ndarray] = {}       # by register: lanes whose load has not been waited for

    def place(self, step, where: int, count: int, block: int) -> tuple[int, np.ndarray]:
        """The lane of an address, and the indices of `count` columns.

        Raises:
            Fault: they are not allocated.
        """
        lane, column = where >> 16, where & 0xFFFF
        if column + count > COLUMNS or not self.allocated[block, column:column + count].all():
            raise Fault(f"columns {column} .. {column + count - 1} of tensor memory are not allocated: {step.text}")
        return lane, block * COLUMNS + column + np.arange(count)

    # ---- fences

    def before(self, mask) -> None:
        """tcgen05.fence::before_thread_sync."""
        clocks = self.machine.bulk.clocks
        for warp in self._warps(mask):
            self.released[warp] = clocks[warp, warp]
            clocks[warp, warp] += 1

    def after(self, mask) -> None:
        """tcgen05.fence::after_thread_sync."""
        clocks, warps = self.machine.bulk.clocks, self.released.size
        more = clocks.shape[1] - self.acquired.shape[1]
        if more:
            self.acquired = np.pad(self.acquired, ((0, 0), (0, more)))
        for warp in self._warps(mask):
            known = np.concatenate((np.minimum(clocks[warp, :warps], self.released), clocks[warp, warps:]))
            self.acquired[warp] = np.maximum(self.acquired[warp], known)

    def _warps(self, mask) -> list[int]:
        return sorted(set((self.machine.lanes(mask) // WARP).tolist()))

    def _known(self, warp: int) -> np.ndarray:
        """What a warp knows of others, with fences; of itself everything."""
        size = self.machine.bulk.clocks.shape[1]
        known = np.zeros(size, np.int32)
        known[:self.acquired.shape[1]] = self.acquired[warp]
        known[warp] = self.machine.bulk.clocks[warp, warp]
        return known

    # ---- allocation

    def allocate(self, step, block: int, columns: int) -> int:
        """Allocate columns of a block: the first one."""
        if self.closed[block]:
            raise Fault(f"tensor memory is allocated after tcgen05.relinquish_alloc_permit: {step.text}")
        first = COLUMNS - columns - int(self.allocated[block].sum())
        if columns < 32 or columns & columns - 1 or first < 0:
            raise Fault(f"{columns} columns of tensor memory cannot be allocated: {step.text}")
        self.allocated[block, first:first + columns] = True
        return first

    def free(self, step, block: int, warp: int, where: int, columns: int) -> None:
        """Free columns of a block."""
        _, index = self.place(step, where, columns, block)
        if self.products.missing(index, self._known(warp)):
            self.machine.note(f"tensor memory is freed before the products into it are complete: {step.text}")
        self._check_loaded(step, index, warp, "freed")
        self.allocated[block, index - block * COLUMNS] = False
        self.written[block, :, index - block * COLUMNS] = False

    def _check_loaded(self, step, index, warp: int, what: str) -> None:
        of_block = self.loaded.shape[1]
        first = warp // of_block * of_block
        if (self.loaded[index] > self._known(warp)[first:first + of_block]).any():
            self.machine.note(f"tensor memory is {what} while other warps may load it: {step.text}")

    # ---- products

    def start(self, step, lane: int, index: np.ndarray, pieces: np.ndarray, scales: np.ndarray) -> None:
        """A product or copy of a lane into columns, from pieces of shared memory, with columns that have scales."""
        warp = lane // WARP
        self._check_loaded(step, index, warp, "overwritten")
        if self.products.missing(index[self.owner[index] != lane], self._known(warp)):
            self.machine.note(f"tensor memory is used before another thread's products are complete: {step.text}")
        if self.scales.missing(index, self.machine.bulk.clocks[warp]):
            self.machine.note(f"tensor memory is overwritten while a product may read scales in it: {step.text}")
        if self.products.missing(scales[self.owner[scales] != lane], self._known(warp)):
            self.machine.note(f"scales are used before another thread's copies are complete: {step.text}")
        for tag, at in ((self.products, index), (self.tiles, pieces), (self.scales, scales)):
            tag.column[at] = UNCOMMITTED
        self.owner[index] = lane
        self.started.setdefault(lane, []).append((index, pieces, scales))

    def commit(self, step, lane: int, offset: int) -> None:
        """tcgen05.commit of a lane: the arrival at an mbarrier is in flight."""
        bulk, warp = self.machine.bulk, lane // WARP
        mbarrier = bulk.mbarrier_at(step, offset, warp, True)
        earlier = sum(isinstance(other, Commit) and other.mbarrier is mbarrier for other in bulk.in_flight)
        phase = mbarrier.phase + earlier // mbarrier.arrivals
        for places in self.started.pop(lane, []):
            for tag, at in zip((self.products, self.tiles, self.scales), places):
                tag.column[at], tag.phase[at] = mbarrier.column, phase
        done = self.committed.setdefault(lane, {})
        done[mbarrier.column] = phase + 1
        clock = bulk._publish(warp)
        for column, over in done.items():
            clock[column] = max(clock[column], over)
        time = self.machine.timeline.products_end(warp) if self.machine.timeline else 0.0
        bulk.in_flight.append(Commit(mbarrier, lane, clock, time))

    def check_write(self, step, offset: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Check writes of lanes to shared memory, which products may still read."""
        if not self.tiles.column.any():
            return
        pieces = offset // PIECE
        tagged = self.tiles.column[pieces] != 0
        for warp in set((lanes[tagged] // WARP).tolist()) if tagged.any() else ():
            if self.tiles.missing(pieces[tagged & (lanes // WARP == warp)], self.machine.bulk.clocks[warp]):
                self.machine.note(f"shared memory is written while tcgen05.mma may read it: {step.text}")

    # ---- loads

    def look(self, number: int, mask) -> None:
        """Check a use of a register that tcgen05.ld writes."""
        lanes = self.loading.get(number)
        if lanes is not None and (lanes & self.machine.active(mask)).any():
            self.machine.note(f"a register is used before tcgen05.wait::ld: {self.machine.where}")

    def wait_loads(self, mask) -> None:
        """tcgen05.wait::ld of these lanes."""
        active = self.machine.active(mask)
        self.loading = {number: lanes & ~active for number, lanes in self.loading.items() if (lanes & ~active).any()}

    def end(self) -> None:
        """Checks after all threads have exited."""
        clocks, of_block = self.machine.bulk.clocks, self.loaded.shape[1]
        for lane, phases in self.committed.items():
            first = lane // WARP // of_block * of_block
            if any(clocks[first:first + of_block, column].max() < over for column, over in phases.items()):
                self.machine.note("threads exit without waiting for the phase of a tcgen05.commit")
        if self.started:
            self.machine.note("products are never committed (tcgen05.commit)")
        if self.allocated.any():
            self.machine.note("threads exit before they free tensor memory (tcgen05.dealloc)")
        if self.loading:
            self.machine.note("threads exit before tcgen05.wait::ld")


@effect("tcgen05")
def _tensor(step):
    """The instructions by the second part of their names."""
    what = step.parts[0]
    if "cta_group_2" in step.parts or what not in BINDERS:
        raise Fault(f"no such tcgen05 here: {step.text}")
    return BINDERS[what](step)


def _allocation(step):
    count, to = wide(step.operands[-1], "u32"), step.operands[0]
    where = address(to) if step.parts[0] == "alloc" else wide(to, "u32")

    def run(machine, mask):
        for warp in np.flatnonzero(machine.whole_warps(mask)).tolist():
            lane, block = warp * WARP, warp * WARP // machine.grid.threads
            columns = int(count(machine)[lane])
            if step.parts[0] == "dealloc":
                machine.tensor.free(step, block, warp, int(where(machine)[lane]), columns)
                continue
            first, lanes = machine.tensor.allocate(step, block, columns), np.array([lane], np.int32)
            memory, offset = machine.check_access(step, "shared", where(machine), 4, lanes, WRITE)
            memory.view(np.uint32)[offset // 4] = first
    return run


def _relinquish(step):
    def run(machine, mask):
        warps = np.flatnonzero(machine.whole_warps(mask))
        machine.tensor.closed[warps * WARP // machine.grid.threads] = True
    return run


def _fence(step):
    return lambda machine, mask: machine.tensor.before(mask) if "fence_before_thread_sync" in step.parts \
        else machine.tensor.after(mask)


def _wait(step):
    if step.parts[0] != "wait_ld":
        raise Fault(f"no such tcgen05 here: {step.text}")

    def run(machine, mask):
        machine.whole_warps(mask)
        machine.tensor.wait_loads(mask)
    return run


def _commit(step):
    where = address(step.operands[0])
    if "mbarrier_arrive_one" not in step.parts or len(step.operands) > 1:
        raise Fault(f"no such tcgen05 here: {step.text}")

    def run(machine, mask):
        lanes = one_of_each_warp(machine, step, mask)
        if lanes.size:
            for lane, offset in zip(lanes.tolist(), _offsets(machine, step, where(machine), lanes, 8, True).tolist()):
                machine.tensor.commit(step, lane, offset)
    return run


def one_of_each_warp(machine, step, mask) -> np.ndarray:
    lanes = machine.lanes(mask)
    if np.unique(lanes // WARP).size < lanes.size:
        machine.note(f"several lanes of a warp execute {step.opcode}.{step.parts[0]}, each for itself: {step.text}")
    return lanes


def _load(step):
    """tcgen05.ld of shape 32x32b: lane l of the warp gets adjacent columns of lane l of the warp's quarter."""
    registers = step.operands[0].parts
    if "32x32b" not in step.parts or f"x{len(registers)}" not in step.parts:
        raise Fault(f"no such tcgen05 here: {step.text}")
    where, count = address(step.operands[1]), len(registers)

    def run(machine, mask):
        warps = np.flatnonzero(machine.whole_warps(mask))
        tensor, of_block = machine.tensor, machine.grid.threads // WARP
        places = machine.spread(np.asarray(where(machine)))
        found = np.zeros((machine.n, count), np.float32)
        for warp in warps.tolist():
            lanes, block = slice(warp * WARP, (warp + 1) * WARP), warp // of_block
            if (places[lanes] != places[lanes][0]).any():
                raise Fault(f"lanes of a warp load different addresses of tensor memory: {step.text}")
            lane, index = tensor.place(step, int(places[lanes][0]), count, block)
            if lane != warp % of_block % 4 * WARP:
                raise Fault(f"warp {warp % of_block} accesses tensor memory from lane {lane} on: {step.text}")
            columns = index - block * COLUMNS
            if tensor.products.missing(index, machine.bulk.clocks[warp]):
                machine.note(f"tensor memory is loaded before the products into it are complete: {step.text}")
            elif tensor.products.missing(index, tensor._known(warp)):
                machine.note(f"tensor memory is loaded without tcgen05.fence::after_thread_sync: {step.text}")
            if machine.checks.unwritten and not tensor.written[block, lane:lane + WARP, columns].all():
                machine.note(f"tensor memory is read before it is written: {step.text}")
            tensor.loaded[index, warp % of_block] = machine.bulk.clocks[warp, warp]
            found[lanes] = tensor.words[block, lane:lane + WARP, columns[0]:columns[0] + count]
        lanes = machine.lanes(mask)
        for number, register in enumerate(registers):
            machine.put_lanes(register, found[lanes, number], lanes, mask)
            old = tensor.loading.get(register.number)
            active = machine.active(mask)
            tensor.loading[register.number] = active.copy() if old is None else old | active
    return run


BINDERS.update({"alloc": _allocation, "dealloc": _allocation, "relinquish_alloc_permit": _relinquish,
                "fence_before_thread_sync": _fence, "fence_after_thread_sync": _fence, "wait_ld": _wait,
                "commit": _commit, "ld": _load})
