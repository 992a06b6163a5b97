"""Plain tensors of a quantised checkpoint: the stored tensors of each matrix, and the reader for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show
from numflow.formats.quantised import beside, bitnet, bitsandbytes, gptq, hqq, mlx, torchao
from numflow.formats.quantised.coded import CodedMatrix
from numflow.formats.quantised.method import ENDS, method_of, without_method
from numflow.formats.quantised.mlx_models import as_published
from numflow.formats.quantised.parts import FLOATS8, SCALES, StoredParts

Reader = Callable[[StoredParts, str], CodedMatrix]

# Last words of tensors for quantised activations or caches, which numflow ignores.
_OF_ACTIVATIONS = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "input_scale_inv",
                   "output_scale", "output_zero_point", "output_global_scale", "activation_scale",
                   "activation_scale_inv", "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale",
                   "prob_output_scale", "q_zero_point", "k_zero_point", "v_zero_point", "q_global_scale",
                   "k_global_scale", "v_global_scale", "_weight_act_per_tensor_scale", "_weight_act_quant_scale",
                   "_weight_act_quant_zero_point", "k_cache_scale", "v_cache_scale")
_BY_END: tuple[tuple[str, Reader], ...] = (
    (".qweight", gptq.gptq_or_awq), (".weight_packed", beside.packed), ("_packed", beside.packed), (".W_q", hqq.hqq),
    ("_qdata", torchao.torchao), ("_blocks", beside.blocks))
_BESIDE = {"_blocks": "_scales", "_packed": "_scale"}  # required companion tensors
# Last words of factors of a matrix's inputs, which are applied to its columns.
_FACTORS = ("pre_quant_scale", "_weight_act_pre_scale")


def readable(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path,
             file_of: Callable[[str], Path]) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Tensors as in a plain checkpoint, the configuration without the method, and the method's description ("" for
    plain weights).

    Quantised matrices are recognised by the stored tensors; lists in the configuration are redundant.

    Raises:
        FormatError: an unsupported method, or tensors that do not fit; names file and tensor.
    """
    method = method_of(config, tensors, folder)
    if method is None:
        return *as_published(tensors, config, lambda name, message: FormatError(
            f"{file_of(name)}: tensor {show(name)}: {message}")), ""
    parts = StoredParts(tensors, file_of, method)
    matrices = {name: _with_factors(parts, read(parts, name)) for name, tensor in tensors.items()
                if (read := _reader(parts, tensor))}
    found: dict[str, Tensor | CodedMatrix] = {}
    for name, tensor in tensors.items():
        if name in matrices:
            if not all(matrices[name].shape):
                raise parts.fail(name, f"stands for a matrix of {list(matrices[name].shape)}, which has no numbers")
            found[name] = matrices[name]
        elif name not in parts.used and not _is_of_activations(name):
            found[name] = _plain(parts, tensor)
    made, published = as_published(found, config, parts.fail)
    return made, without_method(published), str(method)


def _reader(parts: StoredParts, tensor: Tensor) -> Reader | None:
    """The reader for the matrix of which a tensor is the main part; None for other tensors."""
    name, kind, tensors = tensor.name, tensor.type.name, parts.tensors
    for end, read in _BY_END:
        if name.endswith(end) and (end not in _BESIDE or f"{name.removesuffix(end)}{_BESIDE[end]}" in tensors):
            return read
    if parts.method.name == "mlx" and kind == "U32" and name.endswith(".weight"):
        return mlx.mlx
    if parts.method.name == "bitnet" and kind == "U8" and name.endswith(".weight"):
        return bitnet.bitnet
    if f"{name}.absmax" in tensors:
        return bitsandbytes.four_bits
    if kind == "I8" and name.endswith(".weight") and f"{name.removesuffix('weight')}SCB" in tensors:
        return bitsandbytes.eight_bits
    if kind not in (*FLOATS8, "I8", "U8") or _is_of_activations(name) or len(tensor.shape) < 2:
        return None
    has_scales = any(other in tensors for other in beside.scale_of(name))
    weighs = name.endswith(".weight") and parts.method.stated  # such types are useless without a scale
    return beside.scaled if has_scales or weighs else None


def _with_factors(parts: StoredParts, matrix: CodedMatrix) -> CodedMatrix:
    """The matrix with factors of its inputs, if there are any."""
    stem = matrix.name.removesuffix("weight")
    name = next((found for end in _FACTORS if (found := f"{stem}{end}") in parts.tensors), None)
    if name is None:
        return matrix
    columns = matrix.shape[-1]
    factors = parts.need(name, SCALES, (columns,), (1, columns), beside=matrix.name)
    return replace(matrix, factors=lambda: factors.f32().reshape(-1))


def _is_of_activations(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in _OF_ACTIVATIONS or last.endswith(("_input_scale", "_input_scale_inv", "_input_global_scale"))


def _plain(parts: StoredParts, tensor: Tensor) -> Tensor:
    """A tensor outside quantised matrices. Raises: FormatError: its name belongs to a quantised matrix."""
    end = tensor.name.rpartition(".")[2]
    if end in ENDS or end in ("g_idx", "scales", "weight_shape", "weight_zero_point"):
        raise parts.fail(tensor.name, "belongs to a quantised matrix, the codes of which are not there")
    return tensor
