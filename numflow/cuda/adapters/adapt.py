"""LoRA adapters, chosen for each row of a batch: y = s y + B (A x) + v (ops `adapt`, `adapt_rows`).

Two launches for each step. The first computes h = A x of every row, one warp for each element of h. The second updates
y, one thread for each column. A row's matrices depend on its sequence's adapter, and on its expert if rows are routes
(tables.py). Rows without an adapter stay unchanged, so a batch may mix adapters. The order of a row's sums does not
depend on the rest of the batch.
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


class RowAdapters(NamedTuple):
    """The adapters of a step's rows.

    indices: adapter of each token, -1 for none. table: entries (tables.py), for `experts` experts from expert `first`
    on. ids: experts of each token, if a row is one of a token's `routes` routes; ids_stride is 0 if rows are tokens.
    counts[field]: number of rows. arena: memory of all matrices.
    """

    indices: i32.ptr
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
    """x f32 [rows, K], y f32 [rows, N]; ids i32 [T, S] if rows are routes."""
    (x, y, *routed), ranks = step.inputs, ctx.adapters.ranks[param(step, "part")]
    adapters, field = _row_adapters(step, ctx, y, *routed), ctx.rows(y)
    h = ctx.scratch("low rank", 4 * ctx.room(y) * ranks)
    shared = routed[0].width if routed and ctx.rows(x) == ctx.rows(routed[0]) else 1
    return [per_row(step, _down, field, ceil(ranks, WARPS), h, ranks, ctx.view(x), shared, x.width, adapters),
            per_row(step, _up, field, ceil(y.width, THREADS), ctx.view(y), h, ranks, y.width, x.width, adapters)]


def adapt_rows(step: Step, ctx) -> list[Call]:
    """y f32 [T, D], rows that were looked up in a table such as the embeddings; the adapter changes the table."""
    y = step.outputs[0]
    return [per_row(step, _look_up, N_TOKENS, ceil(y.width, THREADS), ctx.view(y), ctx.batch.ref("tokens"),
                    param(step, "first"), param(step, "rows"), y.width, _row_adapters(step, ctx, y))]


def _row_adapters(step: Step, ctx, y: View, ids: View | None = None) -> RowAdapters:
    name = "wanted_adapters" if ctx.rows(y) == ROW_FIELD["logits"] else "adapters"
    table, experts = ctx.adapters.table(param(step, "part"))
    expert_ids: tuple[Ref | None, int] = (None, 0) if ids is None else ctx.view(ids)
    return RowAdapters(ctx.batch.ref(name), table, experts, param(step, "first"), *expert_ids,
                       1 if ids is None else ids.width, ctx.batch.counts, ctx.rows(y), ctx.adapters.arena)


@device
def _table_entry(indices, table, experts, first, ids, ids_stride, routes, counts, field, arena, row):
    """Offset in the arena, rank and vector flags of a row's matrices; zeros if the row has none."""
    adapter, expert = i32(indices[row // routes]), i32(0)
    if ids_stride != 0:
        expert = i32(ids[row // routes * ids_stride + row % routes] - first)
    begin, rank, vectors, _ = u32(0), u32(0), u32(0), u32(0)
    if adapter >= 0 and expert >= 0 and expert < experts:
        begin, rank, vectors, _ = load4(table, u32(4 * (adapter * experts + expert)))
    return begin, rank, vectors


@kernel("adapter_down", THREADS)
def _down(h: f32.ptr, ranks: u32, x: Rows, shared: u32, columns: u32, adapters: RowAdapters):
    row, rank, lane = u32(block_x()), u32(block_y() * 4 + (thread_index() >> u32(5))), u32(lane_index())
    if row >= u32(adapters.counts[adapters.field]):
        return
    begin, row_rank, _ = _table_entry(*adapters, row)
    if rank < row_rank:
        a, values = adapters.arena + (begin + rank * columns), x.data + row // shared * x.stride
        total, i = f32(0), lane
        while i < columns:
            total += a[i] * values[i]
            i = u32(i + 32)
        total = warp_sum(total)
        if lane == 0:
            h[row * ranks + rank] = total


@kernel("adapter_up", THREADS)
def _up(y: Rows, h: f32.ptr, ranks: u32, width: u32, columns: u32, adapters: RowAdapters):
    row, column = u32(block_x()), u32(block_y() * 128 + thread_index())
    if row >= u32(adapters.counts[adapters.field]) or column >= width:
        return
    begin, rank, vectors = _table_entry(*adapters, row)
    if rank == 0 and vectors == 0:
        return
    b_column, end = u32(begin + rank * columns + column), u32(begin + rank * (columns + width))
    total, k = f32(0), u32(0)
    if vectors & u32(1) != 0:
        total = adapters.arena[end + column]
        end = u32(end + width)
    while k < rank:
        total += h[row * ranks + k] * adapters.arena[b_column + k * width]
        k = u32(k + 1)
    out = y.data + (row * y.stride + column)
    if vectors & u32(2) != 0:
        out[0] = out[0] * adapters.arena[end + column] + total
    else:
        out[0] = out[0] + total


@kernel("adapter_rows", THREADS)
def _look_up(y: Rows, tokens: i32.ptr, first: u32, held: u32, width: u32, adapters: RowAdapters):
    """y += B A[token]. The device has the `held` rows of the table from row `first` on."""
    row, column = u32(block_x()), u32(block_y() * 128 + thread_index())
    if row >= u32(adapters.counts[adapters.field]) or column >= width:
        return
    begin, rank, _ = _table_entry(*adapters, row)
    table_row, total, k = u32(u32(tokens[row]) - first), f32(0), u32(0)
    if rank > 0 and table_row < held:
        a, b = u32(begin + table_row * rank), u32(begin + held * rank + column)
        while k < rank:
            total += adapters.arena[a + k] * adapters.arena[b + k * width]
            k = u32(k + 1)
        y.data[row * y.stride + column] = y.data[row * y.stride + column] + total
