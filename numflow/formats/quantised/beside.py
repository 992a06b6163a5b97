"""Matrices of 8-bit values or packed 4-bit floats with scales in separate tensors: FP8 and INT8 checkpoints,
compressed-tensors, ModelOpt, Quark.

    NAME.weight F8 or I8 (N, K)           with NAME.weight_scale, weight_scale_inv or scale; I8 in FP8 checkpoints is
    like U8 NAME.weight_packed I32                integers, lowest bits first along the inputs, with weight_shape
    NAME.weight_packed or weight, U8      E2M1 values, low nibble first, with scales per 16 or 32 columns; or E2M3 in 6
                                          bits; or 4-bit integers, two rows in one (ModelOpt's AWQ)
    NAME_blocks U8 (..., 16)              E2M1 values in blocks of 32, with NAME_scales

Values are multiplied by the scale, whatever its name, but divided by a weight_global_scale.
"""

import math

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.coded import E2M1, CodedMatrix, CodedRows
from numflow.formats.quantised.grid import scale_grid
from numflow.formats.quantised.parts import (
    FLOATS8,
    POWERS,
    SCALES,
    STEPS,
    WORDS,
    StoredParts,
    integers,
    scale_values,
    stored_bytes,
)
from numflow.formats.quantised.words import Packing, of_bits, packing_of, unpacked_stream
from numflow.formats.types import TYPES, to_f32

# Values of 6-bit codes: sign, 2 bits of exponent, 3 of mantissa.
_E2M3 = np.array([m / 8 for m in range(8)] + [(1 + m / 8) * 2**e for e in range(3) for m in range(8)], np.float32)
_E2M3 = np.concatenate([_E2M3, -_E2M3])


def scale_of(name: str) -> tuple[str, ...]:
    """Possible names of a matrix's scales."""
    last = f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else f"{name}_weight_scale"
    return f"{name}_scale_inv", f"{name}_scale", last


def scaled(parts: StoredParts, name: str) -> CodedMatrix:
    """A matrix of 8-bit values, or of two E2M1 values per byte, with scales.

    Raises:
        FormatError: scales are missing or do not fit.
    """
    tensor = parts.tensors[name]
    found = next((other for other in scale_of(name) if other in parts.tensors), None)
    if found is None:
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))} without scales; expected "
                               f"{' or '.join(show(other) for other in scale_of(name))} beside it")
    if tensor.type.name == "U8":
        scale, rows = parts.tensors[found], 2 * tensor.shape[-2]
        if scale.type.name in SCALES and scale.shape[:-1] == (*tensor.shape[:-2], rows):
            return two_rows_in_a_byte(parts, name, parts.need(found, SCALES, beside=name))
        return two_in_a_byte(parts, name, tensor, parts.need(found, STEPS, beside=name))
    if tensor.type.name == "I8" and parts.method.name == "fp8" and len(tensor.shape) > 1:
        return _fours_of_fp8(parts, Tensor(name, tensor.shape, TYPES["U8"], tensor.read), found)
    tensor = parts.need(name, (*FLOATS8, "I8"), beside=name)
    scale = parts.need(found, scales_of_eight_bits(tensor), beside=name)
    return eight_bits(parts, name, tensor, scale, parts.get(f"{name}_zero_point"))


def scales_of_eight_bits(tensor: Tensor) -> tuple[str, ...]:
    """Allowed types of scales for a matrix of 8-bit floats or integers."""
    return (*SCALES, *POWERS) if tensor.type.name in FLOATS8 else SCALES


