"""MLX: NAME.weight U32 with codes, lowest bits first, along the inputs and across word boundaries; and NAME.scales.

    mode affine   NAME.biases too (qbiases of transformers' "metal"), w = scale * code + bias
    mode mxfp4    E2M1 values, scales are powers of two
    mode nvfp4    E2M1 values, scales are E4M3
    mode mxfp8    E4M3 values, scales are powers of two

Bits and group size are configured per layer or for all layers. A layer with biases is affine, whatever the mode of the
others. Other changes by mlx-lm are in mlx_models.py.
"""

from collections.abc import Mapping

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.beside import eight_bits, two_in_a_byte
from numflow.formats.quantised.coded import CodedMatrix, CodedRows, zeros_of
from numflow.formats.quantised.grid import scale_grid
from numflow.formats.quantised.parts import POWERS, SCALES, StoredParts, integers
from numflow.formats.quantised.words import unpacked_stream
from numflow.formats.types import TYPES

_FLOATS = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits and group size by mode


def mlx(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight.

    Raises:
        FormatError: shapes do not fit the configuration.
    """
    stem = name.removesuffix("weight")
    said = parts.method.settings
    own = said.get(stem.removesuffix("."))
    bits, size, mode = ((own.get(key, said.get(key)) if isinstance(own, Mapping) else said.get(key))
                        for key in ("bits", "group_size", "mode"))
    words = parts.need(name, ("U32",), beside=name)
    if type(bits) is not int or type(size) is not int or not (1 <= bits <= 8 and size > 0) or len(words.shape) < 2:
        raise parts.fail(name, f"is U32 {show(list(words.shape))} of {show(bits)} bits in groups of {show(size)}; "
                               f"expected two dimensions, 1 to 8 bits and groups of 1 or more")
    k = words.columns * 32 // bits
    if k * bits != words.columns * 32 or k % size or not k:
        raise parts.fail(name, f"is U32 {show(list(words.shape))}, which are no whole groups of {size} codes of {bits} "
                               f"bits")
    shape, grid = (*words.shape[:-1], k), (*words.shape[:-1], k // size)
    biases = f"{stem}{'qbiases' if f'{stem}qbiases' in parts.tensors else 'biases'}"
    if mode in _FLOATS and biases not in parts.tensors:
        if (bits, size) != _FLOATS[mode]:
            raise parts.fail(name, f"has {bits} bits in groups of {size}, expected {_FLOATS[mode][0]} in groups of "
                                   f"{_FLOATS[mode][1]}, as {mode} has")
        scale = parts.need(f"{stem}scales", POWERS, grid, beside=name)
        if mode == "mxfp8":
            return eight_bits(parts, name, Tensor(name, shape, TYPES["F8_E4M3"], words.read), scale, None)
        if mode == "nvfp4":
            scale = Tensor(scale.name, scale.shape, TYPES["F8_E4M3"], scale.read)
        return two_in_a_byte(parts, name, Tensor(name, (*shape[:-1], k // 2), TYPES["U8"], words.read), scale)
    grids = [scale_grid(parts, parts.need(part, SCALES, grid, beside=name), shape)
             for part in (f"{stem}scales", biases)]

    def rows(begin: int, end: int) -> CodedRows:
        some = integers(words).reshape(-1, words.columns)[begin:end]
        own, other = (each.rows(begin, end) for each in grids)
        return CodedRows(unpacked_stream(some, bits, k), *zeros_of(own, other))

    return CodedMatrix(name, shape, rows, bits, "F32", size, zero_type="F32", turned=len(shape) == 2, sources=(words,))
