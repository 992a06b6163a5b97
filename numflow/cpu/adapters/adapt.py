"""Products of low rank that rows add by adapters of their own: y = s y + B (A x) + v.

Two calls for each step: the low rank h = A x of every row that has an adapter, and y = s y + B h + v. The first runs
beside the product that the step stands behind, so that no barrier is between them (bind.py). A row's sums are made in
an order that depends on no other row, so that a batch may mix adapters, and rows without any.
"""

from numflow.cpu.runtime.kernel import ADAPTERS, WANTED_ADAPTERS, Call, Code, Scratch, slots
from numflow.ops import Step, View, param

_CODE = Code("numflow.cpu.adapters.adapt_kernels")
# first: number of the first of `experts`, or of `held` rows. routes: rows of y for each token. shared: rows of y for
# each row of x. numbers: the header's field of adapters.
DOWN = slots("header rows numbers table experts first ids ids_stride routes x x_stride shared columns h ranks")
UP = slots("header rows numbers table experts first ids ids_stride routes y y_stride width h ranks")
LOOK_UP = slots("header rows numbers table first held h ranks")


def low_rank(step: Step, ctx) -> Call:
    """The first call of `adapt`: joined to the first one of the product that reads the same x."""
    (x, y, *routed) = step.inputs
    common = _common(step, ctx, y, *routed)
    shared = common["routes"] if routed and ctx.rows(x) == ctx.rows(routed[0]) else 1
    return Call.named(step, _CODE.kernel("adapter_down"), DOWN, **common, **ctx.strided("x", x), shared=shared,
                      columns=x.width, h=_low_rank(ctx, y), joined=True)


def adapt(step: Step, ctx) -> list[Call]:
    """x f32 [rows, K], y f32 [rows, N]; ids i32 [T, S] where rows are routes. Its `low_rank` has been made."""
    (_, y, *routed) = step.inputs
    return [_up(step, ctx, _common(step, ctx, y, *routed), _low_rank(ctx, y))]


def adapt_rows(step: Step, ctx) -> list[Call]:
    """y f32 [T, D], whose rows are those of a table."""
    y = step.outputs[0]
    h, common = _low_rank(ctx, y), _common(step, ctx, y)
    down = Call.named(step, _CODE.kernel("adapter_rows"), LOOK_UP, h=h, held=param(step, "rows"),
                      **{name: common[name] for name in LOOK_UP._fields if name not in ("h", "held")})
    return [down, _up(step, ctx, common, h)]


def _up(step: Step, ctx, common: dict, h: Scratch) -> Call:
    y = step.outputs[0]
    return Call.named(step, _CODE.kernel("adapter_up"), UP, **common, **ctx.strided("y", y), width=y.width, h=h)


def _low_rank(ctx, y: View) -> Scratch:
    """Memory for A x of each row of y."""
    return ctx.scratch(f"low rank of {y}", 4 * ctx.room(y) * ctx.adapters.ranks)


def _common(step: Step, ctx, y: View, ids: View | None = None) -> dict:
    table = ctx.adapters.table(param(step, "part"))
    address, stride = (0, 0) if ids is None else ctx.view(ids)
    wanted = ctx.network.buffers[y.buffer].rows == "logits"
    return {"header": ctx.header, "rows": ctx.rows(y), "numbers": WANTED_ADAPTERS if wanted else ADAPTERS,
            "table": table, "experts": table.shape[1], "first": param(step, "first"), "ids": address,
            "ids_stride": stride, "routes": 1 if ids is None else ids.width, "ranks": ctx.adapters.ranks}
