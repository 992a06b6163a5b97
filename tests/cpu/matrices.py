"""Helpers for tests of packed matrices: stored matrices of every type, and `linear` run on them as in a program."""

from types import SimpleNamespace

import numpy as np

from numflow.cpu.context import Context
from numflow.cpu.linear.activations import bind_operand, operand_bytes
from numflow.cpu.memory.buffers import aligned, padded
from numflow.cpu.runtime.kernel import HEADER_FIELDS, N_ROUTES, N_TOKENS, ROW_FIELD, TOKENS
from numflow.cpu.weights.pack import pack
from numflow.formats.types import TYPES, tensor_type
from numflow.network.weights.source import RawMatrix
from numflow.ops import Step, View
from numflow.quant import encode, find
from numflow.quant.grids import GRIDS
from numflow.quant.hub_types import HUB_TYPES
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.layout import ROW_SCHEMES
from tests.quant.hub import hub_rows

# Offsets of the float16 scales in a block.
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q1_0": (0,), "Q2_0": (0,),
           "Q2_0_128": (0,),
           "TQ1_0": (52,), "TQ2_0": (64,), **dict.fromkeys(set(GRIDS) - {"IQ1_M"}, (0,))}


def stored(kind: str, rows: int, columns: int, groups: int = 1, seed: int = 0) -> RawMatrix:
    """A matrix of random blocks: every bit pattern of the codes, float16 scales of both signs and of any size."""
    rng = np.random.default_rng(seed)
    if kind.endswith("%"):
        values = rng.standard_t(2, (rows, columns)).astype(np.float32)
        return RawMatrix("w", kind, encode(values, find(kind)), (rows, columns), groups)
    if TYPES[kind].block == 1:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        bits = {"F32": values, "F16": values.astype(np.float16), "F64": values.astype(np.float64),
                "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}[kind]
        return RawMatrix("w", kind, bits.view(np.uint8).reshape(rows, -1), (rows, columns), groups)
    if kind in INFERFLOW_SCHEMES and kind != "q4_b16":  # any bytes are valid headers
        values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-9, 5, (rows, 1))
        return RawMatrix("w", kind, encode(values.astype(np.float32), find(kind)), (rows, columns), groups)
    if kind in HUB_TYPES:
        return RawMatrix("w", kind, hub_rows(kind, rows, columns, rng), (rows, columns), groups)
    if kind in ROW_SCHEMES:
        return RawMatrix("w", kind, _own_rows(kind, rows, columns, rng), (rows, columns), groups)
    shape = rows, columns // TYPES[kind].block
    blocks = rng.integers(0, 256, (*shape, TYPES[kind].size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(110, 130, shape)
    if kind == "IQ1_M":  # each of the last 4 pairs of bytes has 4 bits of the scale
        blocks[:, :, 55] &= 0xBF
    for at in _SCALES.get(kind, ()):
        scales = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 0, shape)).astype(np.float16)
        blocks[:, :, at:at + 2] = scales[..., None].view(np.uint8)
    return RawMatrix("w", kind, blocks.reshape(rows, -1), (rows, columns), groups)


def _own_rows(kind: str, rows: int, columns: int, rng) -> np.ndarray:
    """Random codes and block headers, zeros and steps up to 4 octaves from scale to scale; one row of zeros."""
    raw = rng.integers(0, 256, (rows, ROW_SCHEMES[kind].row_bytes(columns)), dtype=np.uint8)
    headers = rng.integers(360, 390, rows) << 7 | rng.integers(0, 20, rows) << 2 | rng.integers(0, 4, rows)
    headers[1] &= 127
    raw[:, :2] = headers.astype("<u2")[:, None].view(np.uint8)
    return raw


