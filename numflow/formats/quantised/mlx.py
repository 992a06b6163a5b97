"""MLX: NAME.weight U32 with codes, lowest bits first along the inputs and over the ends of words, and NAME.scales.

    mode affine   NAME.biases too (qbiases of transformers' "metal"), w = scale * code + bias
    mode mxfp4    E2M1 numbers, scales are powers of two

Bits and columns of a group are what the configuration says of the layer, else of all. Experts lie in stacks,
NAME.switch_mlp.PART.weight, which stand for NAME.experts.0.PART.weight and so on.

Causal convolutions [C, 1, K] lie as [C, K, 1]. Of other families than those below mlx-lm changes numbers too where it
turns them (norms, factors), so there they stay what they are, and no specification has a place for them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised.beside import two_in_a_byte
from numflow.formats.quantised.coded import CodedMatrix, CodedRows, zeros_of
from numflow.formats.quantised.grid import scale_grid
from numflow.formats.quantised.parts import POWERS, SCALES, StoredParts, integers
from numflow.formats.quantised.words import unpacked_stream
from numflow.formats.types import TYPES


def mlx(parts: StoredParts, name: str) -> CodedMatrix:
    """The matrix of NAME.weight.

    Raises:
        FormatError: shapes that do not fit what the configuration says.
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
    if mode == "mxfp4":
        scale = parts.need(f"{stem}scales", POWERS, grid, beside=name)
        if (bits, size) != (4, 32):
            raise parts.fail(name, f"has {bits} bits in groups of {size}, expected 4 in groups of 32, as mxfp4 has")
        data = Tensor(name, (*shape[:-1], k // 2), TYPES["U8"], words.read)
        return two_in_a_byte(parts, name, data, scale)
    biases = f"{stem}{'qbiases' if f'{stem}qbiases' in parts.tensors else 'biases'}"
    grids = [scale_grid(parts, parts.need(part, SCALES, grid, beside=name), shape)
             for part in (f"{stem}scales", biases)]

    def rows(begin: int, end: int) -> CodedRows:
        some = integers(words).reshape(-1, words.columns)[begin:end]
        own, other = (each.rows(begin, end) for each in grids)
        return CodedRows(unpacked_stream(some, bits, k), *zeros_of(own, other))

    return CodedMatrix(name, shape, rows, bits, "F32", size, zero_type="F32", turned=len(shape) == 2, sources=(words,))


_TURNED = ("granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
           "recurrent_gemma")


def unturned(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A convolution [C, K, 1] of mlx-lm as [C, 1, K], which is the same bytes; any other tensor as it is."""
    if config.get("model_type") not in _TURNED or len(tensor.shape) != 3 or not tensor.name.endswith("weight"):
        return tensor
    count, taps, one = tensor.shape
    if one != 1 or "conv" not in tensor.name.rpartition(".")[0].rpartition(".")[2]:
        return tensor
    return replace(tensor, shape=(count, 1, taps), read=lambda: tensor.raw().reshape(count, -1))


_Matrix = TypeVar("_Matrix", CodedMatrix, Tensor)


def apart(matrix: _Matrix) -> Iterator[_Matrix]:
    """The matrices of a stack of experts; of anything else the one it is."""
    stem, stack, part = matrix.name.partition(".switch_mlp.")
    if not stack or len(matrix.shape) != 3:
        yield matrix
        return
    count, n, k = matrix.shape
    for expert in range(count):
        name, first = f"{stem}.experts.{expert}.{part}", expert * n
        if isinstance(matrix, Tensor):
            yield replace(matrix, name=name, shape=(n, k), read=_rows_of(matrix, first, n))
        else:
            yield replace(matrix, name=name, shape=(n, k), rows=_codes_from(matrix, first), turned=True)


def _rows_of(stack: Tensor, first: int, count: int) -> Callable[[], np.ndarray]:
    return lambda: stack.raw()[first:first + count]


def _codes_from(stack: CodedMatrix, first: int) -> Callable[[int, int], CodedRows]:
    return lambda begin, end: stack.rows(first + begin, first + end)
