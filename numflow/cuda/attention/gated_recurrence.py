"""Gated linear recurrence with one state value a channel (op `gated_recurrence`); one thread for each channel.

    h = a h + sqrt(1 - a^2) sigmoid(entry + entry_bias) x,   log a = -8 softplus(rate) sigmoid(fade + fade_bias)

A thread walks through all tokens of a sequence, because each state depends on the previous one.
"""

from numflow.cuda.device.call import N_SEQUENCES, Call, ceil, per_row
from numflow.cuda.elementwise.act import sigmoid
from numflow.cuda.lang.arithmetic import exp, fabs, fmax, log, sqrt
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, u32
from numflow.ops import Step, param

THREADS = 64


def gated_recurrence(step: Step, ctx) -> list[Call]:
    """x, entry, fade, y f32 [T, W]; rate and biases f32 [W]."""
    y = step.outputs[0]
    vectors = [ctx.vector(step.weights[role]) for role in ("rate", "entry_bias", "fade_bias")]
    return [per_row(step, _gated_recurrence, N_SEQUENCES, ceil(y.width, THREADS), ctx.view(y),
                    *(ctx.view(view) for view in step.inputs), *vectors, ctx.batch.texts,
                    ctx.states[param(step, "state")].slots, y.width)]


@kernel("gated_recurrence", THREADS)
def _gated_recurrence(y: Rows, x: Rows, entry: Rows, fade: Rows, rate: f32.ptr, entry_bias: f32.ptr,
                      fade_bias: f32.ptr, texts: Texts, state: Slots, width: u32):
    sequence, c = block_x(), u32(block_y() * 64 + thread_index())
    if sequence >= texts.counts[N_SEQUENCES] or c >= width:
        return
    t, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
    if t >= last:
        return
    address = u32(u32(texts.slots[sequence]) * state.stride + c)
    h, slope = f32(0), fmax(rate[c], f32(0)) + log(f32(1) + exp(-fabs(rate[c])))
    if texts.positions[t] != 0:  # at position 0 the slot holds another sequence's old state
        h = state.data[address]
    while t < last:
        value = sigmoid(entry.data[t * entry.stride + c] + entry_bias[c]) * x.data[t * x.stride + c]
        if texts.positions[t] == 0:
            h = value
        else:
            log_a = f32(-8) * slope * sigmoid(fade.data[t * fade.stride + c] + fade_bias[c])
            h = exp(log_a) * h + sqrt(f32(1) - exp(f32(2) * log_a)) * value
        y.data[t * y.stride + c] = h
        t = u32(t + 1)
    state.data[address] = h
