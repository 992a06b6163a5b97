"""Rotary position embeddings (ops `rope_angles`, `rope`): (a, b) -> (a cos - b sin, b cos + a sin) for column pairs."""

from numflow.cpu.runtime.kernel import Call, Code
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.elementwise.rope_kernels")


def rope_angles(step: Step, ctx) -> list[Call]:
    """y f32 [T, 2F], cosines first; inv_freq f32 [F], or one row per sequence if it depends on the length."""
    y = step.outputs[0]
    inv_freq, *_ = map(ctx.vector, step.weights.values())
    if param(step, "border"):
        return [Call.of(step, _CODE.kernel("rope_angles_by_length"), ctx.header, ctx.rows(y), ctx.by_length.start(step),
                        inv_freq.size, *ctx.view(y), 0, 0, param(step, "offset"))]
    return [Call.of(step, _CODE.kernel("rope_angles"), ctx.header, ctx.rows(y), inv_freq, inv_freq.size, *ctx.view(y),
                    float(param(step, "scale")), 0, param(step, "offset"))]


def rope(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, H*E]; y may be x; angles f32 [T, 2F]."""
    x, angles = step.inputs
    fn = _CODE.kernel("rope_half") if param(step, "pairing") == "half" else _CODE.kernel("rope_adjacent")
    return [Call.of(step, fn, ctx.header, ctx.rows(x), *ctx.view(x), *ctx.view(step.outputs[0]), *ctx.view(angles),
                    param(step, "heads"), param(step, "head_dim"), param(step, "start"), angles.width // 2)]
