"""Collectives of devices (ops.EXCHANGES): values pass as pieces of memory, ordered by events.

A GPU puts a copy of what it has into a mailbox, with an event behind the copy; who takes it lets its own queue wait for
the event, copies the piece into its memory and works on it there. Sums are taken in the order of `adds`, so they do not
depend on which device is how fast, nor on how many of them share a GPU. Threads of the host wait for mailboxes only,
never for a GPU, and nothing ever polls on a GPU: devices that share one cannot wait for each other.

Where each device has a card of its own, and NCCL is there, groups sum and gather by its calls instead (nccl.py).

To and from devices of other executors values pass through pinned memory of the host.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numflow.cuda.device.call import Call, Sizes, ceil
from numflow.cuda.device.device import Device, Launch, Memory, Ref
from numflow.cuda.exchange.nccl import Clique, clique
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.errors import DeviceError, NetworkError
from numflow.mailboxes import Mailboxes
from numflow.ops import Network, Step, View, param

THREADS = 128
_LEAST = 4096  # bytes of a piece


class World(Mailboxes):
    """Meeting point of a plan's GPUs: threads of one process, with a stream of a GPU each.

    networks: of the devices, by index. names: of the devices, numbers of GPUs; None: their indices. threads: ignored.
    remote:   with `put` and `take`, for devices of other executors; only `send` and `receive` go there.
    devices:  by index, as they come. collectives: how groups sum and gather: one of nccl.CHOICES.
    in_pieces: a long batch may go through in pieces, as prompts come in chunks; the numbers may differ by rounding.

    Raises:
        DeviceError: devices that are processes, or a name that is no number.
    """

    in_pieces = True

    def __init__(self, networks, threads=None, shared=False, remote=None, names: Mapping[int, str] | None = None):
        if shared:
            raise DeviceError("devices of backend 'cuda' are threads of one process: use transport 'threads'")
        super().__init__()
        self.threads, self.remote = dict.fromkeys(networks), remote
        self.devices: dict[int, Device] = {}
        self.collectives, self._choosing = "auto", threading.Lock()
        self._cliques: dict[tuple[int, ...], Clique | None] = {}
        for name in (names or {}).values():
            if not name.isdecimal():
                raise DeviceError(f"device {name!r} is no GPU: GPUs are numbers, from 0 on")
        self.numbers = {index: int(names[index]) if names else index for index in networks}

    def together(self, network: Network, programs: Sequence[Any]) -> None:
        """Each GPU is driven by a thread of its own: there is no call for all of them."""

    def join(self, index: int, device: Device, network: Network, collectives: str) -> None:
        """A device has come. collectives: as of its Program, the same for all.

        Raises:
            DeviceError: it is to sum by NCCL, and cannot.
        """
        self.devices[index], self.collectives = device, collectives
        for step in (step for steps in network.entries.values() for step in steps):
            if step.op in ("all_reduce", "all_gather"):
                self.clique(device, param(step, "group"))

    def clique(self, device: Device, group: tuple[int, ...]) -> Clique | None:
        """NCCL communicator of a group of devices; None: the group exchanges by copies."""
        with self._choosing:
            if group not in self._cliques:
                self._cliques[group] = clique(self.collectives, device, group, self.numbers)
            return self._cliques[group]

    def leave(self, index: int) -> None:
        """A device is about to close: what others read of its memory is done first."""
        for device in self.devices.values():
            device.synchronize()
        for group, made in self._cliques.items():
            if index in group and made is not None:
                made.close()
        self.devices.pop(index, None)

    def abort(self) -> None:
        """Nobody waits any more, here and for devices elsewhere."""
        super().abort()
        for made in filter(None, list(self._cliques.values())):
            made.abort()
        if self.remote is not None:
            self.remote.abort()

    def reset(self) -> None:
        """As new; all devices must be at rest."""
        super().reset()
        for made in filter(None, self._cliques.values()):
            made.reset()
        if self.remote is not None:
            self.remote.reset()

    def close(self) -> None:
        """Forget what is on its way."""
        self.reset()


@dataclass(eq=False)
class Transfer:
    """A value on its way: rows one after the other in memory of `device`, there once `ready` has come.

    stock:   where it goes when the last of its `readers` is done with it.
    read:    by reader, an event behind its copy: the owner lets them come before it fills the memory again.
    """

    device: Device
    memory: Memory
    stock: deque
    ready: Any = None
    readers: int = 0
    read: dict[Device, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self, reader: Device) -> None:
        """Release the piece for a reader: all that uses it is queued."""
        if reader is not self.device:
            self.read[reader] = reader.mark(self.read.get(reader))
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.stock.append(self)


@dataclass(eq=False)
class Parcel:
    """A value on its way to the host, an array for whoever asks: it is there once `ready` has come.

    place: pinned memory of the host; `stock` gets the parcel back once the array is taken.
    """

    device: Device
    place: Memory
    stock: deque
    ready: Any = None
    shape: tuple[int, int] = (0, 0)
    dtype: Any = np.float32

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.device.until(self.ready)
        count = 4 * self.shape[0] * self.shape[1]
        x = self.device.host_array(self.place)[:count].view(self.dtype).reshape(self.shape).copy()
        self.stock.append(self)
        return x if dtype is None else x.astype(dtype)


@dataclass(frozen=True)
class HostCall:
    """A call that is not a launch: act(sizes) puts work into queues and may wait for other devices' threads."""

    step: Step
    act: Callable[[Sizes], None]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """None that could be recorded."""
        return []


