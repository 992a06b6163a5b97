"""Matrices of 8-bit numbers or packed 4-bit floats whose scales lie beside them, as FP8 and INT8 checkpoints,
compressed-tensors, ModelOpt and torchao store them.

    NAME.weight F8 or I8 (N, K)           with NAME.weight_scale, weight_scale_inv or scale
    NAME.weight_packed I32                integers, lowest bits first along the inputs, with weight_shape
    NAME.weight_packed or weight, U8      E2M1 numbers, low nibble first, with scales of 16 or 32 columns
    NAME._weight_qdata                    as NAME.weight, torchao's
    NAME_blocks U8 (..., 16)              E2M1 numbers in blocks of 32, with NAME_scales

Numbers are multiplied with the scale, whatever it is called; but a weight_global_scale divides.
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
    WORDS,
    StoredParts,
    integers,
    scale_values,
    stored_bytes,
)
from numflow.formats.quantised.words import Packing, packing_of
from numflow.formats.types import to_f32


def scale_of(name: str) -> tuple[str, ...]:
    """Names that the scales of a matrix may have."""
    return f"{name}_scale_inv", f"{name}_scale", *([f"{name.removesuffix('weight')}scale"]
                                                   if name.endswith(".weight") else [])


def scaled(parts: StoredParts, name: str) -> CodedMatrix:
    """A matrix of 8-bit numbers, or of two E2M1 in a byte, with scales.

    Raises:
        FormatError: there are none, or they do not fit.
    """
    tensor = parts.tensors[name]
    found = next((other for other in scale_of(name) if other in parts.tensors), None)
    if found is None:
        raise parts.fail(name, f"is {tensor.type.name} {show(list(tensor.shape))} without scales; expected "
                               f"{' or '.join(show(other) for other in scale_of(name))} beside it")
    if tensor.type.name == "U8":
        return _two_in_a_byte(parts, name, name, found)
    zeros = parts.get(f"{name}_zero_point")
    return eight_bits(parts, name, parts.need(name, (*FLOATS8, "I8"), beside=name), found, zeros)


def eight_bits(parts: StoredParts, name: str, tensor: Tensor, scale_name: str, zeros: Tensor | None) -> CodedMatrix:
    """A matrix of 8-bit floats or whole numbers."""
    if len(tensor.shape) < 2:
        raise parts.fail(tensor.name, f"is {tensor.type.name} {show(list(tensor.shape))}, expected two dimensions")
    powers = POWERS if tensor.type.name in FLOATS8 else ()
    scale = parts.need(scale_name, (*SCALES, *powers), beside=tensor.name)
    grid = scale_grid(parts, scale, tensor.shape)
    kind = "E8M0" if scale.type.name in POWERS else scale.type.name
    if tensor.type.name in FLOATS8:
        def floats8(begin: int, end: int) -> CodedRows:
            return CodedRows(tensor.raw()[begin:end], grid.rows(begin, end))

        table = to_f32(np.arange(256, dtype=np.uint8)[None], tensor.type.name)[0]
        return CodedMatrix(name, tensor.shape, floats8, 8, kind, grid.group, None, table,
                           tensor.type.name.lower().removeprefix("f8_"), sources=(tensor,))
    zero_grid, zero_type = None, "U8"
    if zeros is not None and zeros.shape == scale.shape and zeros.type.name in ("I8", "I32", *SCALES):
        own = (lambda tensor: integers(tensor).astype(np.float32)) if zeros.type.name[0] == "I" else scale_values
        zero_grid = scale_grid(parts, zeros, tensor.shape, own) if own(zeros).any() else None
        zero_type = _type_of(own(zeros) + np.float32(128))
    elif zeros is not None:
        raise parts.fail(zeros.name, f"is {zeros.type.name} {show(list(zeros.shape))}, expected I8 {list(scale.shape)}")

    def integers8(begin: int, end: int) -> CodedRows:
        codes = tensor.raw()[begin:end] ^ np.uint8(128)
        return CodedRows(codes, grid.rows(begin, end),
                         None if zero_grid is None else zero_grid.rows(begin, end) + np.float32(128))

    return CodedMatrix(name, tensor.shape, integers8, 8, kind, grid.group, 128 if zero_grid is None else None,
                       zero_type=zero_type, sources=(tensor,))


def torchao(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME._weight_qdata."""
    stem, _, last = name.removesuffix("_qdata").rpartition(".")
    beside = f"{stem}._{last.removeprefix('_')}"
    tensor = parts.need(name, (*FLOATS8, "I8"), beside=name)
    return eight_bits(parts, f"{stem}.{last.removeprefix('_')}", tensor, f"{beside}_scale",
                      parts.get(f"{beside}_zero_point"))


