"""Products of low rank that rows add by adapters of their own: y = s y + B (A x) + v.

Two calls for each step: the low rank h = A x of every row that has an adapter, and y = s y + B h + v. The first runs
beside the product that the step stands behind, so that no barrier is between them (bind.py). Up to four rows of the
same adapter meet its matrices together (tables.row_tiles), wherever they stand in the batch; of routed experts those of
the same adapter and expert, which every thread groups for itself. A row's sums are made in
an order that depends on no other row, so that a batch may mix adapters, and rows without any.
"""

from numflow.cpu.adapters.tables import TILE_WORDS
from numflow.cpu.runtime.kernel import ADAPTERS, WANTED_ADAPTERS, Call, Code, Scratch, slots
from numflow.ops import Step, View, param

_CODE = Code("numflow.cpu.adapters.adapt_kernels")
# tiles: where the rows of the batch stand by their adapters (tables.AdapterTables.tiles).
DOWN = slots("tiles table x x_stride columns h ranks")
UP = slots("tiles table y y_stride width h ranks")
# first: number of the first of `experts`, or of `held` rows. routes: rows of y for each token. shared: rows of y for
# each row of x. numbers: the header's field of adapters. groups: for each thread group_words i32, in which it groups
# rows: `entries` of the table, and twice and more for each of `room` rows.
_ROUTED = "header rows numbers table experts first ids ids_stride routes entries room groups group_words "
ROUTED_DOWN = slots(_ROUTED + "x x_stride shared columns h ranks")
ROUTED_UP = slots(_ROUTED + "y y_stride width h ranks")
LOOK_UP = slots("header rows numbers table first held h ranks")


def low_rank(step: Step, ctx) -> Call:
    """The first call of `adapt`: joined to the last one of the product that reads the same x."""
    (x, y, *routed) = step.inputs
    own = ctx.strided("x", x) | {"columns": x.width, "h": _low_rank(ctx, y)}
    if not routed:
        return Call.named(step, _CODE.kernel("adapter_down"), DOWN, **_tiled(step, ctx, y), **own, joined=True)
    common = _routed(step, ctx, y, routed[0])
    shared = common["routes"] if ctx.rows(x) == ctx.rows(routed[0]) else 1
    return Call.named(step, _CODE.kernel("routed_down"), ROUTED_DOWN, **common, **own, shared=shared, joined=True)


def adapt(step: Step, ctx) -> list[Call]:
    """x f32 [rows, K], y f32 [rows, N]; ids i32 [T, S] where rows are routes. Its `low_rank` has been made."""
    (_, _, *routed) = step.inputs
    return [_up(step, ctx, *routed)]


def adapt_rows(step: Step, ctx) -> list[Call]:
    """y f32 [T, D], whose rows are those of a table."""
    y = step.outputs[0]
    table = ctx.adapters.table(param(step, "part"))
    down = Call.named(step, _CODE.kernel("adapter_rows"), LOOK_UP, header=ctx.header, rows=ctx.rows(y),
                      numbers=ADAPTERS, table=table, first=param(step, "first"), held=param(step, "rows"),
                      h=_low_rank(ctx, y), ranks=ctx.adapters.ranks)
    return [down, _up(step, ctx)]


def _up(step: Step, ctx, ids: View | None = None) -> Call:
    y = step.outputs[0]
    own = ctx.strided("y", y) | {"width": y.width, "h": _low_rank(ctx, y)}
    if ids is None:
        return Call.named(step, _CODE.kernel("adapter_up"), UP, **_tiled(step, ctx, y), **own)
    return Call.named(step, _CODE.kernel("routed_up"), ROUTED_UP, **_routed(step, ctx, y, ids), **own)


def _low_rank(ctx, y: View) -> Scratch:
    """Memory for A x of each row of y."""
    return ctx.scratch(f"low rank of {y}", 4 * ctx.room(y) * ctx.adapters.ranks)


def _tiled(step: Step, ctx, y: View) -> dict:
    return {"tiles": ctx.adapters.tiles[int(_wanted(ctx, y))], "table": ctx.adapters.table(param(step, "part")),
            "ranks": ctx.adapters.ranks}


def _routed(step: Step, ctx, y: View, ids: View) -> dict:
    table = ctx.adapters.table(param(step, "part"))
    address, stride = ctx.view(ids)
    entries, room = table.shape[0] * table.shape[1], ctx.room(y)
    words = entries + (1 + TILE_WORDS) * room
    groups = ctx.scratch("rows by adapter and expert", 4 * words * ctx.n_threads).array  # a thread's part is its own
    return {"header": ctx.header, "rows": ctx.rows(y), "numbers": WANTED_ADAPTERS if _wanted(ctx, y) else ADAPTERS,
            "table": table, "experts": table.shape[1], "first": param(step, "first"), "ids": address,
            "ids_stride": stride, "routes": ids.width, "entries": entries, "room": room,
            "groups": groups, "group_words": words, "ranks": ctx.adapters.ranks}


def _wanted(ctx, y: View) -> bool:
    """Whether rows of y are those whose logits are wanted."""
    return ctx.network.buffers[y.buffer].rows == "logits"