def eight_bits(parts: StoredParts, name: str, tensor: Tensor, scale: Tensor, zeros: Tensor | None) -> CodedMatrix:
    """A matrix of 8-bit floats or integers."""
    if len(tensor.shape) < 2:
        raise parts.fail(tensor.name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected two dimensions")
    grid = scale_grid(parts, scale, tensor.shape)
    kind = "E8M0" if scale.type.name in POWERS else scale.type.name
    if tensor.type.name in FLOATS8:
        if zeros is not None and stored_bytes(zeros).any():
            raise parts.fail(zeros.name, f"is not 0, which {tensor.type.name} weights have no zeros but")

        def floats8(begin: int, end: int) -> CodedRows:
            return CodedRows(tensor.raw()[begin:end], grid.rows(begin, end))

        table = to_f32(np.arange(256, dtype=np.uint8)[None], tensor.type.name)[0]
        return CodedMatrix(name, tensor.shape, floats8, 8, kind, grid.group, None, table,
                           tensor.type.name.lower().removeprefix("f8_"), sources=(tensor,))
    zero_grid, zero_type = None, "U8"
    if zeros is not None and zeros.shape == scale.shape and zeros.type.name in ("I8", "I32", *SCALES):
        values = (lambda tensor: integers(tensor).astype(np.float32)) if zeros.type.name[0] == "I" else scale_values
        zero_grid = scale_grid(parts, zeros, tensor.shape, values) if values(zeros).any() else None
        zero_type = _type_of(values(zeros) + np.float32(128))
    elif zeros is not None:
        raise parts.fail(zeros.name, f"is {zeros.type.name} {show(list(zeros.shape))}, expected I8 {list(scale.shape)}")

    def integers8(begin: int, end: int) -> CodedRows:
        codes = tensor.raw()[begin:end] ^ np.uint8(128)
        return CodedRows(codes, grid.rows(begin, end),
                         None if zero_grid is None else zero_grid.rows(begin, end) + np.float32(128))

    return CodedMatrix(name, tensor.shape, integers8, 8, kind, grid.group, 128 if zero_grid is None else None,
                       zero_type=zero_type, sources=(tensor,))


def packed(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight_packed: integers in 32-bit words, or E2M1 values in bytes."""
    plain = name.removesuffix("_packed")
    words = parts.need(name, (*WORDS, "U8"), beside=name)
    if words.type.name == "U8":
        scale = parts.tensors.get(f"{plain}_scale")
        sixes = scale is not None and len(words.shape) > 1 and scale.columns * 96 == words.columns * 4
        if sixes:
            return _four_in_three(parts, plain, name, f"{plain}_scale")
        return two_in_a_byte(parts, plain, words, parts.need(f"{plain}_scale", STEPS, beside=name))
    said = parts.need(f"{plain}_shape", ("I64", "I32"), (2,), (3,), beside=name)
    *lead, n, k = shape = tuple(int(size) for size in integers(said))
    fits = 0 < k < 1 << 40 and words.shape == (*lead, n, words.columns)
    packing = packing_of(k, words.columns, parts.method.bits, parts.method.dense) if fits else None
    if packing is None:
        raise parts.fail(name, f"is {words.type.name} {show(list(words.shape))}, which holds no "
                               f"{' x '.join(map(str, shape))} codes{of_bits(parts.method.bits)}, as weight_shape says")
    scale = parts.need(f"{plain}_scale", SCALES, beside=name)
    grid = scale_grid(parts, scale, shape)
    zeros, order = _packed_zeros(parts, plain, scale, packing, shape), None
    if f"{plain}_g_idx" in parts.tensors or (parts.method.by_index and scale.columns > 1):
        index = parts.need(f"{plain}_g_idx", ("I32", "I64"), (k,), beside=name)
        found = integers(index)
        if int(found.min()) < 0 or int(found.max()) >= scale.columns:
            raise parts.fail(index.name, f"has groups {int(found.min())} .. {int(found.max())}, expected 0 .. "
                                         f"{scale.columns - 1}, as weight_scale {list(scale.shape)} has")
        order = None if bool((found == np.arange(k) // grid.group).all()) else lambda: integers(index)

    def rows(begin: int, end: int) -> CodedRows:
        some = integers(words).reshape(-1, words.columns)[begin:end]
        return CodedRows(packing.codes(some, k), grid.rows(begin, end), None if zeros is None else zeros[begin:end])

    return CodedMatrix(plain, shape, rows, packing.bits, scale.type.name, grid.group,
                       1 << packing.bits - 1 if zeros is None else None, order=order, turned=not lead, sources=(words,),
                       zero_type="" if zeros is None else _type_of(zeros))


def _type_of(zeros: np.ndarray) -> str:
    """The type that zeros fit, as of CodedMatrix."""
    return "U8" if bool(((zeros >= 0) & (zeros <= 255) & (zeros == np.floor(zeros))).all()) else "F32"


def _packed_zeros(parts: StoredParts, plain: str, scale: Tensor, packing: Packing,
                  shape: tuple[int, ...]) -> np.ndarray | None:
    """Zero points f32 [rows, groups]: signed integers, or packed along the outputs like codes."""
    if f"{plain}_zero_point" not in parts.tensors:
        return None
    *lead, n, _ = shape
    groups = scale.columns if len(scale.shape) == len(shape) else 1
    width = packing.width(n)
    zeros = parts.need(f"{plain}_zero_point", ("I32", "I8"), (*lead, width, groups), scale.shape, beside=scale.name)
    found, middle = integers(zeros), 1 << packing.bits - 1
    if zeros.type.name == "I8" or zeros.shape != (*lead, width, groups):
        grid = scale_grid(parts, zeros, shape, lambda tensor: integers(tensor).astype(np.float32))
        return grid.rows(0, math.prod(shape[:-1])) + np.float32(middle)
    turned = np.ascontiguousarray(found.swapaxes(-1, -2)).reshape(-1, width)
    codes = packing.codes(turned, n).reshape(*lead, groups, n).swapaxes(-1, -2)
    return np.ascontiguousarray(codes, np.float32).reshape(-1, groups)


def two_in_a_byte(parts: StoredParts, plain: str, tensor: Tensor, scale: Tensor) -> CodedMatrix:
    """E2M1 values with scales per 16 columns (8-bit floats, and a global scale) or per 32 (powers of two).

    A stack of experts may be transposed, [E, K / 2, N] with scales [E, K / 16, N].
    """
    if len(tensor.shape) < 2 or scale.type.name not in STEPS:
        raise parts.fail(tensor.name, f"is {tensor.type.name} {show(list(tensor.shape))} with scales in "
                                      f"{scale.type.name}, expected two dimensions and {' or '.join(STEPS)}")
    powers = scale.type.name in POWERS
    size = 32 if powers else 16
    *lead, n, k = tensor.shape
    turned = bool(lead) and not powers and scale.shape == (*lead, n // 8, k) and n % 8 == 0
    shape = (*lead, k, 2 * n) if turned else (*lead, n, 2 * k)
    if not turned and (scale.shape[:-1] != shape[:-1] or scale.columns * size != shape[-1]):
        raise parts.fail(scale.name, f"is {scale.type.name} {show(list(scale.shape))}, expected {[*shape[:-1]]} rows "
                                     f"with a scale for each {size} of {shape[-1]} columns")
    if powers:
        return _powers(parts, plain, tensor, shape, scale)
    factors = _factors(parts, plain, math.prod(lead), tensor.name)

    def rows(begin: int, end: int) -> CodedRows:
        index = np.arange(begin, end)
        row_factors = factors[index // shape[-2]] if len(factors) > 1 else np.repeat(factors, end - begin)
        if turned:
            some, steps = (np.reshape(part.raw(), (-1, *part.shape[-2:]))[index // k, :, index % k]
                           for part in (tensor, scale))
        else:
            some, steps = tensor.raw()[begin:end], scale.raw()[begin:end]
        return CodedRows(low_first(some), row_factors[:, None], steps=steps)

    return CodedMatrix(plain, shape, rows, 4, "F8_E4M3", 16, None, E2M1, "e2m1", turned=turned, sources=(tensor,))


def _fours_of_fp8(parts: StoredParts, tensor: Tensor, scale_name: str) -> CodedMatrix:
    """E2M1 values, low nibble first, with scales per 32 columns: experts in FP8 checkpoints (`expert_dtype` fp4)."""
    shape = (*tensor.shape[:-1], 2 * tensor.columns)
    scale = parts.need(scale_name, (*SCALES, *POWERS), (*shape[:-1], -(-shape[-1] // 32)), beside=tensor.name)
    if scale.type.name in POWERS:
        return two_in_a_byte(parts, tensor.name, tensor, scale)
    grid = scale_grid(parts, scale, shape)

    def rows(begin: int, end: int) -> CodedRows:
        return CodedRows(low_first(tensor.raw()[begin:end]), grid.rows(begin, end))

    return CodedMatrix(tensor.name, shape, rows, 4, scale.type.name, grid.group, None, E2M1, "e2m1", sources=(tensor,))


def _four_in_three(parts: StoredParts, plain: str, name: str, scale_name: str) -> CodedMatrix:
    """E2M3 values of 6 bits, lowest bits first, with power-of-two scales per 32 columns."""
    tensor = parts.need(name, ("U8",), beside=name)
    shape = (*tensor.shape[:-1], tensor.columns // 3 * 4)
    scale = parts.need(scale_name, POWERS, (*shape[:-1], shape[-1] // 32), beside=name)
    grid = scale_grid(parts, scale, shape)

    def rows(begin: int, end: int) -> CodedRows:
        return CodedRows(unpacked_stream(tensor.raw()[begin:end], 6, shape[-1]), grid.rows(begin, end))

    return CodedMatrix(plain, shape, rows, 6, "E8M0", 32, None, _E2M3, sources=(tensor,))


def two_rows_in_a_byte(parts: StoredParts, name: str, scale: Tensor) -> CodedMatrix:
    """Signed 4-bit integers: row 2r in the low nibbles of byte row r, row 2r + 1 in the high nibbles."""
    tensor = parts.need(name, ("U8",), beside=name)
    shape = (*tensor.shape[:-2], 2 * tensor.shape[-2], tensor.columns)
    grid = scale_grid(parts, scale, shape)
    parts.get(f"{name}_scale_2")  # scale for FP8 products, not needed here

    def rows(begin: int, end: int) -> CodedRows:
        index = np.arange(begin, end)
        codes = tensor.raw()[index // 2] >> (index % 2 * 4).astype(np.uint8)[:, None] & 15
        return CodedRows(codes ^ np.uint8(8), grid.rows(begin, end))

    return CodedMatrix(name, shape, rows, 4, scale.type.name, grid.group, 8, sources=(tensor,))


def _factors(parts: StoredParts, plain: str, matrices: int, name: str) -> np.ndarray:
    """Global scale, f32 [1], or one per matrix of a stack."""
    ways = ((1,), (), (matrices,), (matrices, 1), (matrices, 1, 1))
    if parts.method.name == "mlx":
        return np.ones(1, np.float32)
    if name.endswith("_qdata"):  # torchao: optional
        found = f"{name.removesuffix('_qdata')}_per_tensor_scale"
        if found not in parts.tensors:
            return np.ones(1, np.float32)
        return parts.need(found, ("F32",), *ways, beside=name).f32().reshape(-1)
    if f"{plain}_global_scale" in parts.tensors:
        stored = parts.need(f"{plain}_global_scale", ("F32",), *ways, beside=name).f32().reshape(-1)
        with np.errstate(all="ignore"):  # zeros and NaN are the file's values
            return 1 / stored
    other = f"{plain}_weight_scale_2"
    found = other if other in parts.tensors else f"{plain}_scale_2"
    return parts.need(found, ("F32",), *ways, beside=name).f32().reshape(-1)


def low_first(data: np.ndarray) -> np.ndarray:
    """Unpack 4-bit codes of bytes [n, K / 2] to u8 [n, K], low nibble first."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def blocks(parts: StoredParts, name: str) -> CodedMatrix:
    """The stack of NAME_blocks U8 [..., N, K / 32, 16] and NAME_scales [..., N, K / 32]."""
    plain = name.removesuffix("_blocks")
    tensor = parts.need(name, ("U8",), beside=name)
    if len(tensor.shape) < 3 or tensor.columns != 16:
        raise parts.fail(name, f"is U8 {show(list(tensor.shape))}, expected rows of blocks of 16 bytes")
    scale = parts.need(f"{plain}_scales", POWERS, tensor.shape[:-1], beside=name)
    shape = (*tensor.shape[:-2], 32 * tensor.shape[-2])
    return _powers(parts, plain, tensor, shape, scale, turned=True)


def _powers(parts: StoredParts, plain: str, tensor: Tensor, shape: tuple[int, ...], scale: Tensor,
            turned: bool = False) -> CodedMatrix:
    units = shape[-1] // 32

    def rows(begin: int, end: int) -> CodedRows:
        exponents = stored_bytes(scale).reshape(-1, units)[begin:end]
        if (exponents == 255).any():
            raise parts.fail(scale.name, "has a scale of 255, which is NaN")
        data = stored_bytes(tensor).reshape(-1, 16 * units)[begin:end]
        return CodedRows(low_first(data), np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))

    return CodedMatrix(plain, shape, rows, 4, "E8M0", 32, None, E2M1, "e2m1", turned=turned, sources=(tensor,))
