"""Element-wise ops: `act`, `act_mul`, `gate_rows`, `mul`, `add`, `scale`, `scale_by_position`, `softcap`, `clamp`,
`signed_sqrt`, `copy`."""

import functools
from collections.abc import Callable
from dataclasses import replace

from numflow.cuda.device.call import N_TOKENS, Call, Prepared, ceil, per_row
from numflow.cuda.lang.arithmetic import erf, exp, fabs, fmax, fmin, log, sqrt, tanh
from numflow.cuda.lang.intrinsics import block_x, block_y, grid_y, lane_index, load4, store4, thread_index
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.reduce import block_max
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.weights.operand import LARGEST_HALF, ROW_THREADS, putter
from numflow.ops import Step, param

THREADS = 128


def act(step: Step, ctx) -> list[Call]:
    """y = act(x)."""
    if param(step, "kind") == "xielu":
        (x,), (y,) = step.inputs, step.outputs
        return [per_row(step, _xielu, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x), ctx.batch.counts,
                        ctx.rows(y), y.width, *(param(step, name) for name in ("positive", "negative", "beta", "eps")))]
    return _bind(step, ctx, f"act_{param(step, 'kind')}", ACT[param(step, "kind")], 0.0, 0.0)


def act_mul(step: Step, ctx) -> list[Call]:
    """y = act(gate) * up."""
    kind = param(step, "kind")
    return _bind(step, ctx, f"act_mul_{kind}", gated(kind), param(step, "limit"), param(step, "alpha"))


def gate_rows(step: Step, ctx) -> list[Call]:
    """y = x * sigmoid(gate), or x * gate if plain; gate f32 [T, H]."""
    (x, gate), (y,) = step.inputs, step.outputs
    return [per_row(step, _gate_rows(param(step, "plain")), ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y),
                    *ctx.view(x), *ctx.view(gate), ctx.batch.counts, ctx.rows(y), y.width, y.width // gate.width)]


def permute(step: Step, ctx) -> list[Call]:
    """y[t, j] = x[t, order[j]], order f32 [D]."""
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _permute, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                    ctx.vector(step.weights["order"]), ctx.batch.counts, ctx.rows(y), y.width)]


def mul(step: Step, ctx) -> list[Call]:
    """y = a * b."""
    return _bind(step, ctx, "mul", _mul, 0.0, 0.0)


def add(step: Step, ctx) -> list[Call]:
    """y = a + scale * b."""
    return _bind(step, ctx, "add", _add, param(step, "scale"), 0.0)


def scale(step: Step, ctx) -> list[Call]:
    """y = x * scale * weight f32 [D] + shift f32 [D]."""
    if "shift" in step.weights:
        (x,), (y,) = step.inputs, step.outputs
        weight = ctx.vector(step.weights["weight"]) if "weight" in step.weights else None
        return [per_row(step, _shift_columns, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x), weight,
                        int("weight" in step.weights), ctx.vector(step.weights["shift"]), ctx.batch.counts,
                        ctx.rows(y), y.width, param(step, "scale"))]
    if "weight" in step.weights:
        (x,), (y,) = step.inputs, step.outputs
        return [per_row(step, _scale_columns, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                        ctx.vector(step.weights["weight"]), ctx.batch.counts, ctx.rows(y), y.width,
                        param(step, "scale"))]
    return _bind(step, ctx, "scale", _scale, param(step, "scale"), 0.0)


def scale_by_position(step: Step, ctx) -> list[Call]:
    """y = x * (1 + scale * ln(1 + floor(q))), or ln(max(1, q)), or x * (1 + q)^scale, q = (position + offset) / length.
    """
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _scale_by_position, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                    ctx.batch.ref("positions"), ctx.batch.counts, y.width, param(step, "length"), param(step, "offset"),
                    int(param(step, "smooth")), param(step, "scale"))]


def softcap(step: Step, ctx) -> list[Call]:
    """y = cap * tanh(x / cap)."""
    return _bind(step, ctx, "softcap", _softcap, param(step, "cap"), 0.0)


def clamp(step: Step, ctx) -> list[Call]:
    """y = min(max(x, -limit), limit)."""
    return _bind(step, ctx, "clamp", _clamp, param(step, "limit"), 0.0)


def signed_sqrt(step: Step, ctx) -> list[Call]:
    """y = x / |x| * sqrt(max(|x|, least)), x itself for 0 and NaN."""
    return _bind(step, ctx, "signed_sqrt", _signed_sqrt, param(step, "least"), 0.0)


def copy(step: Step, ctx) -> list[Call]:
    """y = x."""
    return _bind(step, ctx, "copy", _copy, 0.0, 0.0)


def _bind(step: Step, ctx, name: str, function: DeviceFunction, p: float, q: float) -> list[Call]:
    """y = function(x, p, q), or function(a, b, p, q) of two inputs."""
    y, inputs = step.outputs[0], [part for view in step.inputs for part in ctx.view(view)]
    apply = (binary if len(step.inputs) == 2 else unary)(name, function)
    return [per_row(step, apply, ctx.rows(y), ceil(y.width, THREADS), *ctx.view(y), *inputs, ctx.batch.counts,
                    ctx.rows(y), y.width, p, q)]