def bind_exchange(step: Step, ctx) -> list[Call | HostCall]:
    """send, receive, all_reduce or all_gather.

    Raises:
        NetworkError: the program was not given a world.
    """
    if ctx.world is None:
        raise NetworkError(f"{step}: a network of several devices needs the world they meet in")
    elsewhere = step.op in ("send", "receive") and param(step, "peer") not in ctx.world.threads
    makers = {"send": _send_out, "receive": _receive_in} if elsewhere else {
        "send": _send, "receive": _receive, "all_reduce": _all_reduce, "all_gather": _all_gather}
    return [HostCall(step, makers[step.op](step, ctx))]


def _send(step: Step, ctx) -> Callable[[Sizes], None]:
    """x -> device `peer`."""
    (x,), peer = step.inputs, param(step, "peer")
    return lambda sizes: ctx.world.put(ctx.index, peer, _taken(ctx, x, sizes, 1))


def _receive(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = what device `peer` sent."""
    (y,), peer = step.outputs, param(step, "peer")
    landing = _landing(ctx, y)
    return lambda sizes: _placed(ctx, ctx.world.take(peer, ctx.index), y, sizes, landing, False)


def _send_out(step: Step, ctx) -> Callable[[Sizes], None]:
    """x -> device `peer` of another executor: a kernel writes it to the host's memory."""
    (x,), peer = step.inputs, param(step, "peer")
    dtype = np.int32 if ctx.network.buffers[x.buffer].dtype == "i32" else np.float32

    def act(sizes: Sizes) -> None:
        rows, device = sizes.rows[ctx.rows(x)], ctx.device
        size = _room(4 * rows * x.width)
        stock = ctx.spare["host", size]
        parcel = stock.popleft() if stock else Parcel(device, device.alloc_host(size), stock)
        parcel.shape, parcel.dtype = (rows, x.width), dtype
        _copy(ctx, x, sizes, (parcel.place.at(), x.width), ctx.view(x))
        parcel.ready = device.mark(parcel.ready)
        ctx.world.remote.put(ctx.index, peer, parcel)
    return act


def _receive_in(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = what device `peer` of another executor sent."""
    (y,), peer = step.outputs, param(step, "peer")
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        ctx.device.upload(landing, ctx.world.remote.take(peer, ctx.index))
        _copy(ctx, y, sizes, ctx.view(y), (landing, y.width))
    return act


def _all_reduce(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = sum of x over the devices `adds`; by NCCL if these are the whole group."""
    (y,), group, adds = step.outputs, param(step, "group"), param(step, "adds")
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        pieces = _of_all(step, ctx, sizes, adds)
        for place, other in enumerate(adds):
            _placed(ctx, pieces[other], y, sizes, landing, place > 0)

    made = ctx.world.clique(ctx.device, group) if set(adds) == set(group) else None
    return act if made is None else _either(ctx, made, _summed(step, ctx, made, landing), act)


def _summed(step: Step, ctx, made: Clique, landing: Ref) -> Callable[[Sizes], None]:
    """`all_reduce` by NCCL. Rows that are one after the other stay where they are."""
    (x,), (y,), group = step.inputs, step.outputs, param(step, "group")
    rank, packed = group.index(ctx.index), (landing, y.width)

    def act(sizes: Sizes) -> None:
        source, place = ctx.view(x), ctx.view(y)
        if source[1] != x.width:
            _copy(ctx, x, sizes, packed, source)
            source = packed
        target = place if place[1] == y.width else packed
        made.all_reduce(rank, ctx.device, source[0], target[0], sizes.rows[ctx.rows(y)] * y.width)
        if target is packed:
            _copy(ctx, y, sizes, place, packed)
    return act


def _all_gather(step: Step, ctx) -> Callable[[Sizes], None]:
    """Columns spans[i] of y = x of device group[i]."""
    (y,), group, spans = step.outputs, param(step, "group"), param(step, "spans")
    have = {other: View(y.buffer, y.start + begin, end - begin)
            for other, (begin, end) in zip(group, spans, strict=True) if end > begin}
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        pieces = _of_all(step, ctx, sizes, tuple(have))
        for other, view in have.items():
            _placed(ctx, pieces[other], view, sizes, landing, False)

    made = ctx.world.clique(ctx.device, group)
    return act if made is None else _either(ctx, made, _gathered(step, ctx, made, have), act)


def _gathered(step: Step, ctx, made: Clique, have: Mapping[int, View]) -> Callable[[Sizes], None]:
    """`all_gather` by NCCL: pieces of one size, that of the widest."""
    (y,), group = step.outputs, param(step, "group")
    rank, widest = group.index(ctx.index), max(view.width for view in have.values())
    pieces = ctx.scratch(f"{len(group)} pieces of {widest}", 4 * ctx.room(y) * widest * len(group))

    def act(sizes: Sizes) -> None:
        count = sizes.rows[ctx.rows(y)] * widest
        places = {other: pieces + 4 * count * place for place, other in enumerate(group)}
        if ctx.index in have:
            x = step.inputs[0]
            _copy(ctx, x, sizes, (places[ctx.index], x.width), ctx.view(x))
        made.all_gather(rank, ctx.device, pieces, count)
        for other, view in have.items():
            _copy(ctx, view, sizes, ctx.view(view), (places[other], view.width))
    return act


def _either(ctx, made: Clique, by_nccl: Callable[[Sizes], None],
            by_copies: Callable[[Sizes], None]) -> Callable[[Sizes], None]:
    """NCCL if the clique comes to be; all devices of the group find the same."""
    def act(sizes: Sizes) -> None:
        if made.ready():
            by_nccl(sizes)
            ctx.world.progress += 1
        else:
            by_copies(sizes)
    return act


def _of_all(step: Step, ctx, sizes: Sizes, givers: tuple[int, ...]) -> dict[int, Transfer]:
    """Hand x to the whole group, if this device gives one; what every giver has handed out, by device."""
    if ctx.index in givers:
        piece = _taken(ctx, step.inputs[0], sizes, len(param(step, "group")))
        for other in param(step, "group"):
            ctx.world.put(ctx.index, other, piece)
    return {other: ctx.world.take(other, ctx.index) for other in givers}


def _taken(ctx, view: View, sizes: Sizes, readers: int) -> Transfer:
    """A copy of a view's rows, for so many readers."""
    device, size = ctx.device, _room(4 * sizes.rows[ctx.rows(view)] * view.width)
    stock = ctx.spare[size]
    piece = stock.popleft() if stock else Transfer(device, device.alloc(size), stock)
    for event in piece.read.values():
        device.wait(event)
    piece.readers = readers
    _copy(ctx, view, sizes, (piece.memory.at(), view.width), ctx.view(view))
    piece.ready = device.mark(piece.ready)
    return piece


def _placed(ctx, piece: Transfer, view: View, sizes: Sizes, landing: Ref, add: bool) -> None:
    """Put a piece where a view is, or add it."""
    device, source = ctx.device, piece.memory.at()
    if piece.device is not device:
        device.wait(piece.ready)
        device.fetch(landing, piece.device, source, 4 * sizes.rows[ctx.rows(view)] * view.width)
        source = landing
    _copy(ctx, view, sizes, ctx.view(view), (source, view.width), add)
    piece.done(device)


def _landing(ctx, view: View) -> Ref:
    """Memory for what comes from another device, for as many rows as the view may have."""
    return ctx.scratch(f"pieces of {view.width}", 4 * ctx.room(view) * view.width)


def _room(nbytes: int) -> int:
    """Bytes of a piece that has this many: few sizes, so that pieces are used again."""
    return max(_LEAST, 1 << max(nbytes - 1, 0).bit_length())


def _copy(ctx, view: View, sizes: Sizes, to: tuple[Ref, int], source: tuple[Ref, int], add: bool = False) -> None:
    """The rows of a view from one place to another, each with its elements from row to row."""
    rows = sizes.rows[ctx.rows(view)]
    if rows:
        ctx.device.launch(Launch(copy_rows, (rows, ceil(view.width, THREADS), 1), (
            *to, *source, ctx.batch.counts, ctx.rows(view), view.width, int(add))))


@kernel("copy_rows", THREADS)
def copy_rows(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32, add: u32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        value = x[row * x_stride + column]
        y[row * y_stride + column] = y[row * y_stride + column] + value if add != 0 else value
