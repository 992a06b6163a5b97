"""Outliers kept apart from a quantised matrix (numflow/quant/apart.py): a sparse matrix S beside the packed one.

    y [T, N] = W @ x + S @ x, where S [N, K] has a few weights of each row

Kernels for few tokens multiply W with activations as ever, and S with float32 ones, a lane for each outlier
(linear/gemv.py). On tensor cores outliers are added to the tiles of weights, in float16 (linear/gemm.py).

slots  u32 [N][R]: column | bits of its bfloat16 << 16, columns rising. Every row has as many as the fullest one;
       what is left of the others is zeros, of any column.
"""

import functools
import math

import numpy as np

from numflow.cuda.device.device import Ref
from numflow.cuda.lang.arithmetic import float_of, fma_halves, pack_halves
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.weights.layout import Matrix
from numflow.quant.apart import Outliers, OutlierScheme

_ONES = 0x3C003C00  # two float16


def slots_of(outliers: Outliers) -> np.ndarray:
    """uint32 [N, R]: what is in memory."""
    columns, values = outliers.columns, outliers.values
    if (columns[:, 1:] < columns[:, :-1]).any():  # zeros behind what was cut out
        order = np.argsort(columns, axis=1, kind="stable")
        columns, values = (np.take_along_axis(a, order, 1) for a in (columns, values))
    return columns | values.astype(np.uint32) << 16


def expected_bytes(scheme: OutlierScheme, rows: int, columns: int, cut: bool) -> int:
    """Bytes of the slots; `cut`: of some of a tensor's columns, so that rows differ.

    The fullest row then has about as many as the largest of so many normal numbers; the variance is the mean times the
    share of columns that are elsewhere, 1/2 to 3/4 for 2 to 4 devices.
    """
    slots = scheme.count(columns)
    if cut and rows > 1:
        most = math.sqrt(2 * math.log(rows))
        most -= (math.log(math.log(rows)) + math.log(4 * math.pi)) / (2 * most)
        slots = min(columns, round(scheme.share * columns + most * (0.6 * scheme.share * columns) ** 0.5))
    return 4 * rows * slots


def apart_args(weight: Matrix, x: tuple[Ref, int]) -> tuple:
    """Outliers as arguments of kernels of few tokens: x as float32, address and stride, slots and their number."""
    return (*x, weight.parts["outliers"], weight.outliers) if weight.outliers else (None, 0, None, 0)


@device
def value_of(word):
    """f32 of what is in a slot."""
    return float_of(u32(word & u32(0xFFFF0000)))


@functools.cache
def outlier_adder(tokens: int) -> DeviceFunction:
    """add(acc, word, x, x_stride, slots, begin, slot, step, width, source, left): products of a row's outliers with the
    tokens. A lane has slot `slot`, with `word` in it, and every step-th one after it; the row's begin at `begin`."""

    @device
    def add(acc, word, x, x_stride, slots, begin, slot, step, width, source, left):
        while slot < width:
            for t in range(tokens):
                if tokens == 1 or t < left:
                    acc[t] += value_of(word) * x[(source + t) * x_stride + (word & u32(0xFFFF))]
            slot = u32(slot + step)
            word = slots[begin + slot] if slot < width else u32(0)

    return add


@device
def first_of(slots, slot, end, unit):
    """The first slot of a row in the unit or behind it, and what is in it."""
    word = slots[slot] if slot < end else u32(0)
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) < unit:
        slot = u32(slot + 1)
        word = slots[slot] if slot < end else u32(0)
    return slot, word


@device
def into_tile(tile, at, slots, slot, end, word, unit, scale):
    """Adds a row's outliers in the unit, times scale, to its 32 float16 at tile[at]; the next slot and what is in it.

    Only the thread that has the row may write there.
    """
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) == unit:
        value, odd, i = value_of(word) * scale, word & u32(1), u32(at + (word >> u32(1) & u32(15)))
        tile[i] = fma_halves(tile[i], u32(_ONES), pack_halves(f32(0) if odd else value, value if odd else f32(0)))
        slot = u32(slot + 1)
        word = slots[slot] if slot < end else u32(0)
    return slot, word