@functools.cache
def unary(name: str, function: DeviceFunction) -> Kernel:
    """The element-wise kernel of a function of one input: one thread for each element."""

    @kernel(name, THREADS)
    def _unary(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32, p: f32,
               q: f32):
        row, column = block_x(), block_y() * 128 + thread_index()
        if row < counts[rows] and column < width:
            y[row * y_stride + column] = function(x[row * x_stride + column], p, q)

    return _unary


@functools.cache
def binary(name: str, function: DeviceFunction) -> Kernel:
    """The element-wise kernel of a function of two inputs: one thread for each element."""

    @kernel(name, THREADS)
    def _binary(y: f32.ptr, y_stride: u32, a: f32.ptr, a_stride: u32, b: f32.ptr, b_stride: u32, counts: i32.ptr,
                rows: u32, width: u32, p: f32, q: f32):
        row, column = block_x(), block_y() * 128 + thread_index()
        if row < counts[rows] and column < width:
            y[row * y_stride + column] = function(a[row * a_stride + column], b[row * b_stride + column], p, q)

    return _binary


@functools.cache
def _gate_rows(plain: bool) -> Kernel:
    """y = x * sigmoid(gate), or x * gate if plain. Each gate applies to `size` columns."""

    @kernel(f"gate_rows{'_plain' * plain}", THREADS)
    def _gate(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, gate: f32.ptr, gate_stride: u32, counts: i32.ptr,
              rows: u32, width: u32, size: u32):
        row, column = block_x(), block_y() * 128 + thread_index()
        if row < counts[rows] and column < width:
            factor = gate[row * gate_stride + column // size]
            if not plain:
                factor = sigmoid(factor)
            y[row * y_stride + column] = x[row * x_stride + column] * factor

    return _gate


@kernel("permute", THREADS)
def _permute(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, order: f32.ptr, counts: i32.ptr, rows: u32,
             width: u32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        y[row * y_stride + column] = x[row * x_stride + u32(order[column])]


@kernel("act_xielu", THREADS)
def _xielu(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, counts: i32.ptr, rows: u32, width: u32, positive: f32,
           negative: f32, beta: f32, eps: f32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        value = x[row * x_stride + column]
        negative_side = negative * (exp(fmin(value, eps)) - f32(1) - value)
        y[row * y_stride + column] = (positive * value * value if value > f32(0) else negative_side) + beta * value


@kernel("scale_columns", THREADS)
def _scale_columns(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, weight: f32.ptr, counts: i32.ptr, rows: u32,
                   width: u32, scale: f32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        y[row * y_stride + column] = x[row * x_stride + column] * scale * weight[column]


@kernel("shift_columns", THREADS)
def _shift_columns(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, weight: f32.ptr, weighted: i32, shift: f32.ptr,
                   counts: i32.ptr, rows: u32, width: u32, scale: f32):
    row, column = block_x(), block_y() * 128 + thread_index()
    if row < counts[rows] and column < width:
        factor = scale * weight[column] if weighted != 0 else scale
        y[row * y_stride + column] = x[row * x_stride + column] * factor + shift[column]


@kernel("scale_by_position", THREADS, exact=True)
def _scale_by_position(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, positions: i32.ptr, counts: i32.ptr,
                       width: u32, length: i32, offset: i32, smooth: i32, scale: f32):
    t, column = block_x(), block_y() * 128 + thread_index()
    if t < counts[N_TOKENS] and column < width:
        position = i32(i32(positions[t]) + offset)
        ratio = f32(1) + f32(i32(position // length))
        if smooth == 1:
            ratio = fmax(f32(position) / f32(length), f32(1))
        if smooth == 2:
            ratio = f32(1) + f32(position) / f32(length)
        exponent = scale * log(ratio)
        y[t * y_stride + column] = x[t * x_stride + column] * (exp(exponent) if smooth == 2 else f32(1) + exponent)


@device
def sigmoid(x):
    """1 / (1 + exp(-x)), written so that neither sign overflows."""
    e = exp(-fabs(x))
    return (f32(1) if x >= f32(0) else e) / (f32(1) + e)


@device
def _relu(x, p, q):
    return fmax(x, f32(0))


@device
def _relu2(x, p, q):
    y = fmax(x, f32(0))
    return y * y


@device
def _gelu(x, p, q):
    return f32(0.5) * x * (f32(1) + erf(x * f32(0.70710678118654752)))


@device
def _gelu_tanh(x, p, q):
    return f32(0.5) * x * (f32(1) + tanh(f32(0.79788456080286536) * (x + f32(0.044715) * x * x * x)))


@device
def _gelu_quick(x, p, q):
    return x * sigmoid(f32(1.702) * x)


@device
def _silu(x, p, q):
    return x * sigmoid(x)


@device
def _sigmoid(x, p, q):
    return sigmoid(x)


@device
def _tanh(x, p, q):
    return tanh(x)


@device
def _swiglu_clamp(gate, up, limit, alpha):
    gate, up = fmin(gate, limit), fmin(fmax(up, -limit), limit)
    return gate * sigmoid(alpha * gate) * (up + f32(1))


@device
def _silu_clamp(gate, up, limit, q):
    gate, up = fmin(gate, limit), fmin(fmax(up, -limit), limit)
    return gate * sigmoid(gate) * up


@device
def _mul(a, b, p, q):
    return a * b


@device
def _add(a, b, factor, q):
    return a + factor * b


@device
def _scale(x, factor, q):
    return x * factor


@device
def _softcap(x, cap, q):
    return cap * tanh(x / cap)


@device
def _clamp(x, limit, q):
    return fmin(fmax(x, -limit), limit)


@device
def _signed_sqrt(x, least, q):
    root = sqrt(fmax(fabs(x), least))
    return root if x > f32(0) else -root if x < f32(0) else x


@device
def _copy(x, p, q):
    return x


@device
def _exp(x, p, q):
    return exp(x)


ACT: dict[str, Callable] = {"relu": _relu, "relu2": _relu2, "gelu": _gelu, "gelu_tanh": _gelu_tanh,
                            "gelu_quick": _gelu_quick, "silu": _silu, "sigmoid": _sigmoid, "tanh": _tanh,
                            "exp": _exp}


@functools.cache
def gated(kind: str) -> DeviceFunction:
    """act(gate) * up."""
    if clamped := {"swiglu_clamp": _swiglu_clamp, "silu_clamp": _silu_clamp}.get(kind):
        return clamped
    function = ACT[kind]

    @device
    def _gated(gate, up, p, q):
        return function(gate, p, q) * up

    return _gated


def into_operand(step: Step, ctx, kind: str, runs: str, rows: bool) -> list[Call]:
    """An activation function written as the operand of the next matrix product (weights/operand.py).

    rows: write float32 rows as well. The columns must fill whole units of the operand.
    """
    y, name, is_binary = step.outputs[0], f"{step.op}_{param(step, 'kind')}", len(step.inputs) == 2
    function = gated(param(step, "kind")) if is_binary else ACT[param(step, "kind")]
    first, second = ctx.view(step.inputs[0]), ctx.view(step.inputs[-1])
    parameters = (param(step, "limit"), param(step, "alpha")) if is_binary else (0.0, 0.0)
    blocks = 1 if kind == "f16" else ceil(y.width, 4 * THREADS)
    call = per_row(step, act_operand(name, function, is_binary, kind), ctx.rows(y), blocks, *ctx.place(y, kind),
                   ctx.view(y), int(rows), first, second, ctx.batch.counts, ctx.rows(y), y.width, *parameters)
    return [replace(call, leaves=Prepared(y, kind, runs))]


@functools.cache
def act_operand(name: str, function: DeviceFunction, is_binary: bool, kind: str) -> Kernel:
    """Each thread takes 4 columns at a time. f16: one block for each row, which first finds the row's absolute maximum
    and scales the row if it exceeds the float16 range."""
    int8, half, put = kind == "int8", kind == "f16", putter(kind)
    threads = ROW_THREADS if half else THREADS

    @device
    def load_four(first, second, column, p, q):
        a, b, c, d = load4(first, column)
        if is_binary:
            e, f, g, h = load4(second, column)
            return function(a, e, p, q), function(b, f, p, q), function(c, g, p, q), function(d, h, p, q)
        return function(a, p, q), function(b, p, q), function(c, p, q), function(d, p, q)

    @kernel(f"{name}_{kind}", threads)
    def _act_operand(operand: u32.ptr, aux: f32.ptr, y: Rows, has_y: u32, x: Rows, up: Rows, counts: i32.ptr, rows: u32,
                     width: u32, p: f32, q: f32):
        row, begin, lane = block_x(), u32(4 * (block_y() * threads + thread_index())), u32(4 * lane_index())
        if row >= counts[rows]:
            return
        first, second, step = x.data + row * x.stride, up.data + row * up.stride, u32(4 * threads * grid_y())
        inverse, scale = f32(1), f32(1)
        if half:
            maximum, column = f32(0), begin
            while column < width:
                a, b, c, d = load_four(first, second, column, p, q)
                maximum = fmax(maximum, fmax(fmax(fabs(a), fabs(b)), fmax(fabs(c), fabs(d))))
                column = u32(column + step)
            maximum = block_max(maximum, threads // 32)
            if maximum > f32(LARGEST_HALF):
                scale, inverse = maximum / f32(LARGEST_HALF), f32(LARGEST_HALF) / maximum
        if not int8 and begin == 0:
            aux[row] = scale
        column = begin
        while column - lane < width:  # all lanes of a warp loop together, because `put` has warp shuffles
            a, b, c, d = f32(0), f32(0), f32(0), f32(0)
            if column < width:
                a, b, c, d = load_four(first, second, column, p, q)
                if has_y != 0:
                    store4(y.data + row * y.stride, column, a, b, c, d)
            put(operand, aux, row, column, width, inverse, a, b, c, d)
            column = u32(column + step)

    return _act_operand
