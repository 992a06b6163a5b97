"""`embed`: rows of a packed table, so that tied embeddings are stored once.

y[t] = table[tokens[t]] * scale
"""

from numflow.cpu.embed_walk import embed_rows
from numflow.cpu.inferflow_kernels import EMBED as INFERFLOW
from numflow.cpu.kernel import Call, kernel
from numflow.cpu.linear_tile import scheme
from numflow.cpu.own_kernels import EMBED as OWN
from numflow.ops import Step, param


def embed(step: Step, ctx) -> list[Call]:
    """table packed [V, D] -> y f32 [T, D]."""
    y, table = step.outputs[0], ctx.packed(step.weights["table"])
    return [Call.of(step, KERNELS[table.kind], ctx.header, ctx.rows(y), table.codes, table.headers, *table.shape,
                    *table.scheme.tile_bytes(y.width), *ctx.view(y), float(param(step, "scale")))]


@kernel
def _embed_b4_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_scale", False))


@kernel
def _embed_b5_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_scale", False))


@kernel
def _embed_b8_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b8_scale", False))


@kernel
def _embed_b4_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_base", False))


@kernel
def _embed_b5_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_base", False))


@kernel
def _embed_b4_super(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_super", False))


@kernel
def _embed_b5_super(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_super", False))


@kernel
def _embed_b2_super16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b2_super16", False))


@kernel
def _embed_b3_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b3_signed16", False))


@kernel
def _embed_b6_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b6_signed16", False))


@kernel
def _embed_iq4_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq4_scale", False))


@kernel
def _embed_iq4_signed(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq4_signed", False))


@kernel
def _embed_e2m1_power(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("e2m1_power", False))


@kernel
def _embed_e2m1_scale16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("e2m1_scale16", False))


@kernel
def _embed_f32(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("f32", False))


@kernel
def _embed_f16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("f16", False))


@kernel
def _embed_bf16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("bf16", False))


# The kernel by scheme of the table.
KERNELS = {
    **OWN,
    **INFERFLOW,
    "b4_scale": _embed_b4_scale,
    "b5_scale": _embed_b5_scale,
    "b8_scale": _embed_b8_scale,
    "b4_base": _embed_b4_base,
    "b5_base": _embed_b5_base,
    "b4_super": _embed_b4_super,
    "b5_super": _embed_b5_super,
    "b2_super16": _embed_b2_super16,
    "b3_signed16": _embed_b3_signed16,
    "b6_signed16": _embed_b6_signed16,
    "iq4_scale": _embed_iq4_scale,
    "iq4_signed": _embed_iq4_signed,
    "e2m1_power": _embed_e2m1_power,
    "e2m1_scale16": _embed_e2m1_scale16,
    "f32": _embed_f32,
    "f16": _embed_f16,
    "bf16": _embed_bf16,
}
