"""Mixes of types in GGUF files, such as Q4_K_M: the type of each tensor.

The rules are llama.cpp's (llama_tensor_get_type): one type for most matrices, more bits for the output matrix, and for
value and down projections in some or all layers, and another type for rows that are no multiple of 256.
"""

import re
from collections.abc import Mapping
from typing import Any

# mix: type of most matrices
MIXES = {"Q2_K_S": "Q2_K", "Q3_K_S": "Q3_K", "Q3_K_M": "Q3_K", "Q3_K_L": "Q3_K", "Q4_K_S": "Q4_K", "Q4_K_M": "Q4_K",
         "Q5_K_S": "Q5_K", "Q5_K_M": "Q5_K", "IQ4_XS": "IQ4_XS", "IQ4_NL": "IQ4_NL"}
# Replacement for rows that are no multiple of 256: a type of similar size with blocks of 32 weights.
SHORT_ROWS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BLOCK = 256
_NAME = re.compile(r"(?:.+\.)?blk\.(\d+)\.[\w.]*?"
                   r"(?:(attn_v|attn_k|attn_qkv|attn_kv_b|attn_output)|(ffn_down)\w*)\.weight")
_IQ4 = ("IQ4_XS", "IQ4_NL")
_PLAIN = ("per_layer_model_proj", "altup", "laurel")  # name parts of small matrices
_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")


def types_of(mix: str, columns: Mapping[str, int], config: Mapping[str, Any], imatrix: bool = False) -> dict[str, str]:
    """The type of each tensor that is quantised.

    mix:     one of MIXES, or a type for all tensors.
    columns: columns of each matrix by GGUF name, including matrices that are not quantised. config: GGUF metadata.
    imatrix: whether an importance matrix is used.
    """
    model = _Model(columns, config, imatrix)
    return {name: _fitting(model.type_of(mix, name), count) for name, count in columns.items()
            if mix not in MIXES or not any(part in name for part in _PLAIN)}


def _fitting(kind: str, columns: int) -> str:
    return kind if columns % _BLOCK == 0 else SHORT_ROWS.get(kind, kind)


class _Model:
    """Facts of a model that the rules of a mix depend on."""

    def __init__(self, columns: Mapping[str, int], config: Mapping[str, Any], imatrix: bool):
        self._imatrix = imatrix
        self._architecture = config.get("general.architecture", "")
        found = {name: match for name in columns if (match := _NAME.fullmatch(name))}
        self._kinds = {name: (match[2] or match[3], int(match[1])) for name, match in found.items()}
        self._layers = int(self._value(config, "block_count", 0)) or 1 + max(
            (layer for _, layer in self._kinds.values()), default=0)
        self._values = self._in_order(*_VALUES)
        heads, kv_heads = (self._value(config, key, 0) for key in ("attention.head_count", "attention.head_count_kv"))
        self._group = heads // kv_heads if heads and kv_heads else 1
        self._experts = int(self._value(config, "expert_count", 0))
        self._down = self._in_order("ffn_down") if self._experts < 2 else {}
        self._tied = "output.weight" not in columns
        self._output = "token_embd.weight" if self._tied else "output.weight"

    def _in_order(self, *kinds: str) -> dict[str, int]:
        """Index of each tensor of some kinds in a file, which is sorted by layer, then by name."""
        names = sorted((layer if name.startswith("blk.") else -1, name)
                       for name, (kind, layer) in self._kinds.items() if kind in kinds)
        return {name: index for index, (_, name) in enumerate(names)}

    def _value(self, config: Mapping[str, Any], key: str, default: int) -> int:
        """An integer of the metadata; of a list with one value per layer, the largest."""
        found = config.get(f"{self._architecture}.{key}", default)
        return found if isinstance(found, int) else max((int(value) for value in found), default=default)

    def type_of(self, mix: str, name: str) -> str:
        """The type of a tensor, if its rows are a multiple of 256."""
        if mix not in MIXES:
            return mix
        falcon = self._architecture == "falcon"
        if name == self._output or (self._tied and name.endswith("token_embd.weight")):  # also one for each layer
            return "Q8_0" if falcon else "Q6_K"
        kind, layer = self._kinds.get(name, ("", 0))
        rules = {**dict.fromkeys(_VALUES, self._of_values), "attn_k": self._of_keys, "attn_output": self._of_outputs,
                 "ffn_down": self._of_down}
        index = self._values.get(name, self._down.get(name, layer))
        return rules[kind](mix, index, falcon) if kind else MIXES[mix]

    def _more_bits(self, layer: int, count: int) -> bool:
        """Whether a layer is in the first or last eighth, or is every third between."""
        return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2

    def _of_values(self, mix: str, index: int, falcon: bool) -> str:
        if self._experts == 8:
            return "Q8_0"  # shared by eight experts, so the cost is small
        base = MIXES[mix]
        if mix == "Q2_K_S" and self._group >= 4:
            base = "Q4_K"
        elif mix == "Q3_K_M":
            base = "Q5_K" if index < 2 else "Q4_K"
        elif mix == "Q3_K_L" or (mix == "Q4_K_S" and index < 4) or (mix in _IQ4 and self._group >= 4):
            base = "Q5_K"
        elif mix in ("Q4_K_M", "Q5_K_M") and self._more_bits(index, len(self._values)):
            base = "Q6_K"
        if self._layers == 80 and self._group > 1 and base in ("Q3_K", "Q4_K"):
            return "Q5_K"  # in models of that size, eight query heads share a key/value head
        return base

    def _of_keys(self, mix: str, layer: int, falcon: bool) -> str:
        return "Q8_0" if self._experts == 8 else MIXES[mix]

    def _of_outputs(self, mix: str, layer: int, falcon: bool) -> str:
        if falcon:
            return "Q4_K" if mix == "Q3_K_L" else MIXES[mix]
        if self._experts == 8:
            return "Q5_K" if mix in ("Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", *_IQ4) else MIXES[mix]
        return {"Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, MIXES[mix])

    def _of_down(self, mix: str, layer: int, falcon: bool) -> str:
        count = self._layers
        if mix == "Q2_K_S":
            return "Q4_K" if layer < count // 8 else "Q2_K"
        if mix == "Q3_K_M":
            if layer < count // 16:
                return "Q5_K"
            return "Q4_K" if not falcon or self._more_bits(layer, count) else "Q3_K"
        if mix == "Q3_K_L":
            return "Q4_K" if falcon else "Q5_K"
        if mix in ("Q4_K_M", "Q5_K_M"):
            if falcon and mix == "Q4_K_M":
                return "Q6_K" if layer < count // 16 else "Q5_K" if self._more_bits(layer, count) else "Q4_K"
            return "Q6_K" if self._more_bits(layer, count) else MIXES[mix]
        early = (mix == "Q4_K_S" and not falcon) or (mix in _IQ4 and not self._imatrix)
        return "Q5_K" if early and layer < count // 8 else MIXES[mix]
