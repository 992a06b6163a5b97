"""KV caches in host memory: the blocks that a batch reads are copied to the device while earlier layers are computed.

Device memory has a few buffers (`Buffers`), each as large as a whole cache. The caches in pinned host memory use the
buffers in turn. A second stream copies the blocks with a batch's earlier tokens. Events order the two streams, so that
both can be captured in one CUDA graph:

    main:  record begin               wait here 0   layer 0   record free 0   wait here 1   layer 1 ...
    copy:  wait begin   copy 0, record here 0   copy 1, record here 1   wait free 0   copy 2, record here 2 ...

A layer writes new keys and values both to its buffer and to the host. Block ids are the same in both.
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
BLOCKS = 32  # of the copy kernel's grid: enough to saturate the bus, few enough to leave multiprocessors to the layers


class Buffers:
    """Device memory of `count` buffers, which the caches in host memory use in turn."""

    def __init__(self, device: Device, network: Network, caches: Mapping[str, KVCache]):
        self._device, self._caches = device, [cache for cache in caches.values() if cache.host]
        self.count = _buffers_needed(network, [name for name, cache in caches.items() if cache.host])
        self._memory: list[tuple[Memory, Memory]] = []
        self.resize()

    def resize(self) -> bool:
        """Make the buffers large enough for the caches as they are now. Returns whether the memory moved."""
        sizes = [max((max(max(cache.blocks, 1) * cache.sizes[part], LEAST) for cache in self._caches), default=0)
                 for part in (0, 1)]
        if self._memory and all(memory.nbytes >= size for memory, size in zip(self._memory[0], sizes)):
            return False
        for memory in (memory for pair in self._memory for memory in pair):
            self._device.free(memory)
        self._memory = [tuple(self._device.alloc(size) for size in sizes) for _ in range(self.count)]
        return bool(self._memory)

    def at(self, turn: int) -> tuple[Ref, Ref]:
        """Addresses of the K and V buffers of the cache with this turn."""
        k, v = self._memory[turn % self.count]
        return k.at(), v.at()


def on_host(count: int, percent: float) -> set[int]:
    """Indices of the caches that stay in host memory: `percent` of `count`, spread evenly over the layers, so that each
    copy overlaps with several layers."""
    n_host = round(count * percent / 100)
    return {i for i in range(count) if (i + 1) * n_host // count > i * n_host // count}


def _buffers_needed(network: Network, names: Sequence[str]) -> int:
    """Number of buffers for these caches: a copy runs up to two caches ahead, and the last step that uses a buffer must
    come before the first step of the next cache that uses the buffer."""
    most = 0
    for steps in network.entries.values():
        spans = _spans(steps, names)
        count = min(len(spans), 2)
        while any(spans[i][2] >= later[1] for i, later in enumerate(spans[count:])):
            count += 1
        most = max(most, count)
    return most


def _spans(steps: Sequence[Step], names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each cache that is used, with the indices of its first and last step, in the order of the first."""
    uses: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for name in caches_of(step).values():
            if name in names:
                uses.setdefault(name, []).append(index)
    return [(name, found[0], found[-1]) for name, found in uses.items()]


def assign_buffers(steps: Sequence[Step], caches: Mapping[str, KVCache], buffers: Buffers) -> None:
    """Assign a buffer to each cache in host memory that these steps use, before the steps are bound."""
    spans = _spans(steps, [name for name, cache in caches.items() if cache.host])
    for turn, (name, _, _) in enumerate(spans):
        caches[name].buffer = buffers.at(turn)


def with_copies(bound: list[tuple[Step, list]], ctx) -> list[tuple[Step, list]]:
    """Insert copies of the caches in host memory, and the events that order them, among the calls of bound steps."""
    names = [name for name, cache in ctx.caches.items() if cache.host]
    spans = _spans([step for step, _ in bound], names)
    if not spans:
        return bound
    calls, buffers = [list(calls) for _, calls in bound], ctx.kv_buffers.count
    read = {name for step, _ in bound if step.op != "cache_write" for name in caches_of(step).values()}
    before = [_order("begin", False, False), _order("begin", True, True)]
    for turn, (name, first, _) in enumerate(spans):
        copied = [_copy(ctx, name)] if name in read else []
        ahead = [*copied, _order(f"here {turn}", True, False)]
        if turn < buffers:
            before += ahead
        else:
            calls[spans[turn - buffers][2]] += [_order(f"free {turn}", False, False),
                                                _order(f"free {turn}", True, True), *ahead]
        calls[first].insert(0, _order(f"here {turn}", False, True))
    begin = next(i for i, some in enumerate(calls) if some and not any(isinstance(call, HostCall) for call in some))
    calls[begin][:0] = before  # after calls of the host that bring the inputs
    return [(step, some) for (step, _), some in zip(bound, calls, strict=True)]


JOIN = [Call(None, lambda sizes, order=order: order)
        for order in (Order("end", True, False), Order("end", False, True))]  # after the last call of a run


def _order(event: str, beside: bool, waits: bool) -> Call:
    order = Order(event, beside, waits)
    return Call(None, lambda sizes: order)


def _copy(ctx, name: str) -> Call:
    """The call that copies a cache's blocks with tokens from before this batch, or the encoder's, to the buffer."""
    cache, batch = ctx.caches[name], ctx.batch
    (k, v), (host_k, host_v) = cache.buffer, cache.storage
    args = (HostMemory(buffer=k, pinned=host_k, words=cache.sizes[0] // 4),
            HostMemory(buffer=v, pinned=host_v, words=cache.sizes[1] // 4),
            IntRows(batch.ref(cache.table), batch.stride), batch.ref("positions"), batch.ref("starts"),
            batch.ref(cache.lengths), batch.counts, int(cache.shape.kind == "self"), cache.block_size, cache.window)

    def plan(sizes: Sizes) -> Launch:
        return Launch(_fetch, (BLOCKS, 1, 1), args, beside=True)
    return Call(None, plan)


class HostMemory(NamedTuple):
    """K or V of a cache: the buffer on the device, the pinned memory of the host, and words of a block."""

    buffer: u32.ptr
    pinned: u32.ptr
    words: u32


@kernel("kv_fetch", THREADS)
def _fetch(k: HostMemory, v: HostMemory, table: IntRows, positions: i32.ptr, starts: i32.ptr, lengths: i32.ptr,
           counts: i32.ptr, is_self: u32, block_size: u32, window: u32):
    """Each thread copies 16 bytes at a time. The thread blocks share out the KV blocks that the window reaches."""
    thread, sequence, turn = u32(4 * thread_index()), u32(0), u32(block_x())
    while sequence < counts[N_SEQUENCES]:
        tokens = u32(positions[starts[sequence]]) if is_self != 0 else u32(lengths[sequence])
        skipped = u32((tokens - window + 1) // block_size) if window != 0 and tokens >= window else u32(0)
        blocks = u32((tokens + block_size - 1) // block_size - skipped)
        while turn < blocks:
            block = u32(table.data[sequence * table.stride + skipped + turn])
            target, source, word = k.buffer + block * k.words, k.pinned + block * k.words, thread
            while word < k.words:
                a, b, c, d = load4(source, word)
                store4(target, word, a, b, c, d)
                word = u32(word + 1024)
            target, source, word = v.buffer + block * v.words, v.pinned + block * v.words, thread
            while word < v.words:
                a, b, c, d = load4(source, word)
                store4(target, word, a, b, c, d)
                word = u32(word + 1024)
            turn = u32(turn + grid_x())
        turn = u32(turn - blocks)  # continue the round-robin where the previous sequence ended
        sequence = u32(sequence + 1)
