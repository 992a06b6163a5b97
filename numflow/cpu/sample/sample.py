"""Tokens picked from logits by a kernel, as decoding.choice says, and made the batch of the next step."""

from typing import NamedTuple

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, Kernel, slots
from numflow.decoding.choice import MOST_TOKENS, WORDS
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS
from numflow.ops import View

_CODE = Code("numflow.cpu.sample.sample_kernels")
# draws: of a step, MOST_STEPS numbers from a row to the next. room: of each thread, with what lies where in it.
PICK = slots("header rows width x x_stride y goes_on settings draws room room_stride weights columns sums")
CHUNK = 256    # logits whose columns have 16 each
BLOCK = 1024   # logits whose weights are summed up before one of them is looked for


class Draws(NamedTuple):
    """Settings of rows that kernels draw from, and memory for that.

    settings: int32 [R, WORDS], the words of decoding.choice. numbers: uint32 [R, MOST_STEPS], random ones.
    room: uint8 [threads, n], of each thread.
    """

    settings: np.ndarray
    numbers: np.ndarray
    room: np.ndarray

    @classmethod
    def of(cls, rows: int, width: int, threads: int) -> "Draws":
        """For so many rows of `width` logits.

        Raises:
            RequestError: there are too many tokens to choose from.
        """
        if width > MOST_TOKENS:
            raise RequestError(f"device 'cpu' cannot draw from {width} tokens: {MOST_TOKENS} at most")
        return cls(aligned((rows, WORDS), np.int32), aligned((rows, MOST_STEPS), np.uint32),
                   aligned((threads, _places(width)[-1]), np.uint8))


def _places(width: int) -> tuple[int, int, int, int]:
    """Bytes before the weights, the columns and the sums of a thread's room, which begins with keys, and all."""
    chunks = -(-width // CHUNK)
    weights = 8 * CHUNK * chunks
    columns = weights + 4 * CHUNK * chunks
    sums = columns + 4 * 16 * chunks
    return weights, columns, sums, sums + 64 * (1 + -(-8 * width // BLOCK // 64))


def picking() -> Kernel:
    """The kernel of `pick_tokens`."""
    return _CODE.kernel("pick_tokens")


def pick_tokens(ctx, logits: View, y: np.ndarray, goes_on: bool = False, drawn: Draws | None = None,
                step: int = 0) -> Call:
    """logits f32 [R, V] -> y i32 [R], a token of each row, -1 where logits are not finite; goes_on: these are the
    batch's next ones. drawn: how they are picked, with the numbers of a step; None: the likeliest."""
    weights, columns, sums, size = _places(logits.width)
    own = {"settings": 0, "draws": 0, "room": 0} if drawn is None else {
        "settings": drawn.settings, "draws": drawn.numbers.ctypes.data + 4 * step, "room": drawn.room}
    return Call.named(None, picking(), PICK, header=ctx.header, rows=ctx.rows(logits), width=logits.width,
                      **ctx.strided("x", logits), y=y, goes_on=int(goes_on), **own, room_stride=size, weights=weights,
                      columns=columns, sums=sums, keep=() if drawn is None else drawn)
