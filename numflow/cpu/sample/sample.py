"""Sampling of tokens by a kernel, as decoding.choice defines it; the tokens can become the batch of the next step."""

from typing import NamedTuple

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code, Kernel, slots
from numflow.decoding.choice import MOST_TOKENS, WORDS
from numflow.errors import RequestError
from numflow.executor.contract import MOST_STEPS
from numflow.ops import View

_CODE = Code("numflow.cpu.sample.sample_kernels")
# draws: random numbers of a step, MOST_STEPS apart from row to row. scratch: memory of each thread, and the offsets of
# weights, columns and sums in it.
PICK = slots("header rows width x x_stride y goes_on settings draws scratch scratch_stride weights columns sums")
CHUNK = 256    # logits of 16 columns of 16 each
BLOCK = 1024   # logits per partial sum of weights


class Draws(NamedTuple):
    """Sampling settings of rows, random numbers and scratch memory.

    settings: int32 [R, WORDS], the words of decoding.choice.
    random:   uint32 [R, MOST_STEPS], random numbers.
    scratch:  uint8 [threads, n], memory of each thread.
    """

    settings: np.ndarray
    random: np.ndarray
    scratch: np.ndarray

    @classmethod
    def of(cls, rows: int, width: int, threads: int) -> "Draws":
        """Memory for `rows` rows of `width` logits.

        Raises:
            RequestError: there are too many tokens to choose from.
        """
        if width > MOST_TOKENS:
            raise RequestError(f"device 'cpu' cannot draw from {width} tokens: {MOST_TOKENS} at most")
        return cls(aligned((rows, WORDS), np.int32), aligned((rows, MOST_STEPS), np.uint32),
                   aligned((threads, _layout(width)[-1]), np.uint8))


def _layout(width: int) -> tuple[int, int, int, int]:
    """Offsets of weights, columns and sums in a thread's scratch memory, which begins with keys, and its size."""
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
    """logits f32 [R, V] -> y i32 [R], a token per row, -1 if its logits are not finite.

    goes_on: whether the tokens become the batch's next tokens. drawn: settings and random numbers, of step `step`;
    None: greedy.
    """
    weights, columns, sums, size = _layout(logits.width)
    draws = {"settings": 0, "draws": 0, "scratch": 0} if drawn is None else {
        "settings": drawn.settings, "draws": drawn.random.ctypes.data + 4 * step, "scratch": drawn.scratch}
    return Call.named(None, picking(), PICK, header=ctx.header, rows=ctx.rows(logits), width=logits.width,
                      **ctx.strided("x", logits), y=y, goes_on=int(goes_on), **draws, scratch_stride=size,
                      weights=weights, columns=columns, sums=sums, keep=() if drawn is None else drawn)
