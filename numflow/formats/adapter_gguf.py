"""Adapters in GGUF files: TENSOR.lora_a [..., r, K] and TENSOR.lora_b [..., N, r] for each tensor, and one alpha.

A vector whose name ends in _norm.weight replaces the base's vector.
"""

from pathlib import Path

from numflow.errors import FormatError
from numflow.formats import gguf
from numflow.formats.adapter import Adapter, LowRank, check_pair, invocation_of, turned
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import show

_ENDS = (".lora_a", ".lora_b")
_NORM = "_norm.weight"
_INVOCATION = "adapter.alora.invocation_tokens"
# The pair of a table is stored as [N, r] and [K, r], because rows are looked up.
_TABLE = "token_embd.weight"


def read(path: Path) -> Adapter:
    """Read an adapter from a GGUF file.

    Raises:
        FormatError: the file is damaged or no adapter.
    """
    tensors, metadata, _ = gguf.read(path)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := metadata.get(key)) != expected:
            raise FormatError(f"{path}: {key}: expected {expected!r}, found {show(found)}: this is no LoRA adapter")
    alpha, architecture = metadata.get("adapter.lora.alpha"), metadata.get("general.architecture")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < float("inf"):
        raise FormatError(f"{path}: adapter.lora.alpha: expected a number, found {show(alpha)}")
    invocation = invocation_of(f"{path}: {_INVOCATION}", metadata[_INVOCATION]) if metadata.get(_INVOCATION) else ()
    replaced = {name: tensor for name, tensor in tensors.items() if name.endswith(_NORM) and len(tensor.shape) == 1}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name in replaced:
            continue
        if not name.endswith(_ENDS):
            raise FormatError(f"{path}: tensor {show(name)}: expected a name that ends in {' or '.join(_ENDS)}, or a "
                              f"vector whose name ends in {_NORM}")
        pairs.setdefault(name[:-len(_ENDS[0])], {})[name[-1]] = tensor
    if not pairs and not replaced:
        raise FormatError(f"{path}: an adapter without tensors")
    added = {}
    for name, pair in pairs.items():
        a, b = pair.get("a"), pair.get("b")
        if name == _TABLE and a is not None and b is not None and len(a.shape) == len(b.shape) == 2:
            a, b = turned(b), a
        a, b = check_pair(f"{path}: tensor {show(name)}", a, b, (2, 3))
        added[name] = LowRank(a, b, alpha / a.shape[-2] if alpha else 1.0)
    architecture = architecture if isinstance(architecture, str) else ""
    return Adapter(path, "gguf", added, replaced=replaced, architecture=architecture, invocation=invocation)
