"""Races: accesses to one place that nothing orders, one of which writes.

Every access of a launch is kept, with the barriers that its block and warp have passed, and looked at afterwards. So
what is found does not depend on who happened to come first. Ordered are: a thread's own accesses; those of a block with
one of its barriers between; those of a warp with a barrier of the warp between. Atomics are in order among themselves.
Nothing orders the blocks of one launch. Within a warp, only shared memory is looked at.
"""

from dataclasses import dataclass, field

import numpy as np

READ, WRITE, ATOMIC = 0, 1, 2
MOST = 6_000_000    # places that are kept before they are looked at


@dataclass
class Log:
    """Accesses to one space. texts: of instructions, by number; within_warps: lanes of a warp are told apart."""

    within_warps: bool
    texts: dict[int, str] = field(default_factory=dict)
    entries: list[tuple] = field(default_factory=list)
    places: int = 0

    def add(self, step, offset, size: int, sort: int, thread, epoch, turn) -> None:
        """Keep an access of some lanes: arrays of the same length, but for the numbers."""
        self.texts[step.number] = step.text
        self.entries.append((step.number, len(self.entries), size, sort, offset.astype(np.int32), thread, epoch, turn))
        self.places += offset.size * max(size // 4, 1)

    def races(self, threads: int) -> set[str]:
        """What is wrong with the accesses so far, which are then forgotten. threads: of a block."""
        entries, self.entries, self.places = self.entries, [], 0
        if not any(entry[3] for entry in entries):
            return set()
        grain = min(4, *(entry[2] for entry in entries))
        columns = _Columns(*(np.concatenate(parts) for parts in zip(*(_spread(entry, grain) for entry in entries))))
        return {f"{what}: {' | '.join(sorted({self.texts[number] for number in numbers}))}"
                for what, numbers in _found(columns, threads, self.within_warps)}


@dataclass
class _Columns:
    place: np.ndarray
    thread: np.ndarray
    epoch: np.ndarray
    turn: np.ndarray
    sort: np.ndarray
    order: np.ndarray
    number: np.ndarray

    def where(self, index) -> "_Columns":
        return _Columns(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def _spread(entry, grain: int) -> tuple:
    """An access as one of each place that it covers."""
    number, order, size, sort, offset, thread, epoch, turn = entry
    times = size // grain
    place = offset // grain
    if times > 1:
        place = (place[:, None] + np.arange(times, dtype=np.int32)).ravel()
        thread, epoch, turn = np.repeat(thread, times), np.repeat(epoch, times), np.repeat(turn, times)
    count = place.size
    return (place, thread, epoch, turn, np.full(count, sort, np.int8), np.full(count, order, np.int32),
            np.full(count, number, np.int32))


def _found(all_: _Columns, threads: int, within_warps: bool):
    """(what, numbers of instructions) of each sort of race, where it is met first."""
    low = int(all_.place.min())
    changed = np.zeros(int(all_.place.max()) - low + 1, np.bool_)
    changed[(all_.place[all_.sort != READ] - low)] = True
    c = all_.where(changed[all_.place - low])
    block, warp = c.thread // threads, c.thread // 32
    keys = [("blocks of a launch", (c.place,), block), ("warps without a barrier", (c.place, block, c.epoch), warp)]
    if within_warps:
        keys.append(("lanes of a warp without a barrier", (c.place, warp, c.epoch, c.turn), c.thread))
    for what, key, who in keys:
        bad = _clash(c, key, who, within_warps and who is c.thread)
        if bad is not None:
            yield what, bad


def _clash(c: _Columns, key: tuple, who: np.ndarray, by_order: bool):
    """Instructions of the first group of one key that several touch, one writing; None if there is no such group.

    by_order: one instruction for several lanes at once is no race; whether they agree is asked elsewhere.
    """
    order = np.lexsort(key[::-1])
    sorted_key = [part[order] for part in key]
    new = np.zeros(order.size, np.bool_)
    new[0] = True
    for part in sorted_key:
        new[1:] |= part[1:] != part[:-1]
    begins = np.flatnonzero(new)
    who, sort, turn = who[order], c.sort[order], c.order[order]
    several = np.minimum.reduceat(who, begins) != np.maximum.reduceat(who, begins)
    low, high = np.minimum.reduceat(sort, begins), np.maximum.reduceat(sort, begins)
    writes = np.logical_or.reduceat(sort == WRITE, begins)
    bad = several & (writes | ((low == READ) & (high == ATOMIC)))
    if by_order:
        bad &= np.minimum.reduceat(turn, begins) != np.maximum.reduceat(turn, begins)
    if not bad.any():
        return None
    at = int(np.argmax(bad))
    end = begins[at + 1] if at + 1 < begins.size else order.size
    return set(c.number[order[begins[at]:end]].tolist())
