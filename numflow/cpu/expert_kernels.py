"""One `expert_linear` kernel per scheme and kind of activations; compiled when a program first binds it."""

from numflow.cpu.kernel import kernel
from numflow.cpu.linear_tile import scheme
from numflow.cpu.linear_walk import expert_linear


@kernel
def _expert_linear_b4_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_scale", True))


@kernel
def _expert_linear_b4_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_scale", False))


@kernel
def _expert_linear_b5_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_scale", True))


@kernel
def _expert_linear_b5_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_scale", False))


@kernel
def _expert_linear_b8_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b8_scale", True))


@kernel
def _expert_linear_b8_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b8_scale", False))


@kernel
def _expert_linear_b4_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_base", True))


@kernel
def _expert_linear_b4_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_base", False))


@kernel
def _expert_linear_b5_base_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_base", True))


@kernel
def _expert_linear_b5_base_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_base", False))


@kernel
def _expert_linear_b4_super_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_super", True))


@kernel
def _expert_linear_b4_super_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b4_super", False))


@kernel
def _expert_linear_b5_super_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_super", True))


@kernel
def _expert_linear_b5_super_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b5_super", False))


@kernel
def _expert_linear_b2_super16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_super16", True))


@kernel
def _expert_linear_b2_super16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b2_super16", False))


@kernel
def _expert_linear_b3_signed16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3_signed16", True))


@kernel
def _expert_linear_b3_signed16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b3_signed16", False))


@kernel
def _expert_linear_b6_signed16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b6_signed16", True))


@kernel
def _expert_linear_b6_signed16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("b6_signed16", False))


@kernel
def _expert_linear_iq4_scale_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq4_scale", True))


@kernel
def _expert_linear_iq4_scale_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq4_scale", False))


@kernel
def _expert_linear_iq4_signed_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq4_signed", True))


@kernel
def _expert_linear_iq4_signed_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("iq4_signed", False))


@kernel
def _expert_linear_e2m1_power_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("e2m1_power", True))


@kernel
def _expert_linear_e2m1_power_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("e2m1_power", False))


@kernel
def _expert_linear_e2m1_scale16_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("e2m1_scale16", True))


@kernel
def _expert_linear_e2m1_scale16_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("e2m1_scale16", False))


@kernel
def _expert_linear_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("f32", False))


@kernel
def _expert_linear_f16(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("f16", False))


@kernel
def _expert_linear_bf16(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("bf16", False))
