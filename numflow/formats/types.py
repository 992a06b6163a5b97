"""Tensor types of files, and their conversion to float32.

Names, numbers and block sizes of GGML types are GGML's. Further types: those of safetensors, torch and llama2.c, the
schemes of numflow.quant (lower case), and the types of quantised checkpoints (hub_types.py).
"""

import functools
import re
from dataclasses import dataclass

import numpy as np

from numflow.errors import FormatError, RequestError, did_you_mean
from numflow.quant import SCHEMES, RowScheme, decode, find
from numflow.quant.hub_types import HUB_TYPES
from numflow.quant.stored import STORED, weights


@dataclass(frozen=True)
class TensorType:
    """A storage type: blocks of `block` weights along a row, `size` bytes each.

    Lower-case names are schemes of numflow.quant.
    """

    name: str
    block: int
    size: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; columns must be a multiple of the block."""
        return columns // self.block * self.size

    def columns(self, row_bytes: int) -> int | None:
        """Number of weights in a row of `row_bytes` bytes; None if no row has this size."""
        return None if row_bytes % self.size else row_bytes // self.size * self.block


# name: (GGML number, weights per block, bytes per block). A test compares the table with the `gguf` package.
_GGML = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34), "Q8_1": (9, 32, 40),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292),
    "IQ1_S": (19, 256, 50), "IQ1_M": (29, 256, 56), "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74),
    "IQ2_S": (22, 256, 82), "IQ3_XXS": (18, 256, 98), "IQ3_S": (21, 256, 110), "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
}
# Types of other formats: bytes per weight.
_OTHER = {"BOOL": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}

TYPES = {name: TensorType(name, block, size) for name, (_, block, size) in _GGML.items()}
TYPES |= {name: TensorType(name, 1, size) for name, size in _OTHER.items()}
WHOLE = frozenset(("I8", "I16", "I32", "I64", "BOOL", "U8", "U16", "U32", "U64"))  # integer types
# Q2_0 of the llama.cpp fork that introduced it, with the same number (gguf.py distinguishes the two).
TYPES["Q2_0_128"] = TensorType("Q2_0_128", 128, 34)


@dataclass(frozen=True)
class RowType(TensorType):
    """A scheme of numflow.quant whose rows have further data beside blocks; a block of codes has `block` weights."""

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; columns must be a multiple of the block."""
        return find(self.name).row_bytes(columns) if columns else 0

    def columns(self, row_bytes: int) -> int | None:
        """Number of weights in a row of `row_bytes` bytes; None if no row has this size."""
        low, high = 0, row_bytes // self.size  # binary search over the number of blocks
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.row_bytes(middle * self.block) < row_bytes else (low, middle)
        return low * self.block if self.row_bytes(low * self.block) == row_bytes else None


TYPES |= {name: RowType(name, s.unit, s.unit_bytes) if isinstance(s, RowScheme) else TensorType(name, s.block, s.size)
          for name, s in SCHEMES.items()}

@dataclass(frozen=True)
class HeadedType(TensorType):
    """Blocks after a row header of `header` bytes."""

    header: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; columns must be a multiple of the block."""
        return self.header + super().row_bytes(columns) if columns else 0

    def columns(self, row_bytes: int) -> int | None:
        """Number of weights in a row of `row_bytes` bytes; None if no row has this size."""
        return super().columns(max(0, row_bytes - self.header)) if row_bytes != self.header else None


TYPES |= {name: HeadedType(name, hub.columns, hub.size, hub.row_header) if hub.row_header else
          TensorType(name, hub.columns, hub.size) for name, hub in HUB_TYPES.items()}

GGML_NAMES = {number: name for name, (number, _, _) in _GGML.items()}
GGML_NUMBERS = {name: number for number, name in GGML_NAMES.items()}
# Former GGML numbers, which no current program reads.
GGML_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
                36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

_NUMPY = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
          "BOOL": "u1", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
_Q8_GROUPS = re.compile(r"Q8_GS([1-9]\d{0,9})")


def q8_groups(block: int) -> TensorType:
    """Type of llama2.c's int8 groups: a float32 scale, then `block` int8 codes."""
    return TensorType(f"Q8_GS{block}", block, block + 4)


