"""One `embed` kernel per scheme."""

from numflow.cpu.embed_walk import embed_rows
from numflow.cpu.kernel import kernel
from numflow.cpu.linear_tile import scheme


@kernel
def embed_b4_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_scale", False))


@kernel
def embed_b5_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_scale", False))


@kernel
def embed_b8_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b8_scale", False))


@kernel
def embed_b4_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_base", False))


@kernel
def embed_b5_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_base", False))


@kernel
def embed_b4_super(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_super", False))


@kernel
def embed_b5_super(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b5_super", False))


@kernel
def embed_b2_super16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b2_super16", False))


@kernel
def embed_b3_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b3_signed16", False))


@kernel
def embed_b6_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b6_signed16", False))


@kernel
def embed_iq4_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq4_scale", False))


@kernel
def embed_iq4_signed(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq4_signed", False))


@kernel
def embed_e2m1_power(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("e2m1_power", False))


@kernel
def embed_e2m1_scale16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("e2m1_scale16", False))


@kernel
def embed_f32(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("f32", False))


@kernel
def embed_f16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("f16", False))


@kernel
def embed_bf16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("bf16", False))
