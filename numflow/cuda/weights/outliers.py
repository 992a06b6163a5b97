"""Outliers of a quantised matrix (numflow/quant/apart.py): a sparse matrix S beside the quantised matrix W.

    y [T, N] = W @ x + S @ x, where S [N, K] has a few weights in each row

Kernels for few tokens multiply S by float32 activations, one lane for each outlier (linear/gemv.py). On tensor cores,
outliers are added to the tiles of weights, in float16 (linear/gemm.py).

slots  u32 [N][R]: column | bits of the bfloat16 value << 16, in rising order of columns. All rows have as many slots as
       the fullest one; unused slots have value zero and any column.
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
    """The slots as they are stored in memory, uint32 [N, R]."""
    columns, values = outliers.columns, outliers.values
    if (columns[:, 1:] < columns[:, :-1]).any():  # a cut by columns has left zeros at the end
        order = np.argsort(columns, axis=1, kind="stable")
        columns, values = (np.take_along_axis(a, order, 1) for a in (columns, values))
    return columns | values.astype(np.uint32) << 16


def expected_bytes(scheme: OutlierScheme, rows: int, columns: int, cut: bool) -> int:
    """Expected bytes of the slots. cut: only some of a tensor's columns are here, so that rows differ in their number.

    The fullest row is estimated by the expected maximum of `rows` normal variables, whose variance is the mean times
    the share of columns on other devices (1/2 to 3/4 for 2 to 4 devices).
    """
    slots = scheme.count(columns)
    if cut and rows > 1:
        most = math.sqrt(2 * math.log(rows))
        most -= (math.log(math.log(rows)) + math.log(4 * math.pi)) / (2 * most)
        slots = min(columns, round(scheme.share * columns + most * (0.6 * scheme.share * columns) ** 0.5))
    return 4 * rows * slots


def apart_args(weight: Matrix, x: tuple[Ref, int]) -> tuple:
    """Outliers as kernel arguments: address and stride of float32 x, address of the slots, and slots of a row."""
    return (*x, weight.parts["outliers"], weight.outliers) if weight.outliers else (None, 0, None, 0)


@device
def value_of(word):
    """The f32 value of a slot."""
    return float_of(u32(word & u32(0xFFFF0000)))


@functools.cache
def outlier_adder(tokens: int) -> DeviceFunction:
    """add(acc, word, x, x_stride, slots, begin, slot, step, width, source, left): add the products of a row's outliers
    and the tokens.

    begin: index of the row's first slot. A lane has slot `slot` of the row, whose content is `word`, and every step-th
    slot after it.
    """

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
    """The first slot of a row whose column is in the unit or after it, and its content."""
    word = slots[slot] if slot < end else u32(0)
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) < unit:
        slot = u32(slot + 1)
        word = slots[slot] if slot < end else u32(0)
    return slot, word


@device
def into_tile(tile, at, slots, slot, end, word, unit, scale):
    """Add a row's outliers in the unit, times scale, to the row's 32 float16 at tile[at]. Only the row's thread may
    call it. Returns the next slot and its content."""
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) == unit:
        value, odd, i = value_of(word) * scale, word & u32(1), u32(at + (word >> u32(1) & u32(15)))
        tile[i] = fma_halves(tile[i], u32(_ONES), pack_halves(f32(0) if odd else value, value if odd else f32(0)))
        slot = u32(slot + 1)
        word = slots[slot] if slot < end else u32(0)
    return slot, word
