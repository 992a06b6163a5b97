"""The scheduler: runs a parsed kernel for the lanes of many blocks side by side, one basic block at a time.

    Machine(kernel, Grid((8, 1, 1), 128), arguments, memory, checks).run()

Each step runs one basic block for the ready lanes with the lowest program counter, so that diverged lanes reconverge
where their paths join. With a seed, warps and paths between barriers are chosen at random.
"""

import functools

import numpy as np

from . import clusters, convert, tensor_products, warps  # noqa: F401  (they put instructions into the tables)
from .bulk import Bulk
from .clusters import has_bulk, phase_of
from .counters import kind_of
from .effects import EFFECTS, unpack
from .findings import Checks, Fault
from .lanes import WARP, Grid, Lanes
from .memory import GlobalMemory
from .operands import mask_of
from .parse import Instruction, Kernel, Vector
from .races import MOST, Log
from .tensor import TensorMemory
from .tiles import Tiles
from .values import VALUES


class Machine(Lanes):
    """The execution of one launch, or of some of its blocks.

    pc: basic block of each lane. uniform: the basic block of all lanes, if it is the same; else None.
    """

    def __init__(self, kernel: Kernel, grid: Grid, arguments: list, memory: GlobalMemory, checks: Checks,
                 name: str = "", seed: int = 0, log: Log | None = None):
        super().__init__(kernel, grid, arguments, memory, checks, name or kernel.name, log or Log(False))
        self.rng = np.random.default_rng(seed) if seed else None
        self.code = compiled(kernel)
        opcodes = {step.opcode for step in kernel.instructions}
        if opcodes & {"wgmma", "tcgen05"}:
            self.tiles = Tiles(self)
        if has_bulk(kernel) or "tcgen05" in opcodes:
            self.bulk = Bulk(self)
        if "tcgen05" in opcodes:
            self.tensor = TensorMemory(self)
        self.polls = {at: phase_of(block.steps[0]) for at, block in enumerate(kernel.blocks) if block.waits == 4}
        self.waits = np.array([block.waits for block in kernel.blocks] + [0])
        if self.counters:
            self.counters.launches += grid.first == 0
            self.counters.blocks += self.blocks
            self.counters.warps += self.n // WARP

    def run(self) -> None:
        """Run until all lanes have exited.

        Raises:
            Fault: an error that ends the kernel; the message names the kernel and the instruction.
        """
        self.pc, self.uniform = np.zeros(self.n, np.int32), 0
        try:
            with np.errstate(all="ignore"):
                for _ in range(self.checks.steps):
                    if not self.alive_lanes.size:
                        break
                    self._advance()
                else:
                    raise Fault("it does not end")
        except Fault as fault:
            raise Fault(f"{self.name}: {fault} ({self.where})") from None
        self._report_races()
        if self.tiles:
            self.tiles.end()
        if self.bulk:
            self.bulk.end()
        if self.tensor:
            self.tensor.end()
        if self.counters:
            clocks, early = self.timeline.clocks()
            self.counters.clocks += clocks
            self.counters.early_clocks += early
            touched = {way: np.unique(np.concatenate(parts)) for way, parts in self._sectors.items()}
            self.counters.prefetched += 32 * touched.pop("ahead", np.zeros(0)).size
            self.counters.touched += 32 * sum(sectors.size for sectors in touched.values())
            self.counters.allocated += sum(self.memory.extent(32 * sectors) for sectors in touched.values())

    def _advance(self) -> None:
        """Run one basic block for some lanes, or pass a barrier."""
        if self.uniform is not None and self.rng is None and self.waits[self.uniform] < 3:
            at = self.uniform
            if at < len(self.waits) - 1 and self.waits[at] == 2:
                self._pass_barrier(at, None)
                self.uniform = at + 1
                return
            self._step(at, None)
            return
        if self.uniform is not None:
            self.pc[:] = self.uniform
            self.uniform = None
        alive_pc = self.pc[self.alive_lanes]
        if self.rng is None and self.waits[alive_pc[0]] < 3 and (alive_pc == alive_pc[0]).all():
            self.uniform = int(alive_pc[0])
            if not self.waits[self.uniform] or self.alive_lanes.size == self.n:
                self._advance()
                return
            self.uniform = None
        waits = self.waits[self.pc]
        is_converged = ((self.pc.reshape(-1, WARP) == self.pc[::WARP, None]) & self.alive.reshape(-1, WARP)).all(1)
        whole_warps = np.repeat(is_converged, WARP)
        ready = self.alive & ((waits == 0) | ((waits == 1) & whole_warps))
        if self.bulk:
            ready |= self._unblocked(waits, whole_warps)
        if not ready.any():
            if self.bulk and self._resolve_wait(waits):
                return
            self._barrier(waits, whole_warps)
            return
        if self.rng is None:
            at = int(self.pc[ready].min())
            self._step(at, ready & (self.pc == at))
            return
        at = int(self.pc[self.rng.choice(np.flatnonzero(ready))])
        chosen = ready & (self.pc == at)
        candidates = chosen.reshape(-1, WARP).any(1)
        drawn = candidates & (self.rng.random(candidates.size) < self.rng.choice((0.0, 0.5, 1.0)))
        if not drawn.any():
            drawn[self.rng.choice(np.flatnonzero(candidates))] = True
        self._step(at, chosen & np.repeat(drawn, WARP))

    def _unblocked(self, waits, whole_warps) -> np.ndarray:
        """Lanes at a cluster barrier that is complete, or at an mbarrier phase that is complete.

        With a seed, bulk copies may arrive first, and lanes may poll a phase that is not complete.
        """
        if self.rng is not None and self.bulk.in_flight and self.rng.random() < 0.1:
            self.bulk.complete_copy(int(self.rng.integers(len(self.bulk.in_flight))))
        ready, polling = np.zeros(self.n, bool), self.alive & (waits == 4)
        if (waits == 3).any():
            ready |= self.alive & (waits == 3) & whole_warps & self.bulk.cluster_complete()
        for at in np.unique(self.pc[polling]).tolist() if polling.any() else ():
            self.mask, self.where = polling & (self.pc == at), self._text(at)
            lanes = np.flatnonzero(self.mask).astype(np.int32)
            ready[lanes] = self.polls[at](self, lanes)[0]
        if self.rng is not None:
            ready |= polling & ~self.bulk.polled & (self.rng.random(self.n // WARP) < 0.1).repeat(WARP)
        return ready

    def _resolve_wait(self, waits) -> bool:
        """Make progress when no lane is ready and lanes wait for mbarriers: let lanes poll once, or a copy arrive.

        Returns whether something was done. False: only a block barrier can help.

        Raises:
            Fault: nothing can complete what the lanes wait for.
        """
        at_barriers = (waits == 2) | ~self.alive
        if (at_barriers.reshape(self.blocks, -1).all(1) & self.alive.reshape(self.blocks, -1).any(1)).any():
            return False
        polling = self.alive & (waits == 4)
        asks = polling & ~self.bulk.polled
        if asks.any():
            at = int(self.pc[asks].min())
            self._step(at, asks & (self.pc == at))
            return True
        if self.bulk.in_flight:
            self.bulk.complete_copy(0 if self.rng is None else int(self.rng.integers(len(self.bulk.in_flight))))
            return True
        if polling.any():
            at = int(self.pc[polling].min())
            places = self.polls[at](self, np.flatnonzero(polling & (self.pc == at)).astype(np.int32))[1]
            raise Fault(f"threads wait for ever: {self.bulk.missing(places)}")
        if (self.alive & (waits == 3)).any() and not (self.alive & (waits == 1)).any():
            raise Fault("threads wait for ever at barrier.cluster.wait, which others of the cluster do not reach")
        return False

    def _barrier(self, waits, whole_warps) -> None:
        """Pass the block barrier in all blocks whose threads all wait at one.

        Raises:
            Fault: only part of a warp waits there.
        """
        here = ~(self.alive & (waits > 2)).reshape(self.blocks, -1).any(1)     # blocks without waits of another kind
        here = np.repeat(here, self.grid.threads)
        waiting = self.alive & (waits == 2) & here
        diverged = self.alive & ~whole_warps & (here if waiting.any() else waits < 3)
        if diverged.any() or not waiting.any():
            lane = int(np.flatnonzero(diverged if diverged.any() else self.alive)[0])
            places = sorted({self._text(int(self.pc[at])) if self.alive[at] else "its end"
                             for at in range(lane // WARP * WARP, lane // WARP * WARP + WARP)})
            raise Fault(f"lanes of a warp diverge: some are at {' and some at '.join(places)}")
        by_block = waiting.reshape(self.blocks, -1)
        if (by_block.any(1) & ~by_block.all(1)).any():
            self.note("bar.sync after warps of the block have exited")
        places = np.where(by_block, self.pc.reshape(self.blocks, -1), -1)
        if (by_block & (places != places.max(1, keepdims=True))).any():
            self.note("warps of a block meet at different barriers")
        at = int(self.pc[waiting].min()) if self.rng is None else int(self.rng.choice(self.pc[waiting]))
        blocks = (by_block & (places == at)).any(1)            # all waiting lanes of these blocks pass
        released = waiting & np.repeat(blocks, self.grid.threads)
        self._pass_barrier(at, released)
        self.pc[released] += 1

    def _pass_barrier(self, at: int, mask) -> None:
        step = self.kernel.blocks[at].steps[0]
        if "sync" not in step.parts or len(step.operands) > 1 or getattr(step.operands[0], "text", "0") != "0":
            raise Fault(f"barriers with names or counts are not known here: {step.text}")
        self._count_steps({kind_of(step): 1}, mask)
        if self.timeline:
            self.timeline.meet(self.active(mask))
        self.block_epoch = self.block_epoch + (1 if mask is None else mask.astype(np.int32))
        if self.tiles:
            self.tiles.meet(mask)
        if self.bulk:
            self.bulk.meet(mask)
        if self.log_shared.words > MOST // 4:
            self._report_races()

    def _text(self, pc: int) -> str:
        return self.kernel.blocks[pc].steps[0].text if self.kernel.blocks[pc].steps else "an empty block"

    def _step(self, at: int, mask) -> None:
        """Run a basic block for the lanes of a mask; None for all lanes that have not exited."""
        steps, mix = self.code[at]
        self._count_steps(mix, mask)
        if self.timeline and at in self.kernel.begins:
            self._coming = self._coming[:0]
            self.timeline.part(np.flatnonzero(self.active(mask).reshape(-1, WARP).any(1)))
        for step, guard, run in steps:
            self.where = step.text
            self.mask = mask
            if guard is None:
                taken = mask
            else:
                wanted = guard(self)
                if self.counters:
                    self._count_steps({kind_of(step): 1}, wanted if mask is None else mask & wanted)
                taken = (wanted & self.alive) if mask is None else mask & wanted
                self.mask = taken
            if run is not None:
                run(self, taken)
            if self.timeline:
                self.timeline.step(step, self.active(mask if run is None else taken))
            if run is not None:
                continue
            if step.opcode == "bra":
                self._branch(self.kernel.labels[step.operands[0].name], at + 1, mask, guard, taken)
            else:
                self._end(at + 1, mask, taken)
            return
        if at + 1 >= len(self.code):
            self._end(at + 1, mask, mask)
        else:
            self._branch(at + 1, at + 1, mask, None, mask)

    def _branch(self, target: int, after: int, mask, guard, taken) -> None:
        if mask is None:
            lanes = self.alive_lanes
            here = None if guard is None else taken[lanes]
            if here is None or here.all() or not here.any():
                self.uniform = target if here is None or here.all() else after
                if lanes.size < self.n or self.rng is not None:   # a warp with exited lanes is not complete
                    self.pc[lanes] = self.uniform
                    self.uniform = None
                return
            self.uniform = None
            self.pc[lanes] = np.where(here, target, after)
            return
        self.pc[mask] = after
        self.pc[taken] = target

    def _end(self, after: int, mask, taken) -> None:
        if taken is None:
            taken = self.alive
        if self.not_waited is not None and (self.not_waited & taken).any():
            self.note("threads exit without griddepcontrol.wait, which other threads of the kernel execute")
        self.alive = self.alive & ~taken
        self.alive_lanes = np.flatnonzero(self.alive).astype(np.int32)
        if mask is None:
            self.pc[self.alive_lanes] = after
            self.uniform = None
        else:
            self.pc[mask] = after


@functools.lru_cache(maxsize=64)
def compiled(kernel: Kernel) -> list:
    """For each basic block: ([(instruction, guard, function; None for branches and exits)], instructions by kind)."""
    return [([(step, mask_of(step), _bound(step)) for step in block.steps if not step.is_block_barrier],
             _mix(block.steps)) for block in kernel.blocks]


def _mix(steps) -> dict[str, int]:
    found = {}
    for step in steps:
        if step.guard is None and not step.is_block_barrier:
            kind = kind_of(step)
            found[kind] = found.get(kind, 0) + 1
    return found


def _bound(step: Instruction):
    if step.opcode in ("bra", "ret", "exit"):
        if "ind" in step.parts:
            raise Fault(f"no such branch here: {step.text}")
        return None
    if step.opcode == "mov" and isinstance(step.operands[0], Vector):
        return unpack(step)
    if step.opcode in VALUES:
        function, to = VALUES[step.opcode](step), step.operands[0]
        return lambda machine, mask: machine.put(to, function(machine), mask)
    if step.opcode in EFFECTS:
        return EFFECTS[step.opcode](step)
    raise Fault(f"no such instruction here: {step.text}")
