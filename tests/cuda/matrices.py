"""Networks with one quantised matrix, for every tensor type that the executor stores without conversion."""

from dataclasses import replace

import numpy as np

from numflow.cuda.lang.float4 import e2m1_values
from numflow.cuda.lang.float8 import e4m3_code
from numflow.cuda.weights.pack import stored_bytes
from numflow.formats.types import TYPES, to_f32
from numflow.learn.cases.build import VOCABULARY, FakeWeights
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.network.weights.source import RawMatrix
from numflow.quant import SCHEMES, decode, encode, find
from numflow.quant.grids import GRIDS
from numflow.quant.hub_types import HUB_TYPES, TABLES
from numflow.quant.stored import STORED
from tests.quant.hub import TYPES_TESTED, hub_rows

FLOAT4 = {"E2M1_ROW": "nvfp4", "NVFP4": "nvfp4", "MXFP4": "mxfp4"}  # with activations "nvfp4": the operand by type
FLOAT8 = ("E4M3_ROW", "E4M3_128", "E5M2_128")  # types that are multiplied by 8-bit floats with activations "fp8"
QUANTISED = tuple(name for name in TYPES_TESTED if not STORED[name].kind.is_float)
_HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,),
           "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q1_0": (0,), "Q2_0": (0,),
           "Q2_0_128": (0,),
           "TQ1_0": (52,), "TQ2_0": (64,), **dict.fromkeys(set(GRIDS) - {"IQ1_M"}, (0,))}


# Scales for types with so large codes that keys and values of wide models would exceed the float16 range.
_MOST = {"Q5_K": 0.02, "Q6_K": 0.01, "IQ4_XS": 0.01}

REPEATED = 32  # distinct random rows of a "repeated" matrix


def is_quantised(kind: str) -> bool:
    """Whether the executor stores codes of this type: one of QUANTISED or FLOAT8, or such a scheme with outliers."""
    return kind.partition("+")[0] in (*QUANTISED, *FLOAT8)


