"""Collectives between GPUs (ops.EXCHANGES): buffers passed through mailboxes and ordered by CUDA events.

The sender copies its rows into a buffer, records an event after the copy, and puts the buffer into a mailbox. The
receiver makes its stream wait for the event, copies the buffer into its own memory and works on the copy. Sums are
taken in the order of `adds`, so they depend neither on the speed of the devices nor on how many devices share a GPU.
Host threads wait for mailboxes only, never for a GPU. No kernel waits for another device by polling: devices that share
a GPU would deadlock.

If each device has a GPU of its own and NCCL is installed, groups use NCCL's all-reduce and all-gather (nccl.py).

Values to and from devices of other executors pass through pinned host memory.
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
_LEAST = 4096  # smallest buffer, in bytes


class World(Mailboxes):
    """The mailboxes and communicators of a plan's GPUs. Each device is a thread of one process, with its own stream.

    networks: of the devices, by index. names: of the devices, which are GPU indices; None: the device indices.
    threads:  ignored.
    remote:   an object with `put` and `take` for devices of other executors; only `send` and `receive` use it.
    devices:  by index, filled as they join. collectives: one of nccl.CHOICES.
    in_pieces: a long batch may be computed in pieces, like a chunked prompt; results may differ by rounding.

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
        """Nothing to do: each GPU has its own host thread, so no call runs all of them."""

    def join(self, index: int, device: Device, network: Network, collectives: str) -> None:
        """Add a device. collectives: the choice of its Program, the same for all devices.

        Raises:
            DeviceError: NCCL was chosen and cannot be used.
        """
        self.devices[index], self.collectives = device, collectives
        for step in (step for steps in network.entries.values() for step in steps):
            if step.op in ("all_reduce", "all_gather"):
                self.clique(device, param(step, "group"))

    def clique(self, device: Device, group: tuple[int, ...]) -> Clique | None:
        """The NCCL communicators of a group of devices; None if the group exchanges by copies."""
        with self._choosing:
            if group not in self._cliques:
                self._cliques[group] = clique(self.collectives, device, group, self.numbers)
            return self._cliques[group]

    def leave(self, index: int) -> None:
        """Remove a device that is about to close, after all reads of its memory by other devices have finished."""
        for device in self.devices.values():
            device.synchronize()
        for group, made in self._cliques.items():
            if index in group and made is not None:
                made.close()
        self.devices.pop(index, None)

    def abort(self) -> None:
        """Wake all waiting threads with an error, here and at devices of other executors."""
        super().abort()
        for made in filter(None, list(self._cliques.values())):
            made.abort()
        if self.remote is not None:
            self.remote.abort()

    def reset(self) -> None:
        """Return to the initial state. All devices must be idle."""
        super().reset()
        for made in filter(None, self._cliques.values()):
            made.reset()
        if self.remote is not None:
            self.remote.reset()

    def close(self) -> None:
        """Drop all values that have been sent and not received."""
        self.reset()


@dataclass(eq=False)
class Transfer:
    """A value in transit: contiguous rows in memory of `device`, valid once the event `ready` has occurred.

    stock:   the list of free buffers, to which this one returns when the last of its `readers` is done.
    read:    for each reader, an event after its copy. The owner waits for these events before it reuses the memory.
    """

    device: Device
    memory: Memory
    stock: deque
    ready: Any = None
    readers: int = 0
    read: dict[Device, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self, reader: Device) -> None:
        """Release the buffer for one reader, whose copies of it are all queued."""
        if reader is not self.device:
            self.read[reader] = reader.mark(self.read.get(reader))
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.stock.append(self)


@dataclass(eq=False)
class Parcel:
    """A value in transit to the host, which converts to a NumPy array. It is valid once the event `ready` has occurred.

    pinned: pinned host memory. stock: the list of free parcels, to which this one returns after the conversion.
    """

    device: Device
    pinned: Memory
    stock: deque
    ready: Any = None
    shape: tuple[int, int] = (0, 0)
    dtype: Any = np.float32

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.device.until(self.ready)
        count = 4 * self.shape[0] * self.shape[1]
        x = self.device.host_array(self.pinned)[:count].view(self.dtype).reshape(self.shape).copy()
        self.stock.append(self)
        return x if dtype is None else x.astype(dtype)


@dataclass(frozen=True)
class HostCall:
    """A call that is not a launch: act(sizes) puts work into streams and may wait for threads of other devices."""

    step: Step
    act: Callable[[Sizes], None]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """No launches: a HostCall cannot be recorded in a CUDA graph."""
        return []


