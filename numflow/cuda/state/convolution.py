"""Causal depthwise convolution with state (op `causal_conv`): a thread for each channel of each row.

The rows are computed from x and from what the state held before; then a second kernel puts the last rows of x there.
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
    """x, y f32 [T, C], apart; weight f32 [C, K], bias f32 [C]."""
    (x,), (y,), texts = step.inputs, step.outputs, ctx.batch.texts
    weight, blocks = ctx.vector(step.weights["weight"]), ceil(y.width, THREADS)
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else weight
    state, taps = ctx.states[param(step, "state")].slots, ctx.network.weights[step.weights["weight"]].shape[1]
    chosen = conv_kernel(param(step, "kind"), "bias" in step.weights)
    return [per_row(step, chosen, N_TOKENS, blocks, ctx.view(y), ctx.view(x), weight, bias, texts,
                    ctx.batch.ref("sequence_of"), state, y.width, taps),
            per_row(step, _keep_last_rows, N_SEQUENCES, blocks, ctx.view(x), texts, state, y.width, taps - 1)]


@functools.cache
def conv_kernel(kind: str, has_bias: bool) -> Kernel:
    """Rows of y."""
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
    """The last rows of x become the state; a row is read before it is overwritten."""
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
def past(x, stride, positions, state, slot, first, at, kept, width, c):
    """Row `at` of the `kept` rows of a state and, behind them, of x from row `first` on; zeros before a text."""
    if at >= kept:
        return x[(first + at - kept) * stride + c]
    return state[slot + at * width + c] if positions[first] > 0 else f32(0)


@device
def _same(x, p, q):
    return x
