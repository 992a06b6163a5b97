"""Encoding of GGUF metadata from plain values, with the value type that readers expect for each key."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from numflow.errors import FormatError, RequestError

_UINT8, _UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _INT64 = 0, 4, 5, 6, 7, 8, 9, 10, 11
# Keys, without the architecture, that are float32 even if the configuration has an integer.
FLOATS = frozenset((
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.scale", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping", "embedding_scale",
    "residual_scale", "logit_scale", "expert_weights_scale", "rope.freq_base", "rope.freq_base_swa",
    "rope.scaling.factor", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier"))
_FORMS = {_UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOL: "?", _UINT64: "Q", _INT64: "q"}


def encode_pairs(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Encode each pair: key, type and value. None values are left out; uint8 arrays become arrays of bytes.

    Raises:
        FormatError: GGUF has no type for a value.
    """
    architecture = f"{metadata.get('general.architecture', '')}."
    return {key: text(key) + _typed(key, value, key.removeprefix(architecture) in FLOATS)
            for key, value in metadata.items() if value is not None}


def text(value: str) -> bytes:
    """Encode a string: length and UTF-8 bytes."""
    data = value.encode(errors="replace")
    return struct.pack("<Q", len(data)) + data


def _typed(key: str, value: Any, as_float: bool) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + text(value)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return struct.pack("<IIQ", _ARRAY, _UINT8, value.size) + value.tobytes()
    if isinstance(value, Sequence):
        return _array(key, value, as_float)
    kind = _kind(key, [value], as_float)
    return struct.pack(f"<I{_FORMS[kind]}", kind, value)


def _array(key: str, values: Sequence[Any], as_float: bool) -> bytes:
    if all(isinstance(value, str) for value in values):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(text, values))
    kind = _kind(key, values, as_float)
    kind = _INT32 if kind == _UINT32 and max(values) < 2**31 else kind
    return struct.pack(f"<IIQ{len(values)}{_FORMS[kind]}", _ARRAY, kind, len(values), *values)


def _kind(key: str, values: Sequence[Any], as_float: bool) -> int:
    """The GGUF type that can hold all values."""
    if all(isinstance(value, bool) for value in values):
        return _BOOL
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise FormatError(f"metadata {key!r}: GGUF has no type for {values[0]!r}")
    if as_float or any(isinstance(value, float) for value in values):
        return _FLOAT32
    if min(values) < -2**63 or max(values) >= 2**64:
        raise RequestError(f"metadata {key!r}: {max(values)} does not fit in 64 bits")
    if min(values) < 0:
        return _INT32 if min(values) >= -2**31 and max(values) < 2**31 else _INT64
    return _UINT32 if max(values) < 2**32 else _UINT64
