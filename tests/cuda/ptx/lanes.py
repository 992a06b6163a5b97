"""The lanes of a launch: registers, checked memory accesses, and asynchronous copies.

A lane is one thread. A register's value is an array over all lanes, or a scalar if it is uniform. Values are replaced,
never modified in place.
"""

from dataclasses import dataclass

import numpy as np

from .counters import Counters, bank_passes, sectors
from .findings import Checks, Fault
from .memory import GlobalMemory, Shadowed, SharedMemory
from .parse import TYPES, Instruction, Kernel, Register
from .races import READ, WRITE, Log
from .timeline import Timeline

WARP = 32
_NAMES = {READ: "read", WRITE: "write"}


@dataclass(frozen=True)
class Grid:
    """A grid of blocks (x, y, z) with `threads` threads each, in one dimension.

    first, count: the range of blocks that run here; count 0 means all. dynamic: bytes of dynamic shared memory.
    cluster: blocks of a thread block cluster, adjacent in x; whole clusters run here.
    """

    blocks: tuple[int, int, int]
    threads: int
    first: int = 0
    count: int = 0
    dynamic: int = 0
    cluster: int = 1


class Lanes:
    """Registers and memory of the lanes of one launch, or of some of its blocks.

    where: text of the current instruction.
    """

    def __init__(self, kernel: Kernel, grid: Grid, arguments: list, memory: GlobalMemory, checks: Checks, name: str,
                 log: Log):
        if grid.threads % WARP:
            raise Fault(f"blocks of {grid.threads} threads are not of whole warps")
        if len(arguments) != len(kernel.parameters):
            raise Fault(f"{len(kernel.parameters)} parameters, {len(arguments)} arguments")
        blocks = grid.count or int(np.prod(grid.blocks))
        if grid.blocks[0] % grid.cluster or grid.first % grid.cluster or blocks % grid.cluster:
            raise Fault(f"blocks {grid.blocks} are not whole clusters of {grid.cluster}")
        self.kernel, self.grid, self.memory, self.checks, self.name = kernel, grid, memory, checks, name
        self.blocks, self.n = blocks, blocks * grid.threads
        self.arguments = {place: value for (_, place), value in zip(kernel.parameters, arguments)}
        self.regs, self.partial, self.carry = [None] * len(kernel.registers), {}, np.uint64(0)
        self.lane = np.arange(self.n, dtype=np.int32)
        self.block = self.lane // np.int32(grid.threads)
        self.thread = self.lane + np.int32(grid.first * grid.threads)
        self.shared = SharedMemory(blocks, kernel.shared_bytes + grid.dynamic)
        self.local = Shadowed(np.full(self.n * max(kernel.local_bytes, 16), 0xFF, np.uint8),
                              np.zeros(self.n * max(kernel.local_bytes, 16), np.bool_))
        self.block_epoch, self.warp_epoch = (np.zeros(self.n, np.int32) for _ in range(2))   # barriers passed
        self.copies, self.group = [], np.zeros(self.n, np.int32)
        self.alive, self.alive_lanes = np.ones(self.n, bool), self.lane
        self.mask, self.rng, self.where = None, None, ""
        self.log_global, self.log_shared = log, Log(True)
        self.counters = checks.counters.setdefault(name, Counters()) if checks.counted else None
        self.timeline = Timeline(blocks, grid.threads // WARP, checks.latencies) if checks.counted else None
        self._specials, self._sectors, self._coming = {}, {}, np.zeros(0, np.int64)
        self.tiles = None                                         # for kernels with wgmma or tcgen05 (tiles.py)
        self.tensor = None                                        # for kernels with tcgen05 (tensor.py)
        self.bulk = None                                          # for kernels with mbarriers or clusters (bulk.py)
        self.not_waited = self.alive if kernel.awaits else None    # lanes that have not passed griddepcontrol.wait

    # ---- registers

    def read(self, number: int):
        """A register's value: an array over all lanes, or a scalar."""
        value = self.regs[number]
        if value is None or number in self.partial:
            value = self._unwritten(number)
        if self.tiles and self.tiles.pending:
            self.tiles.look(number, self.mask)
        if self.tensor and self.tensor.loading:
            self.tensor.look(number, self.mask)
        return value

    def _unwritten(self, number: int):
        value, missing = self.regs[number], self.partial.get(number)
        if self.checks.unwritten and (missing is None or (missing & self.active(self.mask)).any()):
            self.note(f"a register is read before it is written: {self.where}")
            self.partial.pop(number, None)
        if value is None:
            value = self.regs[number] = np.zeros(self.n, TYPES[self.kernel.registers[number]])
        return value

    def put(self, register: Register, value, mask) -> None:
        """Write a register for the lanes of a mask, or for all lanes."""
        number = register.number
        if number < 0:
            return
        if self.tiles and self.tiles.pending:
            self.tiles.look(number, mask)
        if self.tensor and self.tensor.loading:
            self.tensor.look(number, mask)
        dtype = TYPES[register.type]
        if value.dtype != dtype:
            same = value.dtype.itemsize == np.dtype(dtype).itemsize and value.dtype != np.bool_
            value = value.view(dtype) if same else value.astype(dtype)
        if mask is not None:
            old = self.regs[number]
            if old is None:
                old = dtype(0)
                if self.checks.unwritten:
                    self.partial[number] = ~mask
            elif number in self.partial:
                self._fill(number, mask)
            value = np.where(mask, value, old)
        elif number in self.partial:
            self._fill(number, self.alive)
        self.regs[number] = value

    def _fill(self, number: int, mask) -> None:
        rest = self.partial[number] & ~mask
        if (rest & self.alive).any():
            self.partial[number] = rest
        else:
            del self.partial[number]

    def put_lanes(self, register: Register, value, lanes, mask) -> None:
        """Write a register for these lanes. value: one element for each of them."""
        if lanes.size == self.n:
            self.put(register, value, None)
            return
        whole = np.zeros(self.n, value.dtype)
        whole[lanes] = value
        self.put(register, whole, mask)

    def spread(self, value) -> np.ndarray:
        """A value as a contiguous array over all lanes."""
        if value.ndim and value.flags.c_contiguous:
            return value
        return np.ascontiguousarray(np.broadcast_to(value, self.n))

    def of_lanes(self, value, lanes) -> np.ndarray:
        """A value as an array over these lanes."""
        if value.ndim == 0:
            return np.full(lanes.size, value)
        return value if lanes.size == self.n else value[lanes]

    def lanes(self, mask) -> np.ndarray:
        """Indices of the active lanes."""
        return self.alive_lanes if mask is None else np.flatnonzero(np.broadcast_to(mask, self.n)).astype(np.int32)

    def active(self, mask) -> np.ndarray:
        """A mask as bools over all lanes."""
        return self.alive if mask is None else np.broadcast_to(mask, self.n)

    def whole_warps(self, mask) -> np.ndarray:
        """The active warps of a mask.

        Raises:
            Fault: only part of a warp is active.
        """
        of_warps = self.active(mask).reshape(-1, WARP)
        if (of_warps.any(1) != of_warps.all(1)).any():
            raise Fault("only part of a warp executes an instruction of the whole warp")
        return of_warps.any(1)

    def meet_warps(self, of_warps) -> None:
        """Pass a barrier of these warps."""
        self.warp_epoch = self.warp_epoch + np.repeat(of_warps, WARP).astype(np.int32)

    def in_some_order(self, count: int):
        """0 .. count - 1, in random order if there is a seed."""
        return range(count) if self.rng is None else self.rng.permutation(count)

    def special(self, name: str):
        """The value of a special register."""
        if name not in self._specials:
            value = _special(name.lstrip("%"), self.grid, self.lane, self.block)
            if value is None:
                raise Fault(f"{name} is not known here")
            self._specials[name] = value
        return self._specials[name]

    def argument(self, name: str, index: int, dtype):
        """A kernel parameter, or an element of a parameter that is an array of bytes."""
        value = np.asarray(self.arguments[name])
        if value.ndim or value.itemsize == np.dtype(dtype).itemsize:
            return value.reshape(-1).view(dtype)[index]
        return value.astype(dtype)[()]

    def place(self, name: str) -> int:
        """Address of an array of the kernel or the module."""
        kernel = self.kernel
        if name in kernel.shared:
            return kernel.shared[name]
        if name in kernel.dynamic:
            return -(-kernel.shared_bytes // 16) * 16 if kernel.shared_bytes else 0
        if name in kernel.local:
            return kernel.local[name]
        if name in kernel.constants:
            return self.memory.constant(name, kernel.constants[name])
        if name == "WARP_SZ":
            return WARP
        raise Fault(f"{name} is not known here")

    def note(self, what: str) -> None:
        """Count a note."""
        self.checks.note(self.name, what)

    # ---- memory

    def check_access(self, step: Instruction, space: str, address, size: int, lanes, kind: int, counted: bool = True):
        """Check and log an access of these lanes to `size` bytes each: (memory, offset of each lane's bytes).

        kind: READ, WRITE or ATOMIC. counted: whether performance counters include the access.
        """
        address = np.broadcast_to(address, self.n)
        address = address if lanes.size == self.n else address[lanes]
        what = f"{space} {_NAMES.get(kind, 'atomic')}"
        if space == "shared":
            memory = self.shared
            offset = memory.offsets(address, size, self.block if lanes.size == self.n else self.block[lanes], what)
            if kind != WRITE and memory.in_flight and memory.pending[offset // 4].any():
                self.note(f"shared memory is read before a copy into it has landed: {step.text}")
            self._log(self.log_shared, step, offset, size, kind, lanes)
            if self.tiles and kind != READ:
                self.tiles.wrote(offset, size, lanes)
            if self.tensor and kind != READ:
                self.tensor.check_write(step, offset, size, lanes)
            if self.bulk:
                self.bulk.access(step, offset, lanes)
        elif space == "local":
            memory, pitch = self.local, max(self.kernel.local_bytes, 16)
            if int(address.min()) < 0 or int(address.max()) + size > self.kernel.local_bytes:
                raise Fault(f"{what} of {size} bytes outside {self.kernel.local_bytes} bytes")
            offset = lanes.astype(np.int64) * pitch + address
        else:
            memory = self.memory
            offset, _ = memory.offsets(address, size, what)
            if self.not_waited is not None and "nc" not in step.parts and self.not_waited[lanes].any():
                self.note(f"global memory is accessed before griddepcontrol.wait: {step.text}")
            self._log(self.log_global, step, offset, size, kind, lanes)
        if self.checks.unwritten:
            if kind != WRITE and not memory.is_written(offset, size):
                self.note(f"{space} memory is read before it is written: {step.text}")
            if kind != READ:
                memory.mark(offset, size)
        if self.counters and space != "local" and counted:
            self._measure(space, "read" if kind == READ else "write", address, offset, size, lanes)
        return memory, offset

    def wait_previous(self, mask) -> None:
        """griddepcontrol.wait of these lanes: earlier kernels have ended."""
        if self.not_waited is not None:
            left = self.not_waited & ~self.active(mask)
            self.not_waited = left if left.any() else None
            if self.timeline:
                self.timeline.wait_previous(np.flatnonzero(self.active(mask).reshape(-1, WARP).any(1)))

    def prefetch(self, address, mask) -> None:
        """Prefetch a sector for each of these lanes into L2."""
        lanes = self.lanes(mask)
        if self.counters and lanes.size:
            places = np.broadcast_to(address, self.n)[lanes] - self.memory.base
            self.timeline.prefetch(places)
            self._sectors.setdefault("ahead", []).append(np.unique(places >> 5))

    def _log(self, log: Log, step, offset, size, kind, lanes) -> None:
        if self.checks.races:
            whole = lanes.size == self.n
            log.add(step, offset, size, kind, self.thread if whole else self.thread[lanes],
                    self.block_epoch if whole else self.block_epoch[lanes],
                    self.warp_epoch if whole else self.warp_epoch[lanes])

    def _report_races(self) -> None:
        """Report the races among the accesses to shared memory so far."""
        for race in self.log_shared.races(self.grid.threads):
            self.note(f"race on shared memory between {race}")

    def _measure(self, space, way, address, offset, size, lanes) -> None:
        access = self.counters.of(space, way)
        if space == "shared":
            access.add(*bank_passes(address, size, lanes))
        else:
            access.add(*sectors(offset, size, lanes // WARP))
            if way == "read":
                if "no_allocate" in self.where or "cp.async" in self.where:
                    self._count_l2(offset, lanes // WARP)
                self.timeline.fetch(offset, lanes, "no_allocate" in self.where)
            self._sectors.setdefault(way, []).append(np.unique(offset >> 5))

    def _count_l2(self, offset, warp) -> None:
        """Count L2 requests for sectors that L1 does not keep. A sector that the warp requests again before the next
        branch is still in flight and is not counted twice."""
        asked = np.setdiff1d(warp.astype(np.int64) << 40 | offset >> 5, self._coming)
        self.counters.l2_bytes += 32 * asked.size
        self._coming = np.concatenate((self._coming, asked))

    def _count_steps(self, mix: dict, mask) -> None:
        if self.counters:
            active = self.active(mask)
            of_warps = int(active.reshape(-1, WARP).any(1).sum())
            self.counters.lanes += int(active.sum()) * sum(mix.values())
            for kind, count in mix.items():
                self.counters.issued[kind] += count * of_warps

    # ---- asynchronous copies (cp.async)

    def commit(self, mask) -> None:
        """cp.async.commit_group: close the open group of these lanes."""
        self.group = self.group + self.active(mask).astype(np.int32)

    def start_copy(self, step, address, data, lanes) -> None:
        """cp.async: start copies of these lanes. data: uint8 [lanes, size], as read from global memory."""
        size = data.shape[1]
        address = np.broadcast_to(address, self.n)[lanes]
        offset = self.shared.offsets(address, size, self.block[lanes], "shared copy")
        self._log(self.log_shared, step, offset, size, WRITE, lanes)
        if self.tensor:
            self.tensor.check_write(step, offset, size, lanes)
        if self.counters:
            self.counters.of("shared", "write").add(*bank_passes(address, size, lanes))
        self.shared.pending[offset[:, None] // 4 + np.arange(size // 4)] = True
        self.shared.in_flight += 1
        self.copies.append((step, lanes, self.group[lanes], offset, data))

    def complete_copies(self, step, mask, keep: int) -> None:
        """cp.async.wait_group: write the bytes of all groups of these lanes but the last `most`."""
        active, pending = self.active(mask), []
        for copy in self.copies:
            of, lanes, group, place, data = copy
            done = active[lanes] & (group < self.group[lanes] - keep)
            if done.any():
                size, at = data.shape[1], place[done]
                self.shared.bytes[at[:, None] + np.arange(size)] = data[done]
                self.shared.pending[at[:, None] // 4 + np.arange(size // 4)] = False
                self.shared.mark(at.astype(np.int64), size)
                self._log(self.log_shared, of, at, size, WRITE, lanes[done])
                if self.tiles:
                    self.tiles.wrote(at, size, lanes[done])
            if not done.all():
                stay = ~done
                pending.append((of, lanes[stay], group[stay], place[stay], data[stay]))
        self.copies = pending
        self.shared.in_flight = len(pending)


def _special(name: str, grid: Grid, lane, block):
    x, y, _ = grid.blocks
    thread, block = (lane % grid.threads).astype(np.uint32), (block + grid.first).astype(np.uint32)
    sizes = {"ntid.x": grid.threads, "ntid.y": 1, "ntid.z": 1, "nctaid.x": x, "nctaid.y": y, "nctaid.z": grid.blocks[2],
             "cluster_nctarank": grid.cluster, "tid.y": 0, "tid.z": 0, "nwarpid": grid.threads // WARP, "clock": 0,
             "smid": 0}
    if name in sizes:
        return np.uint32(sizes[name])
    found = {"tid.x": thread, "laneid": thread % np.uint32(WARP), "warpid": thread // np.uint32(WARP),
             "cluster_ctarank": block % np.uint32(grid.cluster),
             "ctaid.x": block % np.uint32(x), "ctaid.y": block // np.uint32(x) % np.uint32(y),
             "ctaid.z": block // np.uint32(x * y)}.get(name)
    if name.startswith("lanemask_"):
        bit = np.uint32(1) << (thread % np.uint32(WARP))
        found = {"eq": bit, "lt": bit - np.uint32(1), "le": bit | bit - np.uint32(1),
                 "gt": ~(bit | bit - np.uint32(1)), "ge": ~(bit - np.uint32(1))}[name[9:]]
    return found
