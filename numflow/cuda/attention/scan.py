"""The selective scan (linear attention whose heads have one value column and share their keys), and op `softplus`.

    S[n] = exp(step * rate) S[n] + k[n] * v        y = sum over n of S[n] q[n], plus skip * v

One thread handles one head and walks through all tokens of a sequence; heads are independent. The threads of a warp
have adjacent heads, so their accesses are coalesced.
"""

import functools

from numflow.cuda.device.call import N_SEQUENCES, Call, ceil, per_row
from numflow.cuda.lang.arithmetic import exp, fabs, fmax, fmin
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 64


def softplus(step: Step, ctx) -> list[Call]:
    """y = min(max(log(1 + exp(x + bias)), least), most), bias f32 [D]."""
    (x,), (y,) = step.inputs, step.outputs
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    return [per_row(step, softplus_kernel(bias is not None), ctx.rows(y), ceil(y.width, THREADS), ctx.view(y),
                    ctx.view(x), bias, ctx.batch.counts, ctx.rows(y), y.width, param(step, "least"),
                    param(step, "most"))]


@functools.cache
def softplus_kernel(has_bias: bool) -> Kernel:
    """One thread for each element. log(1 + z) is the series of 2 atanh(w) with w = z / (2 + z), at most 1/3."""

    @kernel(f"softplus{'_bias' * has_bias}", THREADS)
    def _softplus(y: Rows, x: Rows, bias: f32.ptr, counts: i32.ptr, rows: u32, width: u32, least: f32, most: f32):
        row, column = block_x(), u32(block_y() * 64 + thread_index())
        if row >= counts[rows] or column >= width:
            return
        value = x.data[row * x.stride + column]
        if has_bias:
            value += bias[column]
        z = exp(-fabs(value))
        w = z / (f32(2) + z)
        s = w * w
        series = f32(1 / 7) + s * (f32(1 / 9) + s * (f32(1 / 11) + s * f32(1 / 13)))
        series = f32(1) + s * (f32(1 / 3) + s * (f32(1 / 5) + s * series))
        y.data[row * y.stride + column] = fmin(fmax(fmax(value, f32(0)) + (w + w) * series, least), most)

    return _softplus


def scan(step: Step, ctx) -> list[Call]:
    """q, k f32 [T, dk], v, y f32 [T, H], steps f32 [T, H] or none; rate f32 [H] or [H*dk], skip f32 [H]."""
    q, k, v, *steps = step.inputs
    rate, heads = step.weights["rate"], param(step, "heads")
    column_rates, skip = ctx.network.weights[rate].shape[0] > heads, "skip" in step.weights
    rates = ctx.vector(rate)
    return [per_row(step, scan_kernel(bool(steps), skip, param(step, "scaled"), column_rates), N_SEQUENCES,
                    ceil(heads, THREADS), ctx.view(step.outputs[0]), ctx.view(q), ctx.view(k), ctx.view(v),
                    ctx.view(steps[0] if steps else v), rates, ctx.vector(step.weights["skip"]) if skip else rates,
                    ctx.batch.texts, ctx.states[param(step, "state")].slots, heads, q.width)]


@functools.cache
def scan_kernel(has_steps: bool, has_skip: bool, scaled: bool, column_rates: bool) -> Kernel:
    """Grid (sequences, heads / 64)."""
    kind = "".join(str(int(flag)) for flag in (has_steps, has_skip, scaled, column_rates))

    @kernel(f"scan_{kind}", THREADS)
    def _scan(y: Rows, q: Rows, k: Rows, v: Rows, steps: Rows, rates: f32.ptr, skip: f32.ptr, texts: Texts,
              state: Slots, heads: u32, size: u32):
        sequence, head = block_x(), u32(block_y() * 64 + thread_index())
        if sequence >= texts.counts[N_SEQUENCES] or head >= heads:
            return
        matrix = state.data + (u32(texts.slots[sequence]) * state.stride + head)  # [dk][heads]
        t, last = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1])
        while t < last:
            query, key, value = q.data + t * q.stride, k.data + t * k.stride, v.data[t * v.stride + head]
            length = steps.data[t * steps.stride + head] if has_steps else f32(1)
            decay, new = f32(0), texts.positions[t] == 0  # at position 0 the slot holds another sequence's old state
            if not column_rates:
                decay = exp(length * rates[head])
            written, total, n = value * length if scaled else value, f32(0), u32(0)
            while n < size:
                if column_rates:
                    decay = exp(length * rates[head * size + n])
                state_value = f32(0) if new else matrix[n * heads] * decay
                state_value = state_value + key[n] * written
                matrix[n * heads] = state_value
                total += state_value * query[n]
                n = u32(n + 1)
            if has_skip:
                total += skip[head] * value
            y.data[t * y.stride + head] = total
            t = u32(t + 1)

    return _scan
