"""`embed`: rows of a packed table. Tied embeddings are so stored once.

y[t] = table[tokens[t]] * scale. A table may hold a part of the vocabulary, from row `first` on: y[t] is then -0.0 for
tokens outside of that part.
"""

from numflow.cpu.linear.outlier_calls import added_to_rows
from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.weights.layout import SCHEMES
from numflow.ops import Step, param

STAMPS = {f"embed_{kind}": ("embed", (kind,)) for kind in SCHEMES}
_CODE = Code("numflow.cpu.linear.embed_kernels", stamps=STAMPS)


def embed(step: Step, ctx) -> list[Call]:
    """table packed [V, D] -> y f32 [T, D]."""
    y, table = step.outputs[0], ctx.packed(step.weights["table"])
    scale_and_first = float(param(step, "scale")), param(step, "first")
    call = Call.of(step, _CODE.kernel(f"embed_{table.kind}"), ctx.header, ctx.rows(y), table.codes, table.headers,
                   *table.shape, *table.scheme.tile_bytes(y.width), *ctx.view(y), *scale_and_first)
    if table.outliers is None:
        return [call]
    return [call, added_to_rows(step, ctx, table.outliers, table.shape[0], *scale_and_first)]
