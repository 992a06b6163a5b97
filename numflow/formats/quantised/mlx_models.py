"""Undo changes of tensors and configuration by mlx-lm's converter, other than quantisation.

    stacks of experts     NAME.switch_mlp.PART.weight holds NAME.experts.0.PART.weight and so on
    turned convolutions   causal convolutions [C, 1, K] are stored as [C, K, 1], with the same bytes
    norms of 1 + w        are stored as this sum, if the model also has turned convolutions
    factors               multipliers of the configuration are folded into the matrices, except key_multiplier, and
                          attention_in_multiplier for values

A model is recognised as mlx-lm's by its turned convolutions. Early converters turned convolutions without folding
factors: then the ratio of embedding and head sizes decides, or the model is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.quantised.coded import CodedMatrix, CodedRows
from numflow.formats.types import TYPES

_SUMS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")
_SCALED = ("falcon_h1",)
_TURNED = (*_SUMS, *_SCALED, "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2",
           "nemotron_h", "olmo_hybrid", "recurrent_gemma")
_NORMS = (".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
          ".k_norm.weight")
_SAMPLES, _AT_ONCE = 16, 32  # number of samples of a matrix, and rows per sample


def as_published(found: Mapping[str, Tensor | CodedMatrix], config: dict[str, Any],
                 fail: Callable[[str, str], FormatError]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration as in the published model; models not from mlx-lm are unchanged.

    found: plain tensors and quantised matrices. fail: makes an error about a tensor, by name.

    Raises:
        FormatError: two tensors have the same name, or it is unclear whether factors are folded into matrices.
    """
    kind, made = config.get("model_type"), {}
    turned = kind in _TURNED and any(_is_turned(each) for each in found.values())
    if turned and kind in _SCALED and _has_factors(found, config, fail):
        config = _without_factors(found, config, fail)
    for name, matrix in found.items():
        if turned and kind in _SUMS and ".mtp." in f".{name}":
            continue  # mlx-lm drops MTP tensors; other converters keep them, with or without the added 1
        for each in _unstacked(matrix):
            if each.name in made or (each.name != name and each.name in found):
                raise fail(name, f"stands for {each.name!r}, which is in the file too")
            if turned and kind in _SUMS and name.endswith(_NORMS) and len(each.shape) == 1:
                each = _less_one(each)
            made[each.name] = _unturned(each) if turned and _is_turned(each) else each
    return made, config


def _is_turned(matrix: Tensor | CodedMatrix) -> bool:
    """Whether a tensor is a convolution stored as [C, K, 1]."""
    stem, _, last = matrix.name.rpartition(".")
    return (isinstance(matrix, Tensor) and len(matrix.shape) == 3 and matrix.shape[1] > 1 == matrix.shape[2]
            and last == "weight" and "conv" in stem.rpartition(".")[2])


def _unturned(tensor: Tensor) -> Tensor:
    count, taps, _ = tensor.shape
    return replace(tensor, shape=(count, 1, taps), read=lambda: tensor.raw().reshape(count, -1))


def _less_one(tensor: Tensor) -> Tensor:
    def read() -> np.ndarray:
        return (tensor.f32() - np.float32(1)).reshape(1, -1).view(np.uint8)

    return replace(tensor, type=TYPES["F32"], read=read)


def _unstacked(matrix: Tensor | CodedMatrix) -> Iterator[Tensor]:
    """The tensors of the experts in a stack; for other matrices, the matrix itself."""
    stem, stack, part = matrix.name.partition(".switch_mlp.")
    if not stack or len(matrix.shape) != 3:
        yield matrix if isinstance(matrix, Tensor) else matrix.tensor()
        return
    count, n, k = matrix.shape
    for expert in range(count):
        name, first = f"{stem}.experts.{expert}.{part}", expert * n
        if isinstance(matrix, Tensor):
            yield replace(matrix, name=name, shape=(n, k), read=_rows_of(matrix, first, n))
        else:
            yield replace(matrix, name=name, shape=(n, k), rows=_codes_from(matrix, first), turned=True).tensor()


def _rows_of(stack: Tensor, first: int, count: int) -> Callable[[], np.ndarray]:
    return lambda: stack.raw()[first:first + count]


def _codes_from(stack: CodedMatrix, first: int) -> Callable[[int, int], CodedRows]:
    return lambda begin, end: stack.rows(first + begin, first + end)


def _number(value: Any) -> float:
    """A factor of the configuration, default 1."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if good else 1.0


def _has_factors(found: Mapping[str, Tensor | CodedMatrix], config: Mapping[str, Any],
                 fail: Callable[[str, str], FormatError]) -> bool:
    """Whether a model's factors are folded into its matrices.

    Raises:
        FormatError: undecidable.
    """
    ratio = _number(config.get("embedding_multiplier")) / _number(config.get("lm_head_multiplier"))
    embedding, head = (found.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if embedding is None or head is None or 1 / 4 < ratio < 4:
        return True  # with tied embeddings, only converters that fold factors exist
    sizes = _size(embedding), _size(head)
    if not all(sizes):
        return True
    found_ratio = sizes[0] / sizes[1]
    share = math.log(found_ratio) / math.log(ratio)
    if 1 / 3 < share < 2 / 3:
        raise fail("lm_head.weight", f"is {found_ratio:.3g} times smaller than the embeddings: near {ratio:.3g} the "
                                     "factors of config.json are in the weights, near 1 they are not, and this may be "
                                     "either; take the model as published, or a GGUF file of it")
    return share > 1 / 2


def _size(matrix: Tensor | CodedMatrix) -> float:
    """Median RMS of sampled rows."""
    rows, columns = math.prod(matrix.shape[:-1]), matrix.shape[-1]
    sizes = []
    for first in range(0, rows, max(rows // _SAMPLES, _AT_ONCE)):
        count = min(_AT_ONCE, rows - first)
        if isinstance(matrix, Tensor):
            values = matrix.f32(slice(first, first + count))
        else:
            part = replace(matrix, shape=(count, columns), rows=_codes_from(matrix, first))
            values = part.tensor().f32()
        sizes.append(np.sqrt(np.mean(np.square(values, dtype=np.float64), axis=1)))
    size = float(np.median(np.concatenate(sizes)))
    return size if math.isfinite(size) else 0.0


def _without_factors(found: Mapping[str, Tensor | CodedMatrix], config: dict[str, Any],
                     fail: Callable[[str, str], FormatError]) -> dict[str, Any]:
    """The configuration without the factors that are folded into matrices.

    Values lack attention_in_multiplier, which is applied to attention's output instead: the output is linear in values.

    Raises:
        FormatError: there are biases, which the converter does not multiply.
    """
    for name in found:
        if name.endswith("_proj.bias"):
            raise fail(name, "is a bias of a model with factors, which is read as published or from GGUF only: mlx-lm "
                             "multiplies weights with them and leaves biases")
    tied = "lm_head.weight" not in found
    head, embedding = (_number(config.get(key)) for key in ("lm_head_multiplier", "embedding_multiplier"))
    return config | {"embedding_multiplier": 1.0, "lm_head_multiplier": head / embedding if tied else 1.0,
                     "attention_out_multiplier": _number(config.get("attention_in_multiplier")),
                     "attention_in_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
                     "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0, 1.0]}