def packed(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight_packed: whole numbers in words, or E2M1 in bytes."""
    plain = name.removesuffix("_packed")
    words = parts.need(name, (*WORDS, "U8"), beside=name)
    if words.type.name == "U8":
        return _two_in_a_byte(parts, plain, name, f"{plain}_scale")
    said = parts.need(f"{plain}_shape", ("I64", "I32"), (2,), beside=name)
    n, k = (int(size) for size in integers(said))
    fits = 0 < k < 1 << 40 and words.shape == (n, words.columns)
    packing = packing_of(k, words.columns, parts.method.bits, parts.method.dense) if fits else None
    if packing is None:
        raise parts.fail(name, f"is {words.type.name} {show(list(words.shape))}, which holds no {n} x {k} codes, as "
                               f"weight_shape says")
    scale = parts.need(f"{plain}_scale", SCALES, beside=name)
    grid = scale_grid(parts, scale, (n, k))
    zeros, order = _packed_zeros(parts, plain, scale, packing, (n, k)), None
    if f"{plain}_g_idx" in parts.tensors:
        index = parts.need(f"{plain}_g_idx", ("I32", "I64"), (k,), beside=name)
        found = integers(index)
        if int(found.min()) < 0 or int(found.max()) >= scale.columns:
            raise parts.fail(index.name, f"has groups {int(found.min())} .. {int(found.max())}, expected 0 .. "
                                         f"{scale.columns - 1}, as weight_scale {list(scale.shape)} has")
        order = None if bool((found == np.arange(k) // grid.group).all()) else lambda: integers(index)

    def rows(begin: int, end: int) -> CodedRows:
        return CodedRows(packing.codes(integers(words)[begin:end], k), grid.rows(begin, end),
                         None if zeros is None else zeros[begin:end])

    return CodedMatrix(plain, (n, k), rows, packing.bits, scale.type.name, grid.group,
                       1 << packing.bits - 1 if zeros is None else None, order=order, turned=True, sources=(words,),
                       zero_type="" if zeros is None else _type_of(zeros))


def _type_of(zeros: np.ndarray) -> str:
    """The type that zeros fit, as of CodedMatrix."""
    return "U8" if bool(((zeros >= 0) & (zeros <= 255) & (zeros == np.floor(zeros))).all()) else "F32"


def _packed_zeros(parts: StoredParts, plain: str, scale: Tensor, packing: Packing,
                  shape: tuple[int, int]) -> np.ndarray | None:
    """Zeros f32 [N, groups]: whole numbers with a sign, or packed along the outputs as codes are."""
    if f"{plain}_zero_point" not in parts.tensors:
        return None
    groups = scale.columns if len(scale.shape) == 2 else 1
    width = packing.width(shape[0])
    zeros = parts.need(f"{plain}_zero_point", ("I32", "I8"), (width, groups), scale.shape, beside=scale.name)
    found, middle = integers(zeros).reshape(-1, groups), 1 << packing.bits - 1
    if zeros.type.name == "I8" or zeros.shape != (width, groups):
        return np.broadcast_to(found.astype(np.float32) + middle, (shape[0], groups))
    return np.ascontiguousarray(packing.codes(np.ascontiguousarray(found.T), shape[0]).T, np.float32)


def _two_in_a_byte(parts: StoredParts, plain: str, name: str, scale_name: str) -> CodedMatrix:
    """E2M1 numbers with scales of 16 columns (8-bit floats, with one more for all) or 32 (powers of two)."""
    tensor = parts.need(name, ("U8",), beside=name)
    if len(tensor.shape) < 2:
        raise parts.fail(name, f"is U8 {show(list(tensor.shape))}, expected two dimensions")
    shape = (*tensor.shape[:-1], 2 * tensor.columns)
    scale = parts.need(scale_name, ("F8_E4M3", *POWERS), (*shape[:-1], -(-shape[-1] // 16)),
                       (*shape[:-1], -(-shape[-1] // 32)), beside=name)
    powers = scale.type.name in POWERS
    size = 32 if powers else 16
    if scale.columns * size != shape[-1]:
        raise parts.fail(scale_name, f"is {scale.type.name} {list(scale.shape)}, expected a scale for each {size} of "
                                     f"{shape[-1]} columns")
    if powers:
        return _powers(parts, plain, tensor, shape, scale)
    factors = _factors(parts, plain, math.prod(shape[:-2]), name)

    def rows(begin: int, end: int) -> CodedRows:
        every = factors[np.arange(begin, end) // shape[-2]] if len(factors) > 1 else np.repeat(factors, end - begin)
        return CodedRows(_low_first(tensor.raw()[begin:end]), every[:, None], steps=scale.raw()[begin:end])

    return CodedMatrix(plain, shape, rows, 4, "F8_E4M3", 16, None, E2M1, "e2m1", sources=(tensor,))


def _factors(parts: StoredParts, plain: str, matrices: int, name: str) -> np.ndarray:
    """Factors of all scales, f32 [1] or one for each matrix of a stack."""
    ways = ((1,), (), (matrices,), (matrices, 1), (matrices, 1, 1))
    if f"{plain}_global_scale" in parts.tensors:
        stored = parts.need(f"{plain}_global_scale", ("F32",), *ways, beside=name).f32().reshape(-1)
        with np.errstate(all="ignore"):  # zeros and what is no number are the file's values
            return 1 / stored
    return parts.need(f"{plain}_scale_2", ("F32",), *ways, beside=name).f32().reshape(-1)


def _low_first(data: np.ndarray) -> np.ndarray:
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
            raise parts.fail(scale.name, "has a scale of 255, which stands for no number")
        data = stored_bytes(tensor).reshape(-1, 16 * units)[begin:end]
        return CodedRows(_low_first(data), np.ldexp(np.float32(1), exponents.astype(np.int32) - 127))

    return CodedMatrix(plain, shape, rows, 4, "E8M0", 32, None, E2M1, "e2m1", turned=turned, sources=(tensor,))
