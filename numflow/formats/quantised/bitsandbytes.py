"""bitsandbytes: 4-bit codes into a codebook, and int8.

4 bits: NAME.weight holds the matrix (or a stack) row by row, two codes per byte, the high nibble first.
NAME.weight.absmax has a scale per block; blocks continue over the ends of rows. NAME.weight.quant_map is the codebook.
NAME.weight.quant_state.* is JSON with shape and sizes. Scales may be codes into a codebook of 256 ("double
quantisation"). 8 bits: NAME.weight I8 (N, K); row n has the scale NAME.SCB[n] / 127.
"""

import functools
import math
from typing import Any

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import parse_json, show
from numflow.formats.quantised.coded import CodedMatrix, CodedRows
from numflow.formats.quantised.parts import StoredParts, integers, stored_bytes
from numflow.quant.hub_types import TABLES

_STATE, _MOST = ".quant_state.bitsandbytes__", 1 << 20


def four_bits(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight with NAME.weight.absmax.

    Raises:
        FormatError: a tensor beside it is missing or does not fit.
    """
    tensor = parts.need(name, tuple({parts.tensors[name].type.name}), beside=name)
    state, kind = _state(parts, name)
    shape, size = state.get("shape"), state.get("blocksize")
    if not (isinstance(shape, list) and 2 <= len(shape) <= 4 and all(type(n) is int and n > 0 for n in shape)) or not (
            type(size) is int and size > 0):
        raise parts.fail(name, f"quant_state: expected shape [N, K] and a blocksize, found {show(shape)} and "
                               f"{show(size)}")
    n, k = math.prod(shape[:-1]), shape[-1]
    if tensor.nbytes != -(-n * k // 2):
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected {-(-n * k // 2)} bytes for "
                               f"{shape} weights of 4 bits")
    table = parts.need(f"{name}.quant_map", ("F32",), (16,), beside=name).f32()
    absmax, group = _absmax(parts, name, state, -(-n * k // size)), math.gcd(k, size)

    def rows(begin: int, end: int) -> CodedRows:
        codes = _codes(stored_bytes(tensor), begin * k, end * k).reshape(-1, k)
        starts = np.arange(begin, end)[:, None] * k + np.arange(k // group) * group
        return CodedRows(codes, absmax()[starts // size])

    book = kind if np.array_equal(table, TABLES[kind]) else ""
    return CodedMatrix(name, tuple(shape), rows, 4, "F32", group, None, table, book, turned=len(shape) == 2,
                       sources=(tensor,))


def _codes(data: np.ndarray, begin: int, end: int) -> np.ndarray:
    """4-bit codes begin .. end - 1 of bytes, high nibble first."""
    some = data[begin // 2:-(-end // 2)]
    return np.stack([some >> 4, some & 15], axis=1).reshape(-1)[begin % 2:begin % 2 + end - begin]


def _state(parts: StoredParts, name: str) -> tuple[dict[str, Any], str]:
    """The quant_state of a matrix, and the name of its codebook."""
    for kind in ("nf4", "fp4"):
        found = parts.get(f"{name}{_STATE}{kind}")
        if found is not None:
            if found.type.name != "U8" or found.nbytes > _MOST:
                raise parts.fail(found.name, f"is {found.type.name} {show(list(found.shape))}, expected U8 text")
            return parse_json(stored_bytes(found).tobytes(), f"{parts.file_of(name)}: tensor {show(found.name)}"), kind
    raise parts.fail(name, f"needs {show(f'{name}{_STATE}nf4')} or ...fp4, which is not there")


def _absmax(parts: StoredParts, name: str, state: dict[str, Any], count: int):
    """A function that returns the scales of all blocks, f32 [count]."""
    scales = parts.need(f"{name}.absmax", ("F32", "U8"), (count,), beside=name)
    if scales.type.name == "F32":
        return functools.cache(scales.f32)
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not (type(size) is int and size > 0) or not isinstance(offset, int | float):
        raise parts.fail(name, f"quant_state: expected nested_blocksize and nested_offset, found {show(size)} and "
                               f"{show(offset)}")
    table = parts.need(f"{name}.nested_quant_map", ("F32",), (256,), beside=name)
    outer = parts.need(f"{name}.nested_absmax", ("F32",), (-(-count // size),), beside=name)

    @functools.cache
    def values() -> np.ndarray:
        return table.f32()[integers(scales)] * outer.f32()[np.arange(count) // size] + np.float32(offset)

    return values


def eight_bits(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight I8 with NAME.SCB.

    Raises:
        FormatError: tensors do not fit, or weights are not in row order.
    """
    stem = name.removesuffix(".weight")
    tensor = parts.need(name, ("I8",), beside=name)
    if len(tensor.shape) != 2:
        raise parts.fail(name, f"is I8 {show(list(tensor.shape))}, expected two dimensions")
    scale: Tensor = parts.need(f"{stem}.SCB", ("F32",), (tensor.rows,), beside=name)
    order = parts.get(f"{stem}.weight_format")
    if order is not None and (order.type.name != "U8" or stored_bytes(order).any()):
        raise parts.fail(order.name, "is not 0: only weights in rows are read")

    def rows(begin: int, end: int) -> CodedRows:
        return CodedRows(tensor.raw()[begin:end] ^ np.uint8(128), scale.f32()[begin:end, None] / np.float32(127))

    return CodedMatrix(name, tensor.shape, rows, 8, "F32", tensor.columns, 128, turned=True, sources=(tensor,))
