"""A mean of values whose weights fade, of each channel (op `wkv`): a thread for each channel."""

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
    at = u32(u32(texts.slots[sequence]) * state.stride + c)
    above, below, most = f32(0), f32(0), f32(0)
    if texts.positions[t] != 0:  # before its first token a text's slot is whatever was there
        above, below, most = state.data[at], state.data[at + width], state.data[at + u32(2) * width]
    while t < last:
        key, value = k.data[t * k.stride + c], v.data[t * v.stride + c]
        if texts.positions[t] == 0:
            found, above, below, most = value, value, f32(1), key
        else:
            # What the token finds, to which it counts with a weight of its own
            now = key + first[c]
            q = fmax(most, now)
            old, own = exp(most - q), exp(now - q)
            found = (old * above + own * value) / (old * below + own)
            # What the next one finds of it
            faded = most + decay[c]
            most = fmax(faded, key)
            old, own = exp(faded - most), exp(key - most)
            above, below = old * above + own * value, old * below + own
        y.data[t * y.stride + c] = found
        t = u32(t + 1)
    state.data[at] = above
    state.data[at + width] = below
    state.data[at + u32(2) * width] = most
