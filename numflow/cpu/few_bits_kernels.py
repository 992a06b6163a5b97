"""Kernels of the schemes of 1 to 4 bits that GGML's ternary types and those of grids are kept in."""

from numflow.cpu.embed_walk import embed_rows
from numflow.cpu.kernel import kernel
from numflow.cpu.linear_tile import scheme
from numflow.cpu.linear_walk import expert_linear, linear


@kernel
def _linear_b1_scale_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b1_scale", True))


@kernel
def _linear_b1_scale_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b1_scale", False))


@kernel
def _linear_b2_scale_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b2_scale", True))


@kernel
def _linear_b2_scale_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("b2_scale", False))


@kernel
def _linear_iq1_signed_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq1_signed", True))


@kernel
def _linear_iq1_signed_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq1_signed", False))


@kernel
def _linear_iq1_signed16_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq1_signed16", True))


@kernel
def _linear_iq1_signed16_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq1_signed16", False))


@kernel
def _linear_iq2_signed_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq2_signed", True))


@kernel
def _linear_iq2_signed_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq2_signed", False))


@kernel
def _linear_iq2_signed16_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq2_signed16", True))


@kernel
def _linear_iq2_signed16_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq2_signed16", False))


@kernel
def _linear_iq3_signed_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq3_signed", True))


@kernel
def _linear_iq3_signed_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq3_signed", False))


@kernel
def _linear_iq3_odd_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq3_odd", True))


@kernel
def _linear_iq3_odd_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("iq3_odd", False))


@kernel
def _expert_linear_b1_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b1_scale", True))


@kernel
def _expert_linear_b1_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b1_scale", False))


@kernel
def _expert_linear_b2_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_scale", True))


@kernel
def _expert_linear_b2_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_scale", False))


@kernel
def _expert_linear_iq1_signed_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq1_signed", True))


@kernel
def _expert_linear_iq1_signed_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq1_signed", False))


@kernel
def _expert_linear_iq1_signed16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq1_signed16", True))


@kernel
def _expert_linear_iq1_signed16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq1_signed16", False))


@kernel
def _expert_linear_iq2_signed_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq2_signed", True))


@kernel
def _expert_linear_iq2_signed_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq2_signed", False))


@kernel
def _expert_linear_iq2_signed16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq2_signed16", True))


@kernel
def _expert_linear_iq2_signed16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq2_signed16", False))


@kernel
def _expert_linear_iq3_signed_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq3_signed", True))


@kernel
def _expert_linear_iq3_signed_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq3_signed", False))


@kernel
def _expert_linear_iq3_odd_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq3_odd", True))


@kernel
def _expert_linear_iq3_odd_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq3_odd", False))


@kernel
def embed_b1_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b1_scale", False))


@kernel
def embed_b2_scale(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("b2_scale", False))


@kernel
def embed_iq1_signed(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq1_signed", False))


@kernel
def embed_iq1_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq1_signed16", False))


@kernel
def embed_iq2_signed(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq2_signed", False))


@kernel
def embed_iq2_signed16(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq2_signed16", False))


@kernel
def embed_iq3_signed(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq3_signed", False))


@kernel
def embed_iq3_odd(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("iq3_odd", False))