def tensor_type(name: str) -> TensorType:
    """The type of this name.

    Raises:
        FormatError: no such type; the message suggests the nearest name.
    """
    if name in TYPES:
        return TYPES[name]
    if name.endswith("%"):
        return _with_outliers(name)
    if match := _Q8_GROUPS.fullmatch(name):
        return q8_groups(int(match[1]))
    raise FormatError(f"no tensor type named {name!r}{did_you_mean(name, TYPES)}")


@functools.cache
def _with_outliers(name: str) -> RowType:
    """The type of a scheme with outliers, such as "q3h+0.5%"."""
    try:
        base = TYPES[find(name.partition("+")[0]).name]
        return RowType(find(name).name, base.block, base.size)
    except RequestError as error:
        raise FormatError(f"no tensor type named {name!r}: {error}") from None


def to_f32(raw: np.ndarray, type_name: str) -> np.ndarray:
    """De-quantise rows.

    Args:
        raw: uint8 [rows, row_bytes], rows in the type's own layout.
        type_name: a name of `TYPES`, or "Q8_GS<block>".

    Returns:
        float32 [rows, columns], aligned; for "F32" it may be a read-only view of `raw`.

    Raises:
        FormatError: no such type, a row of partial blocks, or a type that cannot be expanded.
    """
    kind = tensor_type(type_name)
    rows, row_bytes = raw.shape
    columns = kind.columns(row_bytes)
    if columns is None:
        raise FormatError(f"a row of {row_bytes} bytes is no whole number of {type_name} blocks of {kind.size} bytes")
    raw = np.ascontiguousarray(raw)
    # A damaged scale, or a float64 beyond float32, becomes NaN or infinity without a warning: this is the file's value.
    with np.errstate(all="ignore"):
        return np.require(_expand(raw, kind, columns).reshape(rows, columns), np.float32, "A")


def _expand(raw: np.ndarray, kind: TensorType, columns: int) -> np.ndarray:
    """Values of any dtype and shape, in row order."""
    if raw.size == 0:
        return np.empty(0, np.float32)
    if kind.name in _NUMPY:
        return raw.view(_NUMPY[kind.name])
    if kind.name in SCHEMES or isinstance(kind, RowType):
        return decode(raw, find(kind.name), columns)
    if kind.name in HUB_TYPES:
        return weights(STORED[kind.name].kind, *STORED[kind.name].fields(raw, columns))
    blocks = raw.reshape(-1, kind.size)
    if kind.name in _EXPAND:
        return _EXPAND[kind.name](blocks)
    if _Q8_GROUPS.fullmatch(kind.name):
        return blocks[:, 4:].view(np.int8) * blocks[:, :4].copy().view("<f4")
    return _expand_ggml(raw, kind.name)


def _expand_ggml(raw: np.ndarray, name: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType.__members__.get(name)
    try:
        if number is None:
            raise NotImplementedError
        return quants.dequantize(raw, number)
    except NotImplementedError:
        raise FormatError(f"{name} tensors cannot be expanded: the installed gguf package does not know how") from None


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """float16 scale, then 128 bits: 1 is +scale, 0 is -scale, lowest bit first."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), scale, -scale)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    """float16 scale, then codes of 2 bits, lowest bits first: 0 .. 3 are -1 .. 2 times the scale."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(blocks), -1)
    return (codes.astype(np.float32) - 1) * scale


def _f8_e5m2(blocks: np.ndarray) -> np.ndarray:
    return (blocks.astype(np.uint16) << 8).view(np.float16)


@functools.cache
def _e4m3_values() -> np.ndarray:
    """float32 [256]: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, all ones is NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


_EXPAND = {
    "BF16": _bf16,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q2_0_128": _q2_0,
    "F8_E5M2": _f8_e5m2,
    "F8_E4M3": lambda blocks: _e4m3_values()[blocks],
    "F8_E8M0": lambda blocks: np.where(blocks == 255, np.nan, np.ldexp(np.float32(1), blocks.astype(np.int32) - 127)),
}
