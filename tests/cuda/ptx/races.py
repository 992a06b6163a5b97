"""Data races: unordered accesses to one address by different threads, at least one of which writes.

All accesses of a launch are logged with the number of barriers that the block and the warp have passed, and compared
afterwards. So the findings do not depend on the order of execution. Two accesses are ordered if they are of one thread;
of one block with a block barrier between them; or of one warp with a warp barrier between them. Atomics do not race
with each other. Blocks of one launch are never ordered. Races within a warp are reported for shared memory only.
"""

from dataclasses import dataclass, field

import numpy as np

READ, WRITE, ATOMIC = 0, 1, 2
MOST = 6_000_000    # logged words after which the log is evaluated


@dataclass
class Log:
    """Logged accesses to one state space.

    texts: of instructions, by number. within_warps: also report races between lanes of a warp.
    """

    within_warps: bool
    texts: dict[int, str] = field(default_factory=dict)
    entries: list[tuple] = field(default_factory=list)
    words: int = 0

    def add(self, step, offset, size: int, kind: int, thread, block_epoch, warp_epoch) -> None:
        """Log an access of some lanes. offset, thread, block_epoch, warp_epoch: arrays over the lanes.

        kind: READ, WRITE or ATOMIC. block_epoch, warp_epoch: number of block and warp barriers that a lane has passed.
        """
        self.texts[step.number] = step.text
        self.entries.append((step.number, len(self.entries), size, kind, offset.astype(np.int32), thread, block_epoch,
                             warp_epoch))
        self.words += offset.size * max(size // 4, 1)

    def races(self, threads: int) -> set[str]:
        """Texts of the races among the accesses so far; then clear the log. threads: of a block."""
        entries, self.entries, self.words = self.entries, [], 0
        if not any(entry[3] for entry in entries):
            return set()
        grain = min(4, *(entry[2] for entry in entries))
        accesses = _Accesses(*(np.concatenate(parts) for parts in zip(*(_spread(entry, grain) for entry in entries))))
        return {f"{what}: {' | '.join(sorted({self.texts[number] for number in numbers}))}"
                for what, numbers in _found(accesses, threads, self.within_warps)}


@dataclass
class _Accesses:
    """Accesses as arrays of equal length. unit: of `grain` bytes. order: of the logged instruction."""

    unit: np.ndarray
    thread: np.ndarray
    block_epoch: np.ndarray
    warp_epoch: np.ndarray
    kind: np.ndarray
    order: np.ndarray
    number: np.ndarray

    def where(self, index) -> "_Accesses":
        return _Accesses(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def _spread(entry, grain: int) -> tuple:
    """Split an access into one for each unit of `grain` bytes that it covers."""
    number, order, size, kind, offset, thread, block_epoch, warp_epoch = entry
    times = size // grain
    unit = offset // grain
    if times > 1:
        unit = (unit[:, None] + np.arange(times, dtype=np.int32)).ravel()
        thread, block_epoch, warp_epoch = (np.repeat(part, times) for part in (thread, block_epoch, warp_epoch))
    count = unit.size
    return (unit, thread, block_epoch, warp_epoch, np.full(count, kind, np.int8), np.full(count, order, np.int32),
            np.full(count, number, np.int32))


def _found(all_: _Accesses, threads: int, within_warps: bool):
    """(description, numbers of instructions) of the first race of each kind."""
    low = int(all_.unit.min())
    changed = np.zeros(int(all_.unit.max()) - low + 1, np.bool_)
    changed[(all_.unit[all_.kind != READ] - low)] = True
    c = all_.where(changed[all_.unit - low])
    block, warp = c.thread // threads, c.thread // 32
    keys = [("blocks of a launch", (c.unit,), block), ("warps without a barrier", (c.unit, block, c.block_epoch), warp)]
    if within_warps:
        keys.append(("lanes of a warp without a barrier", (c.unit, warp, c.block_epoch, c.warp_epoch), c.thread))
    for what, key, agent in keys:
        bad = _clash(c, key, agent, within_warps and agent is c.thread)
        if bad is not None:
            yield what, bad


def _clash(c: _Accesses, key: tuple, agent: np.ndarray, by_order: bool):
    """Group the accesses by `key`; return the instructions of the first group in which several agents access a unit
    and one of them writes, or None.

    agent: block, warp or thread of each access. by_order: one instruction of several lanes is no race by itself; stores
    of different values to one address are reported elsewhere.
    """
    order = np.lexsort(key[::-1])
    sorted_key = [part[order] for part in key]
    new = np.zeros(order.size, np.bool_)
    new[0] = True
    for part in sorted_key:
        new[1:] |= part[1:] != part[:-1]
    begins = np.flatnonzero(new)
    agent, kind, instruction_order = agent[order], c.kind[order], c.order[order]
    shared_units = np.minimum.reduceat(agent, begins) != np.maximum.reduceat(agent, begins)
    low, high = np.minimum.reduceat(kind, begins), np.maximum.reduceat(kind, begins)
    writes = np.logical_or.reduceat(kind == WRITE, begins)
    races = shared_units & (writes | ((low == READ) & (high == ATOMIC)))
    if by_order:
        races &= np.minimum.reduceat(instruction_order, begins) != np.maximum.reduceat(instruction_order, begins)
    if not races.any():
        return None
    at = int(np.argmax(races))
    end = begins[at + 1] if at + 1 < begins.size else order.size
    return set(c.number[order[begins[at]:end]].tolist())
