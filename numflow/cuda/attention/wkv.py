"""Weighted mean of values with exponentially decaying weights (op `wkv`); one thread for each channel.

    y_t = (num + exp(first + k_t) v_t) / (den + exp(first + k_t)),  num = exp(decay) num + exp(k_t) v_t,
    den = exp(decay) den + exp(k_t)

The state holds num and den scaled by exp(-m), and the running maximum m of the exponents, so that no exp overflows.
"""

from numflow.cuda.device.call import N_SEQUENCES, Call, ceil, per_row
from numflow.cuda.lang.arithmetic import exp, fmax
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, u32
from numflow.ops import Step, param

THREADS = 64


def wkv(step: Step, ctx) -> list[Call]:
    """k, v, y f32 [T, W]; decay, first f32 [W]."""
    y = step.outputs[0]
    vectors = [ctx.vector(step.weights[role]) for role in ("decay", "first")]
    return [per_row(step, _wkv, N_SEQUENCES, ceil(y.width, THREADS), ctx.view(y),
                    *(ctx.view(view) for view in step.inputs), *vectors, ctx.batch.texts,
                    ctx.states[param(step, "state")].slots, y.width)]


@kernel("wkv", THREADS)
def _wkv(y: Rows, k: Rows, v: Rows, decay: f32.ptr, first: f32.ptr, texts: Texts, state: Slots, width: u32):
    sequence, c = block_x(), u32(block_y() * 64 + thread_index())
    if sequence >= texts.counts[N_SEQUENCES] or c >= width:
        return
    t, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
    if t >= last:
        return
    address = u32(u32(texts.slots[sequence]) * state.stride + c)
    num, den, maximum = f32(0), f32(0), f32(0)
    if texts.positions[t] != 0:  # at position 0 the slot holds another sequence's old state
        num, den, maximum = state.data[address], state.data[address + width], state.data[address + u32(2) * width]
    while t < last:
        key, value = k.data[t * k.stride + c], v.data[t * v.stride + c]
        if texts.positions[t] == 0:
            out, num, den, maximum = value, value, f32(1), key
        else:
            # The output: the state, and the token itself with its own weight exp(first + k)
            exponent = key + first[c]
            q = fmax(maximum, exponent)
            old_scale, new = exp(maximum - q), exp(exponent - q)
            out = (old_scale * num + new * value) / (old_scale * den + new)
            # The new state, scaled by its new maximum
            decayed = maximum + decay[c]
            maximum = fmax(decayed, key)
            old_scale, new = exp(decayed - maximum), exp(key - maximum)
            num, den = old_scale * num + new * value, old_scale * den + new
        y.data[t * y.stride + c] = out
        t = u32(t + 1)
    state.data[address] = num
    state.data[address + width] = den
    state.data[address + u32(2) * width] = maximum
