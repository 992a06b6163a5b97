"""Products of low rank that rows add by adapters of their own: y = s y + B (A x) + v (ops `adapt`, `adapt_rows`).

Two launches for each step: the low rank h = A x of every row, a warp for each number of it; then y, a thread for each
column. A row finds its matrices by its sequence's adapter, and its expert where rows are routes (tables.py), and rows
without any are left alone, so a batch may mix adapters. A row's sums are made in one order whatever is beside it.
"""

from typing import NamedTuple

from numflow.cuda.device.call import N_TOKENS, ROW_FIELD, Call, ceil, per_row
from numflow.cuda.device.device import Ref
from numflow.cuda.lang.intrinsics import block_x, block_y, lane_index, load4, thread_index
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, View, param

THREADS, WARPS = 128, 4


class Own(NamedTuple):
    """Adapters of rows: numbers of those of tokens, the table of entries, of `experts` from number `first` on where
    rows are `routes` of tokens to experts `ids` (ids_stride 0: they are not); counts[field] rows."""

    numbers: i32.ptr
    table: u32.ptr
    experts: i32
    first: i32
    ids: i32.ptr
    ids_stride: u32
    routes: u32
    counts: i32.ptr
    field: u32
    arena: f32.ptr


def adapt(step: Step, ctx) -> list[Call]:
    """x f32 [rows, K], y f32 [rows, N]; ids i32 [T, S] where rows are routes."""
    (x, y, *routed), ranks = step.inputs, ctx.adapters.ranks[param(step, "part")]
    own, field, h = _own(step, ctx, y, *routed), ctx.rows(y), ctx.scratch("low rank", 4 * ctx.room(y) * ranks)
    shared = routed[0].width if routed and ctx.rows(x) == ctx.rows(routed[0]) else 1
    return [per_row(step, _down, field, ceil(ranks, WARPS), h, ranks, ctx.view(x), shared, x.width, own),
            per_row(step, _up, field, ceil(y.width, THREADS), ctx.view(y), h, ranks, y.width, x.width, own)]


def adapt_rows(step: Step, ctx) -> list[Call]:
    """y f32 [T, D], whose rows are those of a table."""
    y = step.outputs[0]
    return [per_row(step, _look_up, N_TOKENS, ceil(y.width, THREADS), ctx.view(y), ctx.batch.ref("tokens"),
                    param(step, "first"), param(step, "rows"), y.width, _own(step, ctx, y))]


def _own(step: Step, ctx, y: View, ids: View | None = None) -> Own:
    kept = "wanted_adapters" if ctx.rows(y) == ROW_FIELD["logits"] else "adapters"
    table, experts = ctx.adapters.table(param(step, "part"))
    places: tuple[Ref | None, int] = (None, 0) if ids is None else ctx.view(ids)
    return Own(ctx.batch.ref(kept), table, experts, param(step, "first"), *places, 1 if ids is None else ids.width,
               ctx.batch.counts, ctx.rows(y), ctx.adapters.arena)


@device
def _entry(numbers, table, experts, first, ids, ids_stride, routes, counts, field, arena, row):
    """Begin in the arena, rank and vectors of a row's matrices; zeros without any."""
    number, expert = i32(numbers[row // routes]), i32(0)
    if ids_stride != 0:
        expert = i32(ids[row // routes * ids_stride + row % routes] - first)
    begin, rank, vectors, _ = u32(0), u32(0), u32(0), u32(0)
    if number >= 0 and expert >= 0 and expert < experts:
        begin, rank, vectors, _ = load4(table, u32(4 * (number * experts + expert)))
    return begin, rank, vectors


@kernel("adapter_down", THREADS)
def _down(h: f32.ptr, ranks: u32, x: Rows, shared: u32, columns: u32, own: Own):
    row, rank, lane = u32(block_x()), u32(block_y() * 4 + (thread_index() >> u32(5))), u32(lane_index())
    if row >= u32(own.counts[own.field]):
        return
    begin, mine, _ = _entry(*own, row)
    if rank < mine:
        a, values = own.arena + (begin + rank * columns), x.data + row // shared * x.stride
        total, i = f32(0), lane
        while i < columns:
            total += a[i] * values[i]
            i = u32(i + 32)
        total = warp_sum(total)
        if lane == 0:
            h[row * ranks + rank] = total


@kernel("adapter_up", THREADS)
def _up(y: Rows, h: f32.ptr, ranks: u32, width: u32, columns: u32, own: Own):
    row, column = u32(block_x()), u32(block_y() * 128 + thread_index())
    if row >= u32(own.counts[own.field]) or column >= width:
        return
    begin, rank, vectors = _entry(*own, row)
    if rank == 0 and vectors == 0:
        return
    at, end, total, k = u32(begin + rank * columns + column), u32(begin + rank * (columns + width)), f32(0), u32(0)
    if vectors & u32(1) != 0:
        total = own.arena[end + column]
        end = u32(end + width)
    while k < rank:
        total += h[row * ranks + k] * own.arena[at + k * width]
        k = u32(k + 1)
    to = y.data + (row * y.stride + column)
    if vectors & u32(2) != 0:
        to[0] = to[0] * own.arena[end + column] + total
    else:
        to[0] = to[0] + total


@kernel("adapter_rows", THREADS)
def _look_up(y: Rows, tokens: i32.ptr, first: u32, held: u32, width: u32, own: Own):
    """Of a table that begins with row `first` of a larger one and has `held`."""
    row, column = u32(block_x()), u32(block_y() * 128 + thread_index())
    if row >= u32(own.counts[own.field]) or column >= width:
        return
    begin, rank, _ = _entry(*own, row)
    at, total, k = u32(u32(tokens[row]) - first), f32(0), u32(0)
    if rank > 0 and at < held:
        a, b = u32(begin + at * rank), u32(begin + held * rank + column)
        while k < rank:
            total += own.arena[a + k] * own.arena[b + k * width]
            k = u32(k + 1)
        y.data[row * y.stride + column] = y.data[row * y.stride + column] + total
