"""Caches in the host's memory: what a batch reads of them comes to the device while the layers before are computed.

The device has `Rooms` for a few whole caches, in which those in pinned memory take turns. A second queue copies the
blocks that hold a batch's earlier tokens; events order the two queues, so a graph can be made of both:

    main:   signal begin                await here 0   layer 0   signal free 0   await here 1   layer 1 ...
    beside: await begin   copy 0, signal here 0   copy 1, signal here 1   await free 0   copy 2, signal here 2 ...

A layer stores new keys and values in both places. Block ids are the same in a room as in the cache.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from numflow.cuda.device.call import N_SEQUENCES, Call, Sizes
from numflow.cuda.device.device import Device, Launch, Memory, Order, Ref
from numflow.cuda.exchange.exchange import HostCall
from numflow.cuda.lang.intrinsics import block_x, grid_x, load4, store4, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.parameters import IntRows
from numflow.cuda.lang.scalar import i32, u32
from numflow.cuda.state.cache import LEAST, KVCache
from numflow.ops import Network, Step, caches_of

THREADS = 256
BLOCKS = 32  # of the copy's grid: enough to keep a bus busy, few enough to leave the multiprocessors to the layers


class Rooms:
    """Device memory that the caches of the host take turns in, as many at a time as steps need (`count`)."""

    def __init__(self, device: Device, network: Network, caches: Mapping[str, KVCache]):
        self._device, self._caches = device, [cache for cache in caches.values() if cache.host]
        self.count = _rooms_needed(network, [name for name, cache in caches.items() if cache.host])
        self._memory: list[tuple[Memory, Memory]] = []
        self.resize()

    def resize(self) -> bool:
        """Have room for the caches as they are now; says whether the memory has moved."""
        sizes = [max((max(max(cache.blocks, 1) * cache.sizes[part], LEAST) for cache in self._caches), default=0)
                 for part in (0, 1)]
        if self._memory and all(memory.nbytes >= size for memory, size in zip(self._memory[0], sizes)):
            return False
        for memory in (memory for pair in self._memory for memory in pair):
            self._device.free(memory)
        self._memory = [tuple(self._device.alloc(size) for size in sizes) for _ in range(self.count)]
        return bool(self._memory)

    def at(self, turn: int) -> tuple[Ref, Ref]:
        """Places of keys and values of the cache with this turn."""
        k, v = self._memory[turn % self.count]
        return k.at(), v.at()


def on_host(count: int, percent: float) -> set[int]:
    """Indices of the caches on the host: a share of `count`, spread evenly, so that each copy has time."""
    many = round(count * percent / 100)
    return {i for i in range(count) if (i + 1) * many // count > i * many // count}


def _rooms_needed(network: Network, names: Sequence[str]) -> int:
    """Rooms for these caches: a copy may begin two caches ahead, and who has a room must be done before the next."""
    most = 0
    for steps in network.entries.values():
        spans = _spans(steps, names)
        count = min(len(spans), 2)
        while any(spans[i][2] >= later[1] for i, later in enumerate(spans[count:])):
            count += 1
        most = max(most, count)
    return most


def _spans(steps: Sequence[Step], names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each cache that is used, with its first and last step, in the order of the first."""
    uses: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for name in caches_of(step).values():
            if name in names:
                uses.setdefault(name, []).append(index)
    return [(name, found[0], found[-1]) for name, found in uses.items()]


def take_rooms(steps: Sequence[Step], caches: Mapping[str, KVCache], rooms: Rooms) -> None:
    """Give each cache of the host that these steps use its room, before they are bound."""
    spans = _spans(steps, [name for name, cache in caches.items() if cache.host])
    for turn, (name, _, _) in enumerate(spans):
        caches[name].room = rooms.at(turn)


