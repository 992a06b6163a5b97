"""HQQ: NAME.W_q, scale and zero, and small tensors that describe the packing.

Groups of `group_size` consecutive weights form the rows (axis 1) or columns (axis 0) of a group matrix. Its rows are
split into as many equal parts as codes fit in a word; the first part is in the highest bits. w = (code - zero) * scale.
"""

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.coded import CodedMatrix, CodedRows
from numflow.formats.quantised.parts import SCALES, StoredParts, integers, scale_values, stored_bytes
from numflow.formats.types import TYPES, to_f32

# Packing: bits, codes per word, type of words.
_PACKINGS = {"8bit_u8": (8, 1, "U8"), "4bit_u8": (4, 2, "U8"), "2bit_u8": (2, 4, "U8"), "1bit_u8": (1, 8, "U8"),
             "3bit_32": (3, 10, "I32")}
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}


def hqq(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.W_q.

    Raises:
        FormatError: unsupported packing or metadata, or shapes that do not fit.
    """
    stem = name.removesuffix("W_q")
    n, k = _shape(parts, stem, name)
    said = parts.tensors.get(f"{stem}packing")
    bits = _number(parts, f"{stem}nbits", 4)
    packing = stored_bytes(said).tobytes().decode("ascii", "replace") if said is not None and said.nbytes < 64 else (
        "3bit_32" if bits == 3 else f"{bits}bit_u8")
    if packing not in _PACKINGS:
        raise parts.fail(name, f"packing {show(packing)} is not read; known: {', '.join(_PACKINGS)}")
    bits, each, kind = _PACKINGS[packing]
    axis, group = _number(parts, f"{stem}axis", 1), _number(parts, f"{stem}group_size", k)
    if axis not in (0, 1) or group < 1 or n * k % group:
        raise parts.fail(name, f"axis {axis} and group_size {group}: expected axis 0 or 1, and groups that divide "
                               f"{n} x {k} weights")
    for flag in ("quant_scale", "quant_zero"):
        found = parts.tensors.get(f"{stem}{flag}")
        if found is not None and stored_bytes(found).any():
            raise parts.fail(found.name, "is set: scales and zeros that are quantised themselves are not read")
    grid = (n * k // group, group) if axis else (group, n * k // group)
    words = _words(parts, name, kind, (-(-grid[0] // each), grid[1]))
    ways = [(grid[0], 1), (grid[0],)] if axis else [(1, grid[1]), (grid[1],)]
    scales = parts.need(f"{stem}scale", SCALES, *ways, beside=name)
    zeros = parts.need(f"{stem}zero", SCALES, *ways, beside=name)
    parts.used |= {other for other in parts.tensors if other.startswith(stem) and other != f"{stem}bias"}
    read = _by_rows if axis and k % group == 0 else _by_weight
    return CodedMatrix(f"{stem}weight", (n, k), read(words, scales, zeros, grid, bits, k, axis), bits, scales.type.name,
                       group if read is _by_rows else 1, zero_type=zeros.type.name, turned=True, sources=(words,))


def _words(parts: StoredParts, name: str, kind: str, shape: tuple[int, int]) -> Tensor:
    """The words in their shape; the file may have the same bytes as floats ("view_as_float")."""
    tensor, row = parts.tensors[name], shape[1] * {"U8": 1, "I32": 4}[kind]
    floats = tuple(other for other, size in _FLOATS.items() if row % size == 0)
    parts.need(name, (kind, *floats), shape, *((shape[0], row // _FLOATS[other]) for other in floats), beside=name)
    if tensor.nbytes != shape[0] * row:
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected {kind} {list(shape)}")
    return Tensor(name, shape, TYPES[kind], tensor.read)


def _shape(parts: StoredParts, stem: str, name: str) -> tuple[int, int]:
    found = integers(parts.need(f"{stem}shape", ("I64", "I32"), (2,), beside=name))
    n, k = (int(size) for size in found)
    if not (0 < n < 1 << 40 and 0 < k < 1 << 40):
        raise parts.fail(f"{stem}shape", f"is {n} x {k}, which is no shape of a matrix")
    return n, k


def _number(parts: StoredParts, name: str, usual: int) -> int:
    tensor = parts.tensors.get(name)
    if tensor is None or tensor.type.name not in ("I32", "I64", "U8"):
        return usual
    if tensor.rows * tensor.columns != 1:
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected one number")
    return int(integers(tensor).reshape(-1)[0])


def _code_rows(words: Tensor, bits: int, begin: int, end: int) -> np.ndarray:
    """Codes of rows begin .. end of the group matrix."""
    stored, packed, each = words.rows, integers(words), 10 if bits == 3 else 8 // bits
    pieces = []
    for part in range(each):
        low, high = max(begin, part * stored), min(end, (part + 1) * stored)
        if low < high:
            some = packed[low - part * stored:high - part * stored] >> (each - 1 - part) * bits
            pieces.append((some & ((1 << bits) - 1)).astype(np.uint8))
    return np.concatenate(pieces)


def _some(tensor: Tensor, begin: int, end: int) -> np.ndarray:
    """Elements begin .. end of a flattened tensor, float32."""
    width = tensor.type.row_bytes(1)
    return to_f32(stored_bytes(tensor)[None, begin * width:end * width], tensor.type.name)[0]


def _by_rows(words: Tensor, scales: Tensor, zeros: Tensor, grid: tuple[int, int], bits: int, k: int, axis: int):
    """Reader of rows of K weights that are a whole number of groups."""
    groups = k // grid[1]

    def rows(begin: int, end: int) -> CodedRows:
        first, last = begin * groups, end * groups
        codes = _code_rows(words, bits, first, last).reshape(-1, k)
        own = (_some(tensor, first, last).reshape(-1, groups) for tensor in (scales, zeros))
        return CodedRows(codes, *own)

    return rows


def _by_weight(words: Tensor, scales: Tensor, zeros: Tensor, grid: tuple[int, int], bits: int, k: int, axis: int):
    """Reader of rows of K weights in other cases: a scale and a zero point per weight."""
    def rows(begin: int, end: int) -> CodedRows:
        first, last, width = begin * k, end * k, grid[1]
        from_row = first // width
        codes = _code_rows(words, bits, from_row, -(-last // width)).reshape(-1)[first - from_row * width:]
        index = np.arange(first, last)
        group = index // width if axis else index % width
        own = (scale_values(tensor).reshape(-1)[group].reshape(-1, k) for tensor in (scales, zeros))
        return CodedRows(codes[:last - first].reshape(-1, k), *own)

    return rows