def bind_exchange(step: Step, ctx) -> list[Call | HostCall]:
    """Bind a step with op `send`, `receive`, `all_reduce` or `all_gather`.

    Raises:
        NetworkError: the program has no World.
    """
    if ctx.world is None:
        raise NetworkError(f"{step}: a step that exchanges data needs a plan of several devices, with its World")
    is_remote = step.op in ("send", "receive") and param(step, "peer") not in ctx.world.threads
    makers = {"send": _send_to_host, "receive": _receive_from_host} if is_remote else {
        "send": _send, "receive": _receive, "all_reduce": _all_reduce, "all_gather": _all_gather}
    return [HostCall(step, makers[step.op](step, ctx))]


def _send(step: Step, ctx) -> Callable[[Sizes], None]:
    """Send x to device `peer`."""
    (x,), peer = step.inputs, param(step, "peer")
    return lambda sizes: ctx.world.put(ctx.index, peer, _copied_out(ctx, x, sizes, 1))


def _receive(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = the value that device `peer` sent."""
    (y,), peer = step.outputs, param(step, "peer")
    landing = _landing(ctx, y)
    return lambda sizes: _copy_in(ctx, ctx.world.take(peer, ctx.index), y, sizes, landing, False)


def _send_to_host(step: Step, ctx) -> Callable[[Sizes], None]:
    """Send x to device `peer` of another executor: a kernel writes x to pinned host memory."""
    (x,), peer = step.inputs, param(step, "peer")
    dtype = np.int32 if ctx.network.buffers[x.buffer].dtype == "i32" else np.float32

    def act(sizes: Sizes) -> None:
        rows, device = sizes.rows[ctx.rows(x)], ctx.device
        size = _buffer_size(4 * rows * x.width)
        stock = ctx.spare["host", size]
        parcel = stock.popleft() if stock else Parcel(device, device.alloc_host(size), stock)
        parcel.shape, parcel.dtype = (rows, x.width), dtype
        _copy(ctx, x, sizes, (parcel.pinned.at(), x.width), ctx.view(x))
        parcel.ready = device.mark(parcel.ready)
        ctx.world.remote.put(ctx.index, peer, parcel)
    return act


def _receive_from_host(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = the value that device `peer` of another executor sent."""
    (y,), peer = step.outputs, param(step, "peer")
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        ctx.device.upload(landing, ctx.world.remote.take(peer, ctx.index))
        _copy(ctx, y, sizes, ctx.view(y), (landing, y.width))
    return act


def _all_reduce(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = sum of x over the devices `adds`. NCCL is used only if `adds` is the whole group."""
    (y,), group, adds = step.outputs, param(step, "group"), param(step, "adds")
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        buffers = _exchange_all(step, ctx, sizes, adds)
        for index, other in enumerate(adds):
            _copy_in(ctx, buffers[other], y, sizes, landing, index > 0)

    communicators = ctx.world.clique(ctx.device, group) if set(adds) == set(group) else None
    if communicators is None:
        return act
    return _nccl_or_copies(ctx, communicators, _nccl_all_reduce(step, ctx, communicators, landing), act)


def _nccl_all_reduce(step: Step, ctx, communicators: Clique, landing: Ref) -> Callable[[Sizes], None]:
    """`all_reduce` by NCCL. Rows that are not contiguous are copied to a contiguous buffer before, and back after."""
    (x,), (y,), group = step.inputs, step.outputs, param(step, "group")
    rank, packed = group.index(ctx.index), (landing, y.width)

    def act(sizes: Sizes) -> None:
        source, output = ctx.view(x), ctx.view(y)
        if source[1] != x.width:
            _copy(ctx, x, sizes, packed, source)
            source = packed
        target = output if output[1] == y.width else packed
        communicators.all_reduce(rank, ctx.device, source[0], target[0], sizes.rows[ctx.rows(y)] * y.width)
        if target is packed:
            _copy(ctx, y, sizes, output, packed)
    return act


def _all_gather(step: Step, ctx) -> Callable[[Sizes], None]:
    """Columns spans[i] of y = x of device group[i], for each i."""
    (y,), group, spans = step.outputs, param(step, "group"), param(step, "spans")
    views = {other: View(y.buffer, y.start + begin, end - begin)
            for other, (begin, end) in zip(group, spans, strict=True) if end > begin}
    landing = _landing(ctx, y)

    def act(sizes: Sizes) -> None:
        buffers = _exchange_all(step, ctx, sizes, tuple(views))
        for other, view in views.items():
            _copy_in(ctx, buffers[other], view, sizes, landing, False)

    communicators = ctx.world.clique(ctx.device, group)
    if communicators is None:
        return act
    return _nccl_or_copies(ctx, communicators, _nccl_all_gather(step, ctx, communicators, views), act)


def _nccl_all_gather(step: Step, ctx, communicators: Clique, views: Mapping[int, View]) -> Callable[[Sizes], None]:
    """`all_gather` by NCCL, whose ranks all send the same size: buffers are as wide as the widest device's x."""
    (y,), group = step.outputs, param(step, "group")
    rank, widest = group.index(ctx.index), max(view.width for view in views.values())
    gathered = ctx.scratch(f"{len(group)} pieces of {widest}", 4 * ctx.room(y) * widest * len(group))

    def act(sizes: Sizes) -> None:
        count = sizes.rows[ctx.rows(y)] * widest
        addresses = {other: gathered + 4 * count * index for index, other in enumerate(group)}
        if ctx.index in views:
            x = step.inputs[0]
            _copy(ctx, x, sizes, (addresses[ctx.index], x.width), ctx.view(x))
        communicators.all_gather(rank, ctx.device, gathered, count)
        for other, view in views.items():
            _copy(ctx, view, sizes, ctx.view(view), (addresses[other], view.width))
    return act


def _nccl_or_copies(ctx, communicators: Clique, by_nccl: Callable[[Sizes], None],
            by_copies: Callable[[Sizes], None]) -> Callable[[Sizes], None]:
    """Use NCCL if its communicators can be created, else copies. All devices of the group decide the same."""
    def act(sizes: Sizes) -> None:
        if communicators.ready():
            by_nccl(sizes)
            ctx.world.progress += 1
        else:
            by_copies(sizes)
    return act


def _exchange_all(step: Step, ctx, sizes: Sizes, senders: tuple[int, ...]) -> dict[int, Transfer]:
    """Send x to the whole group if this device is one of the senders, and receive the buffers of all senders.

    Returns the buffers by device.
    """
    if ctx.index in senders:
        buffer = _copied_out(ctx, step.inputs[0], sizes, len(param(step, "group")))
        for other in param(step, "group"):
            ctx.world.put(ctx.index, other, buffer)
    return {other: ctx.world.take(other, ctx.index) for other in senders}


def _copied_out(ctx, view: View, sizes: Sizes, readers: int) -> Transfer:
    """A copy of a view's rows in a free or new buffer, for `readers` readers."""
    device, size = ctx.device, _buffer_size(4 * sizes.rows[ctx.rows(view)] * view.width)
    stock = ctx.spare[size]
    buffer = stock.popleft() if stock else Transfer(device, device.alloc(size), stock)
    for event in buffer.read.values():
        device.wait(event)
    buffer.readers = readers
    _copy(ctx, view, sizes, (buffer.memory.at(), view.width), ctx.view(view))
    buffer.ready = device.mark(buffer.ready)
    return buffer


def _copy_in(ctx, buffer: Transfer, view: View, sizes: Sizes, landing: Ref, add: bool) -> None:
    """Copy a buffer to a view, or add it to the view. Buffers of other devices are fetched to `landing` first."""
    device, source = ctx.device, buffer.memory.at()
    if buffer.device is not device:
        device.wait(buffer.ready)
        device.fetch(landing, buffer.device, source, 4 * sizes.rows[ctx.rows(view)] * view.width)
        source = landing
    _copy(ctx, view, sizes, ctx.view(view), (source, view.width), add)
    buffer.done(device)


def _landing(ctx, view: View) -> Ref:
    """Memory for values from another device, for the largest number of rows that the view may have."""
    return ctx.scratch(f"pieces of {view.width}", 4 * ctx.room(view) * view.width)


def _buffer_size(nbytes: int) -> int:
    """Size of the buffer for `nbytes` bytes: a power of two, so that few sizes occur and buffers can be reused."""
    return max(_LEAST, 1 << max(nbytes - 1, 0).bit_length())


def _copy(ctx, view: View, sizes: Sizes, target: tuple[Ref, int], source: tuple[Ref, int], add: bool = False) -> None:
    """Copy or add the rows of a view. target, source: address, and elements from one row to the next."""
    rows = sizes.rows[ctx.rows(view)]
    if rows:
        ctx.device.launch(Launch(copy_rows, (rows, ceil(view.width, THREADS), 1), (
            *target, *source, ctx.batch.counts, ctx.rows(view), view.width, int(add))))


@kernel("copy_rows", THREADS)
def copy_rows(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32, add: u32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        value = x[row * x_stride + column]
        y[row * y_stride + column] = y[row * y_stride + column] + value if add != 0 else value
