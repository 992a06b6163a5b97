"""Embedding look-ups: token, position and token-type embeddings (ops `embed`, `embed_position`, `embed_type`), and rows
of given numbers (op `embed_ids`).

A device may have only a part of a table, from row `first` on. Rows outside that part become -0.0.
"""

import functools
from collections.abc import Callable

import numpy as np

from numflow.cuda.device.call import N_TOKENS, Call, Sizes, ceil, per_row
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.exchange.exchange import HostCall, copy_rows
from numflow.cuda.lang.arithmetic import float_of, half_to_float
from numflow.cuda.lang.intrinsic import LocalArray
from numflow.cuda.lang.intrinsics import as_u16, block_x, block_y, load4, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.parameters import IntRows, Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.parameters import Planes, planes_of
from numflow.cuda.weights.decode import header, numbers_of, pair_header, reader
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES, UNIT
from numflow.cuda.weights.outliers import value_of
from numflow.formats.types import to_f32
from numflow.ops import Step, View, param

THREADS = 128
_NOTHING = 0x80000000  # bits of -0.0: x + -0.0 is x for every x, also for -0.0


def embed(step: Step, ctx) -> list[Call | HostCall]:
    """table [V, D], of the type in the file -> y f32 [T, D]."""
    if ctx.host_embeddings:
        return [_from_host(step, ctx, lambda count: ctx.batch.host("tokens", count))]
    return [_looked_up(step, ctx, step.outputs[0], ctx.batch.ref("tokens"), param(step, "scale"))]


def embed_ids(step: Step, ctx) -> list[Call | HostCall]:
    """table [V, E], of the type in the file, ids i32 [T, N] -> y f32 [T, N * E]. One look-up for each column of ids."""
    (ids,), (y,), (data, stride) = step.inputs, step.outputs, ctx.view(step.inputs[0])
    if ctx.host_embeddings:
        def on_host(count: int) -> np.ndarray:
            rows = ctx.device.download(data, 4 * ((count - 1) * stride + ids.width)).view(np.int32)
            return np.concatenate([rows[t * stride:t * stride + ids.width] for t in range(count)])
        return [_from_host(step, ctx, on_host)]
    room, width = ctx.room(ids), y.width // ids.width
    columns = ctx.scratch("ids by column", 4 * ids.width * room)
    apart = per_row(step, _columns_apart, ctx.rows(ids), ceil(ids.width, THREADS), columns, IntRows(data, stride),
                    ctx.batch.counts, ctx.rows(ids), ids.width, room)
    return [apart, *(_looked_up(step, ctx, View(y.buffer, y.start + n * width, width), columns + 4 * n * room, 1.0)
                     for n in range(ids.width))]


def _looked_up(step: Step, ctx, y: View, ids: Ref, scale: float) -> Call:
    """The call that writes the rows `ids` of the step's table to y, one for each row of y."""
    table, field = ctx.matrix(step.weights["table"]), ctx.rows(y)
    rows = ids, ctx.batch.counts, param(step, "first"), table.shape[0]
    if table.is_float:
        return per_row(step, float_rows(table.kind), field, ceil(y.width, THREADS), *ctx.view(y),
                       table.parts["codes"], *rows, y.width, table.pitch, scale)
    units = table.pitch // UNIT
    return per_row(step, code_rows(table.kind), field, ceil(units, 32), ctx.view(y), planes_of(table),
                   table.parts.get("outliers"), table.outliers, *rows, y.width, scale)


def _from_host(step: Step, ctx, ids_of: Callable[[int], np.ndarray]) -> HostCall:
    """The host converts the rows of a batch to float32 and uploads them; the table stays in host memory. ids_of: the
    row numbers of so many rows of the batch."""
    y, table, scale = step.outputs[0], ctx.weights.raw(step.weights["table"]), np.float32(step.params.get("scale", 1))
    (to, stride), room, field = ctx.view(y), ctx.scratch("rows from the host", 4 * ctx.room(y) * y.width), ctx.rows(y)

    def act(sizes: Sizes) -> None:
        ids = ids_of(sizes.rows[field]) - param(step, "first")
        here = (ids >= 0) & (ids < len(table.rows))
        rows = np.full((len(ids), table.shape[-1]), -0.0, np.float32)
        rows[here] = to_f32(table.rows[ids[here]], table.type) * scale
        ctx.device.upload(room, rows)
        ctx.device.launch(Launch(copy_rows, (sizes.rows[field], ceil(y.width, THREADS), 1), (
            to, stride, room, y.width, ctx.batch.counts, field, y.width, 0)))
    return HostCall(step, act)