def stored(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Rows of random codes and plausible headers, uint8 [n, row_bytes]; for types with outliers, of heavy-tailed
    weights."""
    rng = np.random.default_rng(seed)
    if kind.endswith("%"):
        return encode(rng.standard_t(4, (n, k)).astype(np.float32), find(kind), threads=1)
    if kind in SCHEMES and kind != "q4_b16":  # for q4_b16, any byte is a valid header
        return encode(rng.standard_normal((n, k)).astype(np.float32), find(kind), threads=1)
    if kind in HUB_TYPES:
        # Tensor cores take weights up to 127, so the row's scale times the largest scale of 16 columns is limited.
        return hub_rows(kind, n, k, rng, most=4 if HUB_TYPES[kind].by_16 else 16)
    block, size = TYPES[kind].block, TYPES[kind].size
    raw = rng.integers(0, 256, (n, k // block, size), dtype=np.uint8)
    most = _MOST.get(kind, 0.1)
    for at in _HALVES.get(kind, ()):
        raw[:, :, at:at + 2] = rng.uniform(most / 10, most, (n, k // block, 1)).astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":  # 4 bits of the scale in each of the last 4 pairs of bytes
        raw[:, :, 55] = raw[:, :, 55] & 15 | 0x20
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(120, 130, (n, k // block))
    if kind == "NVFP4":
        raw[:, :, :4] = rng.integers(0, 80, (n, k // block, 4))
    return raw.reshape(n, -1)


def values(kind: str, raw: np.ndarray, k: int) -> np.ndarray:
    """float32 [n, k]"""
    return decode(raw, find(kind), k, threads=1) if kind in SCHEMES or kind.endswith("%") else to_f32(raw, kind)


class Stored(FakeWeights):
    """FakeWeights with some matrices stored as another type: name -> (type, rows)."""

    def __init__(self, other: FakeWeights, matrices: dict[str, tuple[str, np.ndarray]]):
        super().__init__(other.arrays, other.weights)
        self.matrices = matrices

    def raw(self, name):
        if name not in self.matrices:
            return super().raw(name)
        weight = self.weights[name]
        return RawMatrix(name, *self.matrices[name], weight.shape, weight.groups)


def stored_as(case, matrices: dict[str, tuple[str, np.ndarray]]):
    """The case with these matrices stored as a type: name -> (type, rows)."""
    weights = case.network.weights | {name: replace(case.network.weights[name], types=(kind,))
                                      for name, (kind, _) in matrices.items()}
    return replace(case, network=replace(case.network, weights=weights), weights=Stored(case.weights, matrices))


def rows_and_values(b: Builder, kind: str, n: int, k: int, fill: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows as stored, uint8, and their values, float32 [n, k]. fill: as in linear_case."""
    if fill == "blank":
        return blank_rows(kind, n, k), np.zeros((n, k), np.float32)
    if fill == "repeated":
        few = rows_and_values(b, kind, min(n, REPEATED), k, "random")[0]
        return np.ascontiguousarray(few[np.arange(n) % len(few)]), np.zeros((n, k), np.float32)
    if is_quantised(kind):
        rows = stored(kind, n, k)
        return rows, values(kind, rows, k)
    matrix = b.normal(n, k)
    rows = {"F32": matrix, "F16": matrix.astype(np.float16),
            "BF16": (matrix.view(np.uint32) >> 16).astype(np.uint16)}[kind].view(np.uint8)
    return rows, to_f32(rows, kind)


def blank_rows(kind: str, n: int, k: int) -> np.ndarray:
    """Rows of zero bytes, except for the columns of outliers, which are random."""
    rows = np.zeros((n, stored_bytes(kind, k)), np.uint8)
    if kind.endswith("%"):
        first, count = find(kind).base.row_bytes(k), find(kind).count(k)
        columns = np.sort(np.random.default_rng(0).integers(0, k, (n, count), np.uint16), axis=1)
        rows[:, first:first + 2 * count] = columns.view(np.uint8)
    return rows


def linear_case(kind: str, n: int, k: int, tokens: int, bias: bool = False, fill: str = "random", copies: int = 1):
    """A Case of op `linear` whose matrix is stored as `kind`; FakeWeights.f32 has its de-quantised values.

    fill:   "random"; "blank": zero bytes, for tests that only look at kernels; "repeated": a few random rows, for
            measurements. For the last two, FakeWeights.f32 has zeros.
    copies: number of equal matrices in separate memory, each multiplied with x; y is the last product.
    """
    b = Builder(f"linear-{kind}-{n}x{k}-{tokens}")
    x, _ = b.inputs(k, 4)
    rows, matrix = rows_and_values(b, kind, n, k, fill)
    stored_rows = {}
    for _ in range(copies):
        y, weights = b.buffer(n), {"weight": b.weight("weight", matrix)}
        stored_rows[weights["weight"]] = kind, rows
        if bias:
            weights["bias"] = b.weight("bias", b.normal(n))
        b.step("linear", (x,), (y,), weights)
    return stored_as(b.case(y, (((0, tokens),),)), stored_rows)


def of_float8(case, k: int):
    """A case whose x, of k columns, has 8-bit floats times one scale a token, so that quantising x is exact."""
    weights = case.weights
    table = weights.arrays["table.0"].copy()
    scale = np.abs(table[:, :k]).max(1, keepdims=True) / 448
    table[:, :k] = TABLES["e4m3"][e4m3_code(table[:, :k] / scale)] * scale
    arrays = weights.arrays | {"table.0": table}
    return replace(case, weights=Stored(FakeWeights(arrays, weights.weights), weights.matrices))


def of_float4(case, k: int, kind: str):
    """The same of an operand of 4-bit floats."""
    table, rng = case.weights.arrays["table.0"].copy(), np.random.default_rng(1)
    block = 16 if kind == "nvfp4" else 32
    codes = rng.integers(0, 16, (len(table), k // block, block)).astype(np.uint32)
    codes[..., 3] = 7 + 8 * (codes[..., 3] & 1)      # a number of 6, up to its sign
    scales = TABLES["e4m3"][rng.integers(70, 127, codes.shape[:2])]
    scales[:, 1] = 448
    rows = rng.uniform(1e-4, 2e-4, (len(table), 1))  # scales, of MXFP4 1
    if kind == "mxfp4":
        scales, rows = 2.0**rng.integers(-6, 1, scales.shape), 1
    table[:, :k] = (e2m1_values(codes)[..., 0] * scales[..., None]).reshape(len(table), k) * rows
    return replace(case, weights=Stored(FakeWeights(case.weights.arrays | {"table.0": table}, case.weights.weights),
                                        case.weights.matrices))


def heads_case(kind: str, n: int, k: int, heads: int, tokens: int):
    """A Case of `head_linear` whose matrices are stored as `kind`."""
    b = Builder(f"heads-{kind}-{n}x{k}-{heads}-{tokens}")
    (x,) = b.inputs(heads * k)
    rows, matrix = rows_and_values(b, kind, heads * n, k, "random")
    y, weight = b.buffer(heads * n), b.weight("weight", matrix, groups=heads)
    b.step("head_linear", (x,), (y,), {"weight": weight}, heads=heads)
    case = b.case(y, (((0, tokens),),))
    return stored_as(case, {weight: (kind, rows)})


def experts_case(kind: str, n: int, k: int, experts: int, chosen: int, first: int = 0, held: int = 0,
                 bias: bool = False, fill: str = "random"):
    """A Case of `moe_route`, `expert_linear`, `expert_combine` whose matrices are stored as `kind`.

    held: number of experts on this device, from `first` on; 0: all. fill: as in linear_case.
    """
    b, held = Builder(f"experts-{kind}-{n}x{k}-{experts}"), held or experts
    x, logits = b.inputs(k, experts)
    ids, gates = b.buffer(chosen, dtype="i32"), b.buffer(chosen)
    routed, y = b.buffer(n, "routes"), b.buffer(n)
    b.step("moe_route", (logits,), (ids, gates), normalize=True)
    rows, matrix = rows_and_values(b, kind, held * n, k, fill)
    weights = {"weight": b.weight("weight", matrix, groups=held)}
    if bias:
        weights["bias"] = b.weight("bias", b.normal(held * n))
    b.step("expert_linear", (x, ids), (routed,), weights, **({"first": first} if held < experts else {}))
    b.step("expert_combine", (routed, gates), (y,))
    case = b.case(y, (((0, 3),),))
    return stored_as(case, {weights["weight"]: (kind, rows)})


def embed_case(kind: str, width: int, blank: bool = False, held: int = 0, first: int = 0):
    """A Case of op `embed` whose table is stored as `kind`. held: rows on this device, from `first` on; 0: all."""
    b, held = Builder(f"embed-{kind}"), held or VOCABULARY
    y = b.buffer(width)
    rows = blank_rows(kind, held, width) if blank or not is_quantised(kind) else stored(kind, held, width)
    part = {"first": first, "vocabulary": VOCABULARY} if held < VOCABULARY else {}
    b.step("embed", (), (y,), {"table": b.weight("table", values(kind, rows, width))}, scale=1.5, **part)
    case = b.case(y, (((0, 12 if part else 3),),))
    return stored_as(case, {next(iter(case.weights.arrays)): (kind, rows)})


def embed_ids_case(kind: str, width: int):
    """A Case of op `embed_ids`, two rows for each token, whose table is stored as `kind`."""
    b, sizes = Builder(f"embed_ids-{kind}"), (23, 29)
    ids, y = b.buffer(2, dtype="i32"), b.buffer(2 * width)
    b.step("ngram_ids", (), (ids,), state=b.state(1), multipliers=(31, 1009), sizes=sizes, separator=0)
    rows, table = rows_and_values(b, kind, sum(sizes), width, "")
    b.step("embed_ids", (ids,), (y,), {"table": b.weight("table", table)})
    return stored_as(b.case(y, (((0, 3), (1, 2)),)), {next(iter(b.weights)): (kind, rows)})
