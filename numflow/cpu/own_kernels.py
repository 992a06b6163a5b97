"""The kernels of numflow's own schemes: `linear` and `expert_linear` by kind of activations, and `embed`."""

from numflow.cpu.embed_walk import embed_rows
from numflow.cpu.kernel import kernel
from numflow.cpu.linear_tile import scheme
from numflow.cpu.linear_walk import expert_linear, linear


@kernel
def _linear_q2_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q2", True))


@kernel
def _linear_q2_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q2", False))


@kernel
def _linear_q3_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q3", True))


@kernel
def _linear_q3_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q3", False))


@kernel
def _linear_q3h_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q3h", True))


@kernel
def _linear_q3h_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q3h", False))


@kernel
def _linear_q4_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q4", True))


@kernel
def _linear_q4_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q4", False))


@kernel
def _linear_q5_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q5", True))


@kernel
def _linear_q5_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q5", False))


@kernel
def _linear_q6_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q6", True))


@kernel
def _linear_q6_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q6", False))


@kernel
def _linear_q8_int8(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q8", True))


@kernel
def _linear_q8_f32(args, thread, n_threads):
    linear(args, thread, n_threads, scheme("q8", False))


@kernel
def _expert_linear_q2_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q2", True))


@kernel
def _expert_linear_q2_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q2", False))


@kernel
def _expert_linear_q3_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q3", True))


@kernel
def _expert_linear_q3_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q3", False))


@kernel
def _expert_linear_q3h_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q3h", True))


@kernel
def _expert_linear_q3h_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q3h", False))


@kernel
def _expert_linear_q4_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q4", True))


@kernel
def _expert_linear_q4_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q4", False))


@kernel
def _expert_linear_q5_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q5", True))


@kernel
def _expert_linear_q5_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q5", False))


@kernel
def _expert_linear_q6_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q6", True))


@kernel
def _expert_linear_q6_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q6", False))


@kernel
def _expert_linear_q8_int8(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q8", True))


@kernel
def _expert_linear_q8_f32(args, thread, n_threads):
    expert_linear(args, thread, n_threads, scheme("q8", False))


@kernel
def _embed_q2(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q2", False))


@kernel
def _embed_q3(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q3", False))


@kernel
def _embed_q3h(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q3h", False))


@kernel
def _embed_q4(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q4", False))


@kernel
def _embed_q5(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q5", False))


@kernel
def _embed_q6(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q6", False))


@kernel
def _embed_q8(args, thread, n_threads):
    embed_rows(args, thread, n_threads, scheme("q8", False))
