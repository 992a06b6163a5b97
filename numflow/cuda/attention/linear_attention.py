"""Linear attention: a state [dk, dv] of each head that every token fades and adds to (ops `linear_attention`,
`softplus`).

A thread has a value column of a head, and takes it through all tokens of a sequence, one after the other: columns of a
state do not meet. Threads of a warp have neighbouring columns, so that rows of the state are read together.
"""

import functools
from typing import NamedTuple

from numflow.cuda.device.call import N_SEQUENCES, Call, ceil, per_row
from numflow.cuda.lang.arithmetic import exp, fabs, fmax, fmin
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import Rows, Slots, Texts
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.ops import Step, param

THREADS = 64


class StateShape(NamedTuple):
    """Heads of a state, key heads that they share, columns of a key and of a value head."""

    heads: u32
    key_heads: u32
    k_dim: u32
    v_dim: u32


class Ways(NamedTuple):
    """Differences between kernels: steps, skips and the delta rule are there or not; steps and rates are of a head or
    of each of its key columns."""

    steps: bool
    skip: bool
    delta: bool
    scaled: bool
    tiled: bool
    column_steps: bool
    column_rates: bool


def softplus(step: Step, ctx) -> list[Call]:
    """y = min(max(log(1 + exp(x + bias)), least), most), bias f32 [D]."""
    (x,), (y,) = step.inputs, step.outputs
    bias = ctx.vector(step.weights["bias"]) if "bias" in step.weights else None
    return [per_row(step, softplus_kernel(bias is not None), ctx.rows(y), ceil(y.width, THREADS), ctx.view(y),
                    ctx.view(x), bias, ctx.batch.counts, ctx.rows(y), y.width, param(step, "least"),
                    param(step, "most"))]


@functools.cache
def softplus_kernel(has_bias: bool) -> Kernel:
    """A thread for each number. log(1 + z) is the series of 2 atanh(w) for w = z / (2 + z), which is 1/3 at most."""

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


def linear_attention(step: Step, ctx) -> list[Call]:
    """q, k f32 [T, G*dk], v, y f32 [T, H*dv], steps f32 [T, H] or [T, H*dk], beta f32 [T, H]; rate f32 [H] or [H*dk],
    skip f32 [H]."""
    q, k, v, *others = step.inputs
    steps, beta = [*others, None, None][:2]
    heads, key_heads = param(step, "heads"), param(step, "key_heads")
    shape = StateShape(heads, key_heads, q.width // key_heads, v.width // heads)
    rate = step.weights["rate"]
    ways = Ways(steps is not None, "skip" in step.weights, beta is not None, param(step, "scaled"),
                param(step, "tiled"), steps is not None and steps.width > heads,
                ctx.network.weights[rate].shape[0] > heads)
    rates = ctx.vector(rate)
    return [per_row(step, state_kernel(ways), N_SEQUENCES, ceil(v.width, THREADS), ctx.view(step.outputs[0]),
                    ctx.view(q), ctx.view(k), ctx.view(v), ctx.view(steps or v), ctx.view(beta or v), rates,
                    ctx.vector(step.weights["skip"]) if ways.skip else rates, ctx.batch.texts,
                    ctx.states[param(step, "state")].slots, shape)]


@functools.cache
def state_kernel(ways: Ways) -> Kernel:
    """The kernel of these ways."""
    has_steps, has_skip, delta, scaled, tiled, column_steps, column_rates = ways
    by_column, kind = column_steps or column_rates, "".join(str(int(way)) for way in ways)

    @kernel(f"linear_attention_{kind}", THREADS)
    def _linear_attention(y: Rows, q: Rows, k: Rows, v: Rows, steps: Rows, beta: Rows, rates: f32.ptr, skip: f32.ptr,
                          texts: Texts, state: Slots, shape: StateShape):
        # Place in the grid: a sequence, a value column of a head; its column of the state.
        sequence, at = block_x(), u32(block_y() * 64 + thread_index())
        if sequence >= texts.counts[N_SEQUENCES] or at >= shape.heads * shape.v_dim:
            return
        head, size = u32(at // shape.v_dim), u32(shape.k_dim)
        key_head = u32(head % shape.key_heads) if tiled else u32(head // (shape.heads // shape.key_heads))
        column = state.data + (u32(texts.slots[sequence]) * state.stride + head * size * shape.v_dim
                               + at % shape.v_dim)
        t, last, n = u32(texts.starts[sequence]), u32(texts.starts[sequence + 1]), u32(0)
        # A text that begins finds zeros.
        while t < last and texts.positions[t] == 0 and n < size:
            column[n * shape.v_dim] = f32(0)
            n = u32(n + 1)
        while t < last:
            query, key = q.data + (t * q.stride + key_head * size), k.data + (t * k.stride + key_head * size)
            value = v.data[t * v.stride + at]
            rate, length, fade = f32(0), f32(1), f32(1)
            if has_steps and not column_steps:
                length = steps.data[t * steps.stride + head]
            if not by_column:
                fade = exp(length * rates[head])
            # Fade, and what the state says of the key.
            said, n = f32(0), u32(0)
            while n < size:
                if by_column:
                    rate = rates[head * size + n] if column_rates else rates[head]
                    fade = exp((steps.data[t * steps.stride + head * size + n] if column_steps else length) * rate)
                number = column[n * shape.v_dim] * fade
                column[n * shape.v_dim] = number
                if delta:
                    said += number * key[n]
                n = u32(n + 1)
            # Add what is written, and what the state then says of the query.
            written = value * length if scaled else value
            if delta:
                written = (value - said) * beta.data[t * beta.stride + head]
            found, n = f32(0), u32(0)
            while n < size:
                number = column[n * shape.v_dim] + key[n] * written
                column[n * shape.v_dim] = number
                found += number * query[n]
                n = u32(n + 1)
            if has_skip:
                found += skip[head] * value
            y.data[t * y.stride + at] = found
            t = u32(t + 1)

    return _linear_attention