def with_copies(bound: list[tuple[Step, list]], ctx) -> list[tuple[Step, list]]:
    """The bound steps of an entry with the copies of the host's caches and their order between the calls."""
    names = [name for name, cache in ctx.caches.items() if cache.host]
    spans = _spans([step for step, _ in bound], names)
    if not spans:
        return bound
    calls, rooms = [list(calls) for _, calls in bound], ctx.rooms.count
    read = {name for step, _ in bound if step.op != "cache_write" for name in caches_of(step).values()}
    before = [_order("begin", False, False), _order("begin", True, True)]
    for turn, (name, first, _) in enumerate(spans):
        copied = [_copy(ctx, name)] if name in read else []
        ahead = [*copied, _order(f"here {turn}", True, False)]
        if turn < rooms:
            before += ahead
        else:
            calls[spans[turn - rooms][2]] += [_order(f"free {turn}", False, False), _order(f"free {turn}", True, True),
                                              *ahead]
        calls[first].insert(0, _order(f"here {turn}", False, True))
    begin = next(i for i, some in enumerate(calls) if some and not any(isinstance(call, HostCall) for call in some))
    calls[begin][:0] = before  # behind what the host brings first
    return [(step, some) for (step, _), some in zip(bound, calls, strict=True)]


JOIN = [Call(None, lambda sizes, order=order: order)
        for order in (Order("end", True, False), Order("end", False, True))]  # behind the last call of a run


def _order(event: str, beside: bool, waits: bool) -> Call:
    order = Order(event, beside, waits)
    return Call(None, lambda sizes: order)


def _copy(ctx, name: str) -> Call:
    """The blocks of a cache that hold tokens of before this batch, or the encoder's, to its room."""
    cache, batch = ctx.caches[name], ctx.batch
    (k, v), (kept_k, kept_v) = cache.room, cache.kept
    args = (Kept(room=k, kept=kept_k, words=cache.sizes[0] // 4), Kept(room=v, kept=kept_v, words=cache.sizes[1] // 4),
            IntRows(batch.ref(cache.table), batch.stride), batch.ref("positions"), batch.ref("starts"),
            batch.ref(cache.lengths), batch.counts, int(cache.shape.kind == "self"), cache.block_size, cache.window)

    def plan(sizes: Sizes) -> Launch:
        return Launch(_fetch, (BLOCKS, 1, 1), args, beside=True)
    return Call(None, plan)


class Kept(NamedTuple):
    """Keys or values of a cache: its room, where the host keeps it, words of a block."""

    room: u32.ptr
    kept: u32.ptr
    words: u32


@kernel("kv_fetch", THREADS)
def _fetch(k: Kept, v: Kept, table: IntRows, positions: i32.ptr, starts: i32.ptr, lengths: i32.ptr, counts: i32.ptr,
           is_self: u32, block_size: u32, window: u32):
    """16 bytes of a thread at a time; blocks of the cache that a window reaches go round the blocks of the grid."""
    thread, sequence, turn = u32(4 * thread_index()), u32(0), u32(block_x())
    while sequence < counts[N_SEQUENCES]:
        tokens = u32(positions[starts[sequence]]) if is_self != 0 else u32(lengths[sequence])
        gone = u32((tokens - window + 1) // block_size) if window != 0 and tokens >= window else u32(0)
        blocks = u32((tokens + block_size - 1) // block_size - gone)
        while turn < blocks:
            block = u32(table.data[sequence * table.stride + gone + turn])
            to, source, word = k.room + block * k.words, k.kept + block * k.words, thread
            while word < k.words:
                a, b, c, d = load4(source, word)
                store4(to, word, a, b, c, d)
                word = u32(word + 1024)
            to, source, word = v.room + block * v.words, v.kept + block * v.words, thread
            while word < v.words:
                a, b, c, d = load4(source, word)
                store4(to, word, a, b, c, d)
                word = u32(word + 1024)
            turn = u32(turn + grid_x())
        turn = u32(turn - blocks)  # go on where the sequence before ended
        sequence = u32(sequence + 1)