def embed_position(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], table [P, D] -> y f32 [T, D]."""
    return _add_rows(step, ctx, "positions", param(step, "offset"))


def embed_type(step: Step, ctx) -> list[Call]:
    """x f32 [T, D], table [types, D] -> y f32 [T, D]."""
    return _add_rows(step, ctx, "types", 0)


def _add_rows(step: Step, ctx, indices: str, offset: int) -> list[Call]:
    (x,), (y,) = step.inputs, step.outputs
    return [per_row(step, _add_row, N_TOKENS, ceil(y.width, THREADS), *ctx.view(y), *ctx.view(x),
                    ctx.vector(step.weights["table"]), ctx.batch.ref(indices), ctx.batch.counts, y.width, offset)]


@functools.cache
def float_rows(kind: str) -> Kernel:
    """Look-up in a table of floats: one thread for each column."""
    full, half = kind == "f32", kind == "f16"

    @kernel(f"embed_{kind}", THREADS)
    def _embed(y: f32.ptr, y_stride: u32, table: f32.ptr, tokens: i32.ptr, counts: i32.ptr, first: u32, rows: u32,
               width: u32, pitch: u32, scale: f32):
        t, column = block_x(), block_y() * 128 + thread_index()
        if t < counts[N_TOKENS] and column < width:
            row, to = u32(u32(tokens[t]) - first), t * y_stride + column
            if row < rows:
                at = row * pitch + column
                if full:
                    value = table[at]
                elif half:
                    value = half_to_float(as_u16(table)[at])
                else:
                    value = float_of(u32(u32(as_u16(table)[at]) << u32(16)))
                y[to] = value * scale
            else:
                y[to] = float_of(u32(_NOTHING))

    return _embed


@functools.cache
def code_rows(kind: str) -> Kernel:
    """Look-up in a quantised table: one thread for each unit of 32 columns."""
    scheme = SCHEMES[kind]
    codes, read, head_of = LocalArray(u32, 8), reader(scheme), header(scheme)
    in_codes, row_of, numbers = scheme.in_codes, row_header(scheme), numbers_of(scheme)
    based = scheme.with_base

    @kernel(f"embed_{kind}", 32)
    def _embed(y: Rows, planes: Planes, slots: u32.ptr, outliers: u32, tokens: i32.ptr, counts: i32.ptr, first: u32,
               rows: u32, width: u32, scale: f32):
        t, unit = block_x(), u32(block_y() * 32 + thread_index())
        units = width + 31 >> u32(5)
        if t >= counts[N_TOKENS] or unit >= units:
            return
        row, words = u32(u32(tokens[t]) - first), codes()
        to = y.data + (t * y.stride + unit * 32)
        if row >= rows:
            for i in range(32):
                if unit * 32 + i < width:
                    to[i] = float_of(u32(_NOTHING))
            return
        at = u32(row * units + unit)
        base, step, z, dz = row_of(planes.per_row, row)
        if in_codes:
            p, q, _, _ = load4(planes.low, u32(4 * at))
            a, c = pair_header(p, q, base, step, z, dz)
            a16, c16 = a, c
        else:
            a, c, a16, c16 = head_of(planes.head, planes.above, at, base, step, z, dz)
        read(words, planes.low, planes.high, planes.two, planes.one, at)
        for g in range(8):
            factor, shift = (a, c) if g < 4 else (a16, c16)
            if unit * 32 + 4 * g < width:
                w0, w1, w2, w3 = numbers(words[g])
                if not based:
                    shift = f32(0)
                to[4 * g], to[4 * g + 1] = (factor * w0 + shift) * scale, (factor * w1 + shift) * scale
                to[4 * g + 2], to[4 * g + 3] = (factor * w2 + shift) * scale, (factor * w3 + shift) * scale
        slot = u32(0)
        while slot < outliers:
            word = slots[row * outliers + slot]
            if u32(word & u32(0xFFFF)) >> u32(5) == unit:
                to[word & u32(31)] += value_of(word) * scale
            slot = u32(slot + 1)

    return _embed


@kernel("embed_add", THREADS)
def _add_row(y: f32.ptr, y_stride: u32, x: f32.ptr, x_stride: u32, table: f32.ptr, indices: i32.ptr, counts: i32.ptr,
             width: u32, offset: u32):
    t, column = block_x(), block_y() * 128 + thread_index()
    if t < counts[N_TOKENS] and column < width:
        y[t * y_stride + column] = x[t * x_stride + column] + table[(indices[t] + offset) * width + column]


@kernel("columns_apart", THREADS)
def _columns_apart(y: i32.ptr, x: IntRows, counts: i32.ptr, rows: u32, width: u32, room: u32):
    """y [width, room] = the columns of x, one after the other."""
    t, column = block_x(), u32(block_y() * 128 + thread_index())
    if t < counts[rows] and column < width:
        y[column * room + t] = x.data[t * x.stride + column]
