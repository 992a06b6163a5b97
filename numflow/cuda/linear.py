"""Matrix products (op `linear`): y [T, N] = x [T, K] @ weight[N, K].T + bias[N]."""

from numflow.cuda.call import Call, ceil
from numflow.cuda.device import Launch
from numflow.cuda.linear_float import ROWS, TOKENS, float_gemv
from numflow.ops import Step


def linear(step: Step, ctx) -> list[Call]:
    """x f32 [T, K], weight [N, K], bias f32 [N] -> y f32 [T, N]."""
    (x,), (y,) = step.inputs, step.outputs
    weight, field = ctx.matrix(step.weights["weight"]), ctx.rows(y)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    operand = ctx.operand(x, "f32")

    def plan(sizes):
        rows = sizes.rows[field]
        tile = next((t for t in TOKENS if t >= rows), TOKENS[-1])
        return Launch(float_gemv(weight.kind, tile, False), (ceil(y.width, ROWS), ceil(rows, tile), 1),
                      (*ctx.view(y), operand.x, operand.pitch, weight.codes, bias, None, ctx.batch.counts, field,
                       y.width, weight.pitch, 1))
    return [*operand.calls, Call(step, plan, float_gemv(weight.kind, 1, False))]
