"""Slices of weights: rows, columns or experts of a matrix, as selections of stored rows and columns.

Nothing is computed or re-quantised: a slice lists row indices of checkpoint tensors, and a column range at block
boundaries.
"""

import math
from dataclasses import replace

import numpy as np

from numflow.errors import NetworkError
from numflow.formats.types import tensor_type
from numflow.ops import Part, Weight

_OPERAND_UNIT = 32  # columns per scale of quantised activations: cuts at multiples keep results the same


def column_unit(weight: Weight) -> int:
    """Columns of this matrix can be cut at multiples of this unit; 0 if rows cannot be cut."""
    if weight.normalize_rows:
        return 0
    blocks = [tensor_type(name).block for name in weight.types]
    return math.lcm(*blocks, _OPERAND_UNIT) if any(block > 1 for block in blocks) else 1


def rows_of(weight: Weight, begin: int, end: int) -> Weight:
    """Rows begin .. end - 1 of a matrix, or elements of a vector."""
    if (begin, end) == (0, weight.shape[0]):
        return weight
    name, shape = f"{weight.name}[{begin}:{end}]", (end - begin, *weight.shape[1:])
    if weight.constant is not None:
        return replace(weight, name=name, shape=shape, constant=weight.constant[begin:end])
    parts, types, offset = [], [], 0
    for part, type_name, count in zip(weight.parts, weight.types, _row_counts(weight), strict=True):
        first, last = max(begin - offset, 0), min(end - offset, count)
        offset += count
        if first < last:
            if part.turned and (first, last) != (0, count):
                raise NetworkError(f"weight {weight.name!r}: rows {begin} .. {end - 1} cut a matrix that is turned")
            chosen = part.rows if part.turned else (range(count) if part.rows is None else part.rows)[first:last]
            parts.append(replace(part, rows=chosen))
            types.append(type_name)
    return replace(weight, name=name, shape=shape, parts=tuple(parts), types=tuple(types))


def columns_of(weight: Weight, begin: int, end: int) -> Weight:
    """Columns begin .. end - 1 of a matrix."""
    if (begin, end) == (0, weight.shape[1]):
        return weight
    name, shape = f"{weight.name}[:, {begin}:{end}]", (weight.shape[0], end - begin)
    if weight.constant is not None:
        return replace(weight, name=name, shape=shape, constant=np.ascontiguousarray(weight.constant[:, begin:end]))
    return replace(weight, name=name, shape=shape, parts=tuple(_columns_of(part, begin, end) for part in weight.parts))


def experts_of(weight: Weight, begin: int, end: int) -> Weight:
    """Matrices (or vectors) begin .. end - 1 of a stack."""
    size = weight.shape[0] // weight.groups
    if weight.project:
        columns, shape = range(begin * weight.shape[1], end * weight.shape[1]), ((end - begin) * size, weight.shape[1])
        parts = tuple(replace(part, rows=columns) if role in ("matrix", "bias") else part
                      for role, part in zip(weight.project, weight.parts, strict=True))
        return replace(weight, name=f"{weight.name}[{begin}:{end}]", shape=shape, parts=parts, groups=end - begin)
    return replace(rows_of(weight, begin * size, end * size), groups=end - begin)


def _columns_of(part: Part, begin: int, end: int) -> Part:
    offset = part.columns[0] if part.columns else 0
    return replace(part, columns=(offset + begin, offset + end))


def _row_counts(weight: Weight) -> list[int]:
    """Number of rows of each part. Whole or transposed tensors share the rest of the rows equally."""
    known = [None if part.rows is None or part.turned else len(part.rows) for part in weight.parts]
    left = weight.shape[0] - sum(count for count in known if count is not None)
    each = left // max(1, known.count(None))
    return [each if count is None else count for count in known]
