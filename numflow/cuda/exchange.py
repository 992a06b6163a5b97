"""What devices do together (ops.EXCHANGES): values pass as pieces of device memory, ordered by events.

A device puts a copy of what it has into a mailbox, with an event behind the copy; who takes it lets its own queue wait
for the event, copies the piece into its memory and works on it there. Sums are taken in the order of `adds`, so they do
not depend on which device is how fast, nor on how many of them share a GPU. Nothing ever polls on a GPU: devices that
share one cannot wait for each other.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numflow.cuda.call import Call, Sizes, ceil
from numflow.cuda.device import Device, Launch, Memory
from numflow.cuda.intrinsics import block_x, block_y, thread_index
from numflow.cuda.kernel import kernel
from numflow.cuda.scalar import f32, i32, u32
from numflow.errors import DeviceError, NetworkError
from numflow.mailboxes import Mailboxes
from numflow.ops import Step, View, param

THREADS = 128


class World(Mailboxes):
    """Where the devices of a plan meet: threads of one process, with a stream of a GPU each.

    networks: of the devices, by index. threads: ignored. shared, remote: for devices elsewhere, which these are not.
    """

    same_bits = False

    def __init__(self, networks, threads=None, shared=False, remote=None):
        if shared or remote is not None:
            raise DeviceError("devices of backend 'cuda' are threads of one process: use transport 'threads'")
        super().__init__()
        self.threads = dict.fromkeys(networks, threads)

    def close(self) -> None:
        """Forget what is on its way."""
        self.reset()


@dataclass(eq=False)
class Piece:
    """A value on its way: rows one after the other in memory of `device`, there once `event` has come.

    readers: devices that are to read it; the last gives the memory back to `spare`, the owner's stock by size.
    """

    device: Device
    memory: Memory
    event: Any
    readers: int
    spare: dict[int, deque]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> None:
        """A reader needs it no more."""
        with self.lock:
            self.readers -= 1
            if not self.readers:
                self.spare[self.memory.nbytes].append(self.memory)


@dataclass(frozen=True)
class Meeting:
    """A call that is not a launch: act(sizes) puts work into queues and may wait for other devices' threads."""

    step: Step
    act: Callable[[Sizes], None]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """None that could be recorded."""
        return []


def bind_exchange(step: Step, ctx) -> list[Call | Meeting]:
    """send, receive, all_reduce or all_gather.

    Raises:
        NetworkError: the program was not given a world.
    """
    if ctx.world is None:
        raise NetworkError(f"{step}: a network of several devices needs the world they meet in")
    return [Meeting(step, {"send": _send, "receive": _receive, "all_reduce": _all_reduce,
                           "all_gather": _all_gather}[step.op](step, ctx))]


def _send(step: Step, ctx) -> Callable[[Sizes], None]:
    """x -> device `peer`."""
    (x,), peer = step.inputs, param(step, "peer")
    return lambda sizes: ctx.world.put(ctx.index, peer, _taken(ctx, x, sizes, 1))


def _receive(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = what device `peer` sent."""
    (y,), peer = step.outputs, param(step, "peer")
    return lambda sizes: _placed(ctx, ctx.world.take(peer, ctx.index), y, sizes, False)


def _all_reduce(step: Step, ctx) -> Callable[[Sizes], None]:
    """y = sum of x over the devices `adds`."""
    (y,), adds = step.outputs, param(step, "adds")

    def act(sizes: Sizes) -> None:
        pieces = _of_all(step, ctx, sizes, adds)
        for place, other in enumerate(adds):
            _placed(ctx, pieces[other], y, sizes, place > 0)
    return act


def _all_gather(step: Step, ctx) -> Callable[[Sizes], None]:
    """Columns spans[i] of y = x of device group[i]."""
    (y,), group, spans = step.outputs, param(step, "group"), param(step, "spans")
    have = {other: span for other, span in zip(group, spans, strict=True) if span[1] > span[0]}

    def act(sizes: Sizes) -> None:
        pieces = _of_all(step, ctx, sizes, tuple(have))
        for other, (begin, end) in have.items():
            _placed(ctx, pieces[other], View(y.buffer, y.start + begin, end - begin), sizes, False)
    return act


def _of_all(step: Step, ctx, sizes: Sizes, givers: tuple[int, ...]) -> dict[int, Piece]:
    """Hand x to the whole group, if this device gives one; what every giver has handed out, by device."""
    if ctx.index in givers:
        piece = _taken(ctx, step.inputs[0], sizes, len(param(step, "group")))
        for other in param(step, "group"):
            ctx.world.put(ctx.index, other, piece)
    return {other: ctx.world.take(other, ctx.index) for other in givers}


def _taken(ctx, view: View, sizes: Sizes, readers: int) -> Piece:
    """A copy of a view's rows."""
    rows, device = sizes.rows[ctx.rows(view)], ctx.device
    size = 4 * rows * view.width
    memory = ctx.spare[size].popleft() if ctx.spare[size] else device.alloc(size)
    device.launch(Launch(copy_rows, (ceil(view.width, THREADS), rows, 1), (
        memory.at(), view.width, *ctx.view(view), ctx.batch.counts, ctx.rows(view), view.width, 0)))
    return Piece(device, memory, device.mark(), readers, ctx.spare)


def _placed(ctx, piece: Piece, view: View, sizes: Sizes, add: bool) -> None:
    """Put a piece where a view is, or add it."""
    rows, device = sizes.rows[ctx.rows(view)], ctx.device
    landing = ctx.scratch(f"pieces of {view.width}", 4 * ctx.room(view) * view.width)
    device.wait(piece.event)
    device.fetch(landing, piece.device, piece.memory.at(), piece.memory.nbytes)
    device.launch(Launch(copy_rows, (ceil(view.width, THREADS), rows, 1), (
        *ctx.view(view), landing, view.width, ctx.batch.counts, ctx.rows(view), view.width, int(add))))
    device.synchronize()
    piece.done()


@kernel("copy_rows", THREADS)
def copy_rows(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32, add: u32):
    row, column = block_y(), block_x() * 128 + thread_index()
    if row < counts[rows] and column < width:
        value = x[row * x_stride + column]
        y[row * y_stride + column] = y[row * y_stride + column] + value if add != 0 else value
