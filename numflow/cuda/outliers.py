"""Outliers kept apart from a quantised matrix (numflow/quant/apart.py): a sparse matrix beside the packed one.

    y [T, N] += factor * S @ x, where S [N, K] has a few weights of each row

The matrix without them meets its activations as ever; S meets float32 activations and is added to what the matrix's
kernel has stored. Prompts on tensor cores have them put into the tiles instead (linear_gemm.py).

slots  u32 [N][R]: column | bits of its bfloat16 << 16, columns rising. Every row has as many as the fullest one;
       what is left of the others is zeros, of any column.

8 neighbouring lanes share a row, so that a warp reads the slots of 4 rows, which lie one after the other.
"""

import functools
import math

import numpy as np

from numflow.cuda.arithmetic import float_of, fma_halves, pack_halves
from numflow.cuda.call import N_ROUTES, Call, Sizes, ceil
from numflow.cuda.device import Launch, Ref
from numflow.cuda.intrinsic import LocalArray
from numflow.cuda.intrinsics import block_x, block_y, shuffle_xor, stream1, thread_index
from numflow.cuda.kernel import Kernel, device, kernel
from numflow.cuda.layout import Matrix
from numflow.cuda.linear_gemv import TOKENS
from numflow.cuda.scalar import f32, i32, u32
from numflow.quant.apart import Outliers, OutlierScheme

THREADS, ROWS = 128, 16  # of a block
_ONES = 0x3C003C00       # two float16


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


def added(weight: Matrix, ctx, x: tuple[Ref, int], y: tuple[Ref, int], field: int, n: int, factor: float = 1.0) -> Call:
    """What adds those of a matrix of n rows to the products that the field counts; x, y: address and stride."""
    def plan(sizes: Sizes) -> Launch:
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), TOKENS[-1])
        return Launch(sparse(tile, False), (ceil(n, ROWS), ceil(rows, tile), 1), (
            *y, factor, *x, weight.parts["outliers"], weight.outliers, None, ctx.batch.counts, field, n, 1))
    return Call(None, plan)


def added_to_routes(weight: Matrix, ctx, x: tuple[Ref, int], y: tuple[Ref, int], n: int, places: Ref,
                    routes: int) -> Call:
    """The same for experts: places i32 [T * S] as moe_group.matrices_of_routes has them; routes: rows of y for one
    of x."""
    def plan(sizes: Sizes) -> Launch:
        return Launch(sparse(1, True), (ceil(n, ROWS), sizes.rows[N_ROUTES], 1), (
            *y, 1.0, *x, weight.parts["outliers"], weight.outliers, places, ctx.batch.counts, N_ROUTES, n, routes))
    return Call(None, plan)


@functools.cache
def sparse(tokens: int, routed: bool) -> Kernel:
    """grid (N / 16, rows / tokens). routed: `ids` names the matrix of each row of y, x has a row for `routes` of them.
    """
    sums = LocalArray(f32, tokens)

    @kernel(f"add_outliers_{tokens}{'_routed' * routed}", THREADS)
    def _add(y: f32.ptr, y_stride: u32, factor: f32, x: f32.ptr, x_stride: u32, slots: u32.ptr, width: u32,
             ids: i32.ptr, counts: i32.ptr, rows: u32, n: u32, routes: u32):
        thread, first, count = u32(thread_index()), u32(block_y() * tokens), u32(counts[rows])
        part, row = thread & u32(7), u32(block_x() * 16 + (thread >> u32(3)))
        if first >= count:
            return
        place, source = row, first
        if routed:
            if ids[first] < 0:  # an expert of another device
                return
            place, source = u32(ids[first] * n + row), u32(first // routes)
        acc, total, i = sums(), f32(0), part if row < n else width
        for t in range(tokens):
            acc[t] = f32(0)
        to, before = (first + part) * y_stride + row, f32(0)
        if row < n and part < tokens and first + part < count:  # lane t of a row ends token t
            before = y[to]
        while i < width:
            word, more = stream1(slots, place * width + i), u32(0)
            if i + 8 < width:
                more = stream1(slots, place * width + i + 8)
            a, b = float_of(u32(word & u32(0xFFFF0000))), float_of(u32(more & u32(0xFFFF0000)))
            for t in range(tokens):
                if tokens == 1 or first + t < count:
                    at = (source + t) * x_stride
                    acc[t] += a * x[at + (word & u32(0xFFFF))] + b * x[at + (more & u32(0xFFFF))]
            i = u32(i + 16)
        for t in range(tokens):
            value = acc[t]
            value += shuffle_xor(value, 1)
            value += shuffle_xor(value, 2)
            value += shuffle_xor(value, 4)
            if part == t:
                total = value
        if row < n and part < tokens and first + part < count:
            y[to] = before + factor * total

    return _add


@device
def first_of(slots, slot, end, unit):
    """The first slot of a row in the unit or behind it, and what is in it."""
    word = stream1(slots, slot) if slot < end else u32(0)
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) < unit:
        slot = u32(slot + 1)
        word = stream1(slots, slot) if slot < end else u32(0)
    return slot, word


@device
def into_tile(tile, at, slots, slot, end, word, unit, scale):
    """Adds a row's outliers in the unit, times scale, to its 32 float16 at tile[at]; the next slot and what is in it.

    Only the thread that has the row may write there.
    """
    while slot < end and u32(word & u32(0xFFFF)) >> u32(5) == unit:
        value, i = float_of(u32(word & u32(0xFFFF0000))) * scale, u32(at + (word >> u32(1) & u32(15)))
        odd = word & u32(1)
        tile[i] = fma_halves(tile[i], u32(_ONES), pack_halves(f32(0) if odd else value, value if odd else f32(0)))
        slot = u32(slot + 1)
        word = stream1(slots, slot) if slot < end else u32(0)
    return slot, word
