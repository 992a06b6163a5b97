"""Kernels that bring Inferflow's blocks into the packed layout, and those that multiply what has no other source.

One kernel serves all schemes of a kind: bits of a code with a scale and a base for 32 columns, or for 16.
"""

from numflow.cpu.embed_walk import embed_rows
from numflow.cpu.kernel import kernel
from numflow.cpu.linear_tile import scheme
from numflow.cpu.linear_walk import expert_linear, linear
from numflow.cpu.pack_kernels import block, pack_blocks


@kernel
def _pack_q8_b32t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q8_b32t1"))


@kernel
def _pack_q8_b32t2(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q8_b32t2"))


@kernel
def _pack_q6_b64t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q6_b64t1"))


@kernel
def _pack_q5_b64t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q5_b64t1"))


@kernel
def _pack_q5_b32t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q5_b32t1"))


@kernel
def _pack_q4_b64t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q4_b64t1"))


@kernel
def _pack_q4_b32t1a(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q4_b32t1a"))


@kernel
def _pack_q4_b32t1b(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q4_b32t1b"))


@kernel
def _pack_q4_b16(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q4_b16"))


@kernel
def _pack_q3h_b64t1(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q3h_b64t1"))


@kernel
def _pack_q3_b32t1a(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q3_b32t1a"))


@kernel
def _pack_q3_b32t1b(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q3_b32t1b"))


@kernel
def _pack_q2_b32t1a(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q2_b32t1a"))


@kernel
def _pack_q2_b32t1b(args, thread, n_threads):
    pack_blocks(args, thread, n_threads, block("q2_b32t1b"))


@kernel
def _linear_b2_base_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b2_base", True))


@kernel
def _linear_b2_base_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b2_base", False))


@kernel
def _linear_b3_base_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b3_base", True))


@kernel
def _linear_b3_base_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b3_base", False))


@kernel
def _linear_b3h_base_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b3h_base", True))


@kernel
def _linear_b3h_base_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b3h_base", False))


@kernel
def _linear_b4_bytes16_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b4_bytes16", True))


@kernel
def _linear_b4_bytes16_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b4_bytes16", False))


@kernel
def _linear_b6_base_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b6_base", True))


@kernel
def _linear_b6_base_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b6_base", False))


@kernel
def _linear_b8_base_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b8_base", True))


@kernel
def _linear_b8_base_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b8_base", False))


@kernel
def _expert_linear_b2_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_base", True))


@kernel
def _expert_linear_b2_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_base", False))


@kernel
def _expert_linear_b3_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3_base", True))


@kernel
def _expert_linear_b3_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3_base", False))


@kernel
def _expert_linear_b3h_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3h_base", True))


@kernel
def _expert_linear_b3h_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3h_base", False))


@kernel
def _expert_linear_b4_bytes16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_bytes16", True))


@kernel
def _expert_linear_b4_bytes16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_bytes16", False))


@kernel
def _expert_linear_b6_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b6_base", True))


@kernel
def _expert_linear_b6_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b6_base", False))


@kernel
def _expert_linear_b8_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b8_base", True))


@kernel
def _expert_linear_b8_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b8_base", False))


@kernel
def _embed_b2_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b2_base", False))


@kernel
def _embed_b3_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b3_base", False))


@kernel
def _embed_b3h_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b3h_base", False))


@kernel
def _embed_b4_bytes16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b4_bytes16", False))


@kernel
def _embed_b6_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b6_base", False))


@kernel
def _embed_b8_base(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b8_base", False))
