"""BitNet: NAME.weight U8 (N / 4, K) packs four rows, the first quarter of all rows in the lowest bits, with one scale
NAME.weight_scale. Codes 0, 1, 2 stand for -1, 0, 1. Weights are divided by the scale; with linear_class autobitlinear,
multiplied.
"""

import numpy as np

from numflow.formats.mapped import show
from numflow.formats.quantised.coded import CodedMatrix, CodedRows
from numflow.formats.quantised.parts import SCALES, StoredParts


def bitnet(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight.

    Raises:
        FormatError: the scale is missing; or, when rows are read, a code is 3.
    """
    tensor = parts.need(name, ("U8",), beside=name)
    if len(tensor.shape) != 2:
        raise parts.fail(name, f"is U8 {show(list(tensor.shape))}, expected two dimensions")
    quarter, k = tensor.shape
    scale = parts.need(f"{name}_scale", SCALES, (1,), (), beside=name)
    multiplied = parts.method.settings.get("linear_class") == "autobitlinear"

    def rows(begin: int, end: int) -> CodedRows:
        index = np.arange(begin, end)
        codes = tensor.raw()[index % quarter] >> (index // quarter * 2).astype(np.uint8)[:, None] & 3
        if (codes == 3).any():
            raise parts.fail(name, "has a code of 3, expected 0, 1 and 2")
        value = scale.f32().reshape(1, 1)
        with np.errstate(all="ignore"):  # a scale of 0 is the file's value
            return CodedRows(codes, np.repeat(value if multiplied else 1 / value, end - begin, axis=0))

    return CodedMatrix(name, (4 * quarter, k), rows, 2, "F32", k, 1, turned=True, sources=(tensor,))
