"""`embed` and `embed_ids`: rows of a packed table. Tied embeddings are so stored once.

y[t] = table[tokens[t]] * scale, or the rows ids[t, n] side by side. A table may hold a part of all rows, from row
`first` on: rows outside of that part are -0.0 in y.
"""

from typing import Any

from numflow.cpu.linear.outlier_calls import added_to_rows
from numflow.cpu.linear.slots import EMBED
from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.weights.layout import SCHEMES
from numflow.ops import Step, param

STAMPS = {f"embed_{kind}": ("embed", (kind,)) for kind in SCHEMES}
_CODE = Code("numflow.cpu.linear.embed_kernels", stamps=STAMPS)


def embed(step: Step, ctx) -> list[Call]:
    """table packed [V, D] -> y f32 [T, D]."""
    return _rows(step, ctx, float(param(step, "scale")), {"ids": 0, "ids_stride": 1}, 1)


def embed_ids(step: Step, ctx) -> list[Call]:
    """table packed [V, E], ids i32 [T, N] -> y f32 [T, N * E]."""
    (ids,) = step.inputs
    return _rows(step, ctx, 1.0, ctx.strided("ids", ids), ids.width)


def _rows(step: Step, ctx, scale: float, ids: dict[str, Any], count: int) -> list[Call]:
    """The rows of `count` ids for each token. ids: their address, 0 for the tokens of the batch, and their stride."""
    y, table = step.outputs[0], ctx.packed(step.weights["table"])
    code_bytes, header_bytes = table.scheme.tile_bytes(table.shape[1])
    shared = {"header": ctx.header, "rows_field": ctx.rows(y), **ctx.strided("y", y), "rows": table.shape[0],
              "columns": table.shape[1], "first": param(step, "first"), "scale": scale, **ids, "count": count}
    call = Call.named(step, _CODE.kernel(f"embed_{table.kind}"), EMBED, **shared, codes=table.codes,
                      headers=table.headers, code_bytes=code_bytes, header_bytes=header_bytes)
    return [call] if table.outliers is None else [call, added_to_rows(table.outliers, shared)]
