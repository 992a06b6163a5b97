"""Causal depthwise convolution with state (op `causal_conv`): one thread for each channel of each row.

The state holds the last K - 1 rows of x of each sequence. The first kernel computes y from x and the state. The second
kernel then writes the new last rows of x to the state.
"""

import functools

from numflow.cuda.device.call import N_SEQUENCES, N_TOKENS, Call, ceil, per_row
from numflow.cuda.elementwise.act import ACT
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 128


def causal_conv(step: Step, ctx) -> list[Call]:
    """x, y f32 [T, C], in different memory; weight f32 [C, K], bias f32 [C]."""
    (x,), (y,), texts = step.inputs, step.outputs, ctx.batch.texts
    weight, blocks = ctx.vector(step.weights["weight"]), ceil(y.width, THREADS)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else weight
    state, taps = ctx.states[param(step, "state")].slots, ctx.network.weights[step.weights["weight"]].shape[1]
    conv = conv_kernel(param(step, "kind"), "bias" in step.weights)
    return [per_row(step, conv, N_TOKENS, blocks, ctx.view(y), ctx.view(x), weight, bias, texts,
                    ctx.batch.ref("sequence_of"), state, y.width, taps),
            per_row(step, _keep_last_rows, N_SEQUENCES, blocks, ctx.view(x), texts, state, y.width, taps - 1)]


@functools.cache
def conv_kernel(kind: str, has_bias: bool) -> Kernel:
    """y[t, c] = act(bias[c] + sum over j of weight[c, j] * x[t - (K - 1) + j, c]). Grid (rows, channels / 128)."""
    act = ACT["silu"] if kind == "silu" else _same

    @kernel(f"causal_conv_{kind}{'_bias' * has_bias}", THREADS)
    def _causal_conv(y: Rows, x: Rows, weight: f32.ptr, bias: f32.ptr, texts: Texts, sequence_of: i32.ptr, state: Slots,
                     width: u32, taps: u32):
        t, c = block_x(), u32(block_y() * 128 + thread_index())
        if t >= texts.counts[N_TOKENS] or c >= width:
            return
        sequence = sequence_of[t]
        first, slot = u32(texts.starts[sequence]), u32(u32(texts.slots[sequence]) * state.stride)
        total, j = f32(0), u32(0)
        if has_bias:
            total = bias[c]
        while j < taps:
            value = past(x.data, x.stride, texts.positions, state.data, slot, first, u32(t - first + j),
                         u32(taps - 1), width, c)
            total += weight[c * taps + j] * value
            j = u32(j + 1)
        y.data[t * y.stride + c] = act(total, f32(0), f32(0))

    return _causal_conv


@kernel("keep_last_rows", THREADS)
def _keep_last_rows(x: Rows, texts: Texts, state: Slots, width: u32, kept: u32):
    """Write the last rows of x to the state. Rising order: a row of the state is read before it is overwritten."""
    sequence, c = block_x(), u32(block_y() * 128 + thread_index())
    if sequence >= texts.counts[N_SEQUENCES] or c >= width:
        return
    first, last, i = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1]), u32(0)
    slot = u32(u32(texts.slots[sequence]) * state.stride)
    while first < last and i < kept:
        state.data[slot + i * width + c] = past(x.data, x.stride, texts.positions, state.data, slot, first,
                                                u32(last - first + i), kept, width, c)
        i = u32(i + 1)


@device
def past(x, stride, positions, state, slot, first, index, kept, width, c):
    """Row `index` of the state's `kept` rows followed by the rows of x from `first` on. Zero before a sequence begins.
    """
    if index >= kept:
        return x[(first + index - kept) * stride + c]
    return state[slot + index * width + c] if positions[first] > 0 else f32(0)


@device
def _same(x, p, q):
    return x