def activations(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """float32 [rows, columns] of very different magnitudes, some units all zero."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, columns)) * 4.0 ** rng.integers(-3, 3, (rows, columns))).astype(np.float32)
    x[::3, : min(32, columns)] = 0
    return x


def quantized(x: np.ndarray) -> np.ndarray:
    """Values of int8 activations: by 32 columns, round(v / scale) * scale with scale = max |v| / 127."""
    units = x.reshape(len(x), -1, 32)
    largest = np.abs(units).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 1e-36, np.float32(127) / largest, np.float32(0))
    codes = np.rint(units.astype(np.float64) * inverse)
    return (codes * (largest / np.float32(127))).reshape(x.shape)


def quantized_twice(x: np.ndarray) -> np.ndarray:
    """Values of pairs of int8: the same, plus the rounding error quantised with 1/254 of the scale."""
    units = x.reshape(len(x), -1, 32)
    finer = np.abs(units).max(-1, keepdims=True).astype(np.float64) / (127 * 254)
    first = quantized(x).astype(np.float64)
    rest = (x - first).reshape(units.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(finer > 0, np.rint(rest / finer), 0)
    assert np.abs(codes).max() <= 127
    return first + (codes * finer).reshape(x.shape)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, ties to even; below 2^-126 zeros."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = bits + (bits >> 16 & 1) + np.uint32(0x7FFF) & np.uint32(0xFFFF0000)
    return np.where(np.abs(x) < 2.0 ** -126, np.float32(0), near.view(np.float32))


class Bench:
    """The context that a binder needs, for one step on buffers [capacity, width + padding] of the given rows."""

    def __init__(self, widths: dict[str, int], rows: dict[str, str], capacity: int, packed, mode: str, vectors=None,
                 threads: int = 1, routes: int = 1):
        self.capacity = {"tokens": capacity, "logits": capacity, "routes": capacity * routes}
        self._rows, self._packed, self._vectors = rows, packed, vectors or {}
        self._arrays = {name: aligned((self.capacity[rows[name]], padded(width)),
                                      np.int32 if name == "ids" else np.float32) for name, width in widths.items()}
        self.activations, self.n_threads, self.network = mode, threads, None
        self.header_fields = aligned(HEADER_FIELDS, np.int64)
        self.header, self._kept = self.header_fields.ctypes.data, []

    def array(self, name: str) -> np.ndarray:
        """A buffer, padding included."""
        return self._arrays[name]

    def view(self, view: View) -> tuple[int, int]:
        array = self._arrays[view.buffer]
        return array.ctypes.data + 4 * view.start, array.shape[1]

    strided = Context.strided

    def rows(self, view: View) -> int:
        return ROW_FIELD[self._rows[view.buffer]]

    def max_rows(self, view: View) -> int:
        return self.capacity[self._rows[view.buffer]]

    def packed(self, name: str):
        return self._packed

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        self._kept.append(aligned(nbytes, np.uint8))
        self._kept[-1][:] = 0xA5  # the old content must not matter
        return self._kept[-1]

    def operand(self, view: View, kind: int, maker=None):
        sizes = operand_bytes(self.capacity[self._rows[view.buffer]], view.width, kind)
        x, aux = (self.scratch("operand", size).ctypes.data for size in sizes)
        call = bind_operand(self.header, self.rows(view), *self.view(view), view.width, x, aux, kind)
        return SimpleNamespace(x=x, aux=aux, calls=(call,))

    def run(self, calls, tokens: int, routes: int = 0, ids: np.ndarray | None = None) -> None:
        """Run calls as `threads` threads would, one after the other."""
        header = self.header_fields
        header[N_TOKENS], header[N_ROUTES] = tokens, routes
        header[TOKENS] = 0 if ids is None else ids.ctypes.data
        for call in calls:
            for thread in range(self.n_threads):
                call(thread, self.n_threads)


def run_linear(packed, x: np.ndarray, mode: str, bias=None, threads: int = 1, before: int = 0) -> np.ndarray:
    """linear of float32 rows x; y begins `before` columns into its buffer; the columns around it must not change."""
    from numflow.cpu.linear.linear import linear

    n = packed.shape[0]
    bench = Bench({"x": x.shape[1], "y": before + n + 3}, {"x": "tokens", "y": "tokens"}, len(x) + 2, packed, mode,
                  {"b": bias}, threads)
    bench.array("x")[:len(x), :x.shape[1]] = x
    y = bench.array("y")
    y[:] = np.float32(-7)
    weights = {"weight": "w"} | ({"bias": "b"} if bias is not None else {})
    step = Step("linear", (View("x", 0, x.shape[1]),), (View("y", before, n),), weights)
    bench.run(linear(step, bench), len(x))
    inside = np.zeros(y.shape, bool)
    inside[:len(x), before:before + n] = True
    assert (y[~inside] == -7).all(), "linear wrote outside its view"
    return y[:len(x), before:before + n].copy()


def pack_stored(kind: str, rows: int, columns: int, groups: int = 1, threads: int = 1):
    """A stored matrix and its packed form."""
    raw = stored(kind, rows, columns, groups)
    return raw, pack(raw, threads)


def columns_of(kind: str) -> int:
    """A small number of columns, odd if the type allows it."""
    return {1: 75, 16: 96, 32: 96, 64: 192, 128: 384, 256: 512}[tensor_type(kind).block]
