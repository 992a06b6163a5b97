"""torchao: NAME._weight_qdata has the codes, with _weight_scale and similar tensors.

    I8 or F8 (N, K)   as NAME.weight in other formats
    I8 (N, K / 2)     signed 4-bit integers, low nibble first; scales and zeros (K / g, N) are floats, and
                      w = code * scale + zero
    U8 (N, K / 2)     E2M1 values; scales per 16 columns are E4M3, per 32 powers of two

Scales of E2M1, and power-of-two scales of FP8, may be swizzled for tensor cores, in tiles of 128 rows and 4 groups: row
r, group g of a tile is byte r % 32 * 16 + r // 32 * 4 + g.
"""

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.beside import eight_bits, low_first, scales_of_eight_bits, two_in_a_byte
from numflow.formats.quantised.coded import CodedMatrix, CodedRows, zeros_of
from numflow.formats.quantised.grid import scale_grid
from numflow.formats.quantised.parts import FLOATS8, POWERS, SCALES, STEPS, StoredParts, stored_bytes
from numflow.formats.types import TYPES


def torchao(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME._weight_qdata.

    Raises:
        FormatError: types and shapes do not fit.
    """
    stem, _, last = name.removesuffix("_qdata").rpartition(".")
    beside, plain = f"{stem}._{last.removeprefix('_')}", f"{stem}.{last.removeprefix('_')}"
    zeros = parts.get(f"{beside}_zero_point")
    if zeros is not None and zeros.type.name in SCALES:
        return _four_bits(parts, plain, name, f"{beside}_scale", zeros)
    if parts.tensors[name].type.name == "I32":
        raise parts.fail(name, f"is I32 {show(list(parts.tensors[name].shape))}: codes of 4 bits in the tiles or words "
                               f"of a device are not read, plain ones are")
    tensor = parts.need(name, (*FLOATS8, "I8", "U8"), beside=name)
    types = (*SCALES, *STEPS) if tensor.type.name == "U8" else scales_of_eight_bits(tensor)
    scale = parts.need(f"{beside}_scale", types, beside=name)
    if tensor.type.name == "U8":
        size = 32 if scale.type.name in POWERS else 16
        return two_in_a_byte(parts, plain, tensor, _plain_scale(scale, tensor.rows, -(-2 * tensor.columns // size)))
    if scale.type.name in POWERS:
        scale = _plain_scale(scale, tensor.rows, -(-tensor.columns // 32))
    return eight_bits(parts, plain, tensor, scale, zeros)


def _plain_scale(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Scales [rows, groups] from swizzled tiles; unchanged if their shape is not that of tiles."""
    down, along = -(-rows // 128), -(-groups // 4)
    if scale.shape != (32 * down, 16 * along) or scale.type.name not in STEPS:
        return scale

    def read() -> np.ndarray:
        tiles = stored_bytes(scale).reshape(down, along, 32, 4, 4)
        found = tiles.transpose(0, 3, 2, 1, 4).reshape(128 * down, 4 * along)[:rows, :groups]
        return np.ascontiguousarray(found)

    return Tensor(scale.name, (rows, groups), TYPES[scale.type.name], read)


def _four_bits(parts: StoredParts, plain: str, name: str, scale_name: str, zeros: Tensor) -> CodedMatrix:
    tensor = parts.need(name, ("I8", "U8"), beside=name)
    if len(tensor.shape) < 2:
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected two dimensions")
    *lead, n, half = tensor.shape
    scale = parts.need(scale_name, SCALES, beside=name)
    groups = scale.shape[-2] if len(scale.shape) == len(tensor.shape) else 0
    if scale.shape != (*lead, groups, n) or not groups or 2 * half % groups:
        raise parts.fail(scale.name, f"is {scale.type.name} {show(list(scale.shape))}, expected "
                                     f"{[*lead, 'G', n]} with a G that divides {2 * half} columns")
    parts.need(zeros.name, SCALES, scale.shape, beside=name)
    shape = (*lead, n, 2 * half)
    grids = [scale_grid(parts, Tensor(part.name, (*lead, n, groups), part.type, part.read), shape,
                        lambda _, part=part: np.ascontiguousarray(part.f32().swapaxes(-1, -2)))
             for part in (scale, zeros)]

    def rows(begin: int, end: int) -> CodedRows:
        codes = low_first(tensor.raw()[begin:end] ^ np.uint8(0x88))
        own, other = (grid.rows(begin, end) for grid in grids)
        return CodedRows(codes, *zeros_of(own, other, 8))

    return CodedMatrix(plain, shape, rows, 4, "F32", 2 * half // groups, zero_type="F32", turned=not lead,
                       sources=(tensor,))
