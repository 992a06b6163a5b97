"""Low-rank adapters (LoRA) of sequences: y = s y + B (A x) + v, with the matrices of the row's adapter.

A step has two calls: h = A x for every row that has an adapter, and y = s y + B h + v. The first call runs together
with the product that the step follows, without a barrier between them (bind.py). Matrices of an adapter are multiplied
with up to four of its rows at a time (tables.row_tiles), wherever in the batch they are; with routed experts, with rows
of the same adapter and expert, which every thread groups for itself. The order of a row's sums does not depend on other
rows, so a batch may mix adapters, and rows without one.
"""

from numflow.cpu.adapters.tables import TILE_WORDS
from numflow.cpu.runtime.kernel import ADAPTERS, WANTED_ADAPTERS, Call, Code, Scratch, slots
from numflow.ops import Step, View, param

_CODE = Code("numflow.cpu.adapters.adapt_kernels")
# tiles: rows of the batch grouped by adapter (tables.AdapterTables.tiles). table: entries of tables.py.
DOWN = slots("tiles table x x_stride columns h ranks")
UP = slots("tiles table y y_stride width h ranks")
# first: id of the first of `experts` experts, or of `table_rows` rows. routes: rows of y per token. shared: rows of y
# per row of x. adapters: header field of the rows' adapters. groups: group_words i32 per thread, to group rows:
# `entries` words, then 1 + TILE_WORDS words for each of max_rows rows.
_ROUTED = "header rows adapters table experts first ids ids_stride routes entries max_rows groups group_words "
ROUTED_DOWN = slots(_ROUTED + "x x_stride shared columns h ranks")
ROUTED_UP = slots(_ROUTED + "y y_stride width h ranks")
LOOK_UP = slots("header rows adapters table first table_rows h ranks")


def low_rank(step: Step, ctx) -> Call:
    """The first call of `adapt`, h = A x: joined to the last call of the product that reads the same x."""
    (x, y, *routed) = step.inputs
    down = ctx.strided("x", x) | {"columns": x.width, "h": _low_rank(ctx, y)}
    if not routed:
        return Call.named(step, _CODE.kernel("adapter_down"), DOWN, **_tiled(step, ctx, y), **down, joined=True)
    routing = _routed(step, ctx, y, routed[0])
    shared = routing["routes"] if ctx.rows(x) == ctx.rows(routed[0]) else 1
    return Call.named(step, _CODE.kernel("routed_down"), ROUTED_DOWN, **routing, **down, shared=shared, joined=True)


def adapt(step: Step, ctx) -> list[Call]:
    """x f32 [rows, K], y f32 [rows, N]; ids i32 [T, S] if rows are routes. `low_rank` of the step is called before."""
    (_, _, *routed) = step.inputs
    return [_up(step, ctx, *routed)]


def adapt_rows(step: Step, ctx) -> list[Call]:
    """y f32 [T, D], rows of an embedding table."""
    y = step.outputs[0]
    table = ctx.adapters.table(param(step, "part"))
    down = Call.named(step, _CODE.kernel("adapter_rows"), LOOK_UP, header=ctx.header, rows=ctx.rows(y),
                      adapters=ADAPTERS, table=table, first=param(step, "first"), table_rows=param(step, "rows"),
                      h=_low_rank(ctx, y), ranks=ctx.adapters.ranks)
    return [down, _up(step, ctx)]


def _up(step: Step, ctx, ids: View | None = None) -> Call:
    y = step.outputs[0]
    up = ctx.strided("y", y) | {"width": y.width, "h": _low_rank(ctx, y)}
    if ids is None:
        return Call.named(step, _CODE.kernel("adapter_up"), UP, **_tiled(step, ctx, y), **up)
    return Call.named(step, _CODE.kernel("routed_up"), ROUTED_UP, **_routed(step, ctx, y, ids), **up)


def _low_rank(ctx, y: View) -> Scratch:
    """Memory for A x of each row of y."""
    return ctx.scratch(f"low rank of {y}", 4 * ctx.max_rows(y) * ctx.adapters.ranks)


def _tiled(step: Step, ctx, y: View) -> dict:
    return {"tiles": ctx.adapters.tiles[int(_wanted(ctx, y))], "table": ctx.adapters.table(param(step, "part")),
            "ranks": ctx.adapters.ranks}


def _routed(step: Step, ctx, y: View, ids: View) -> dict:
    table = ctx.adapters.table(param(step, "part"))
    address, stride = ctx.view(ids)
    entries, max_rows = table.shape[0] * table.shape[1], ctx.max_rows(y)
    words = entries + (1 + TILE_WORDS) * max_rows
    # Each thread uses a separate part, so steps need no barrier because of this memory.
    groups = ctx.scratch("rows by adapter and expert", 4 * words * ctx.n_threads).array
    return {"header": ctx.header, "rows": ctx.rows(y), "adapters": WANTED_ADAPTERS if _wanted(ctx, y) else ADAPTERS,
            "table": table, "experts": table.shape[1], "first": param(step, "first"), "ids": address,
            "ids_stride": stride, "routes": ids.width, "entries": entries, "max_rows": max_rows,
            "groups": groups, "group_words": words, "ranks": ctx.adapters.ranks}


def _wanted(ctx, y: View) -> bool:
    """Whether rows of y are those whose logits are wanted."""
    return ctx.network.buffers[y.buffer].rows == "logits"
