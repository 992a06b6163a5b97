"""GGUF writer: metadata, encoded or copied byte for byte from another file, and tensors of any type."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError, RequestError
from numflow.formats import gguf
from numflow.formats.gguf_pairs import encode_pairs, text
from numflow.formats.types import GGML_NUMBERS, tensor_type
from numflow.formats.writer import TensorEntry, write_whole
from numflow.quant import SCHEMES, iq4, k_types
from numflow.quant.iq4 import IQ4_TYPES
from numflow.quant.k_types import K_TYPES

# Types that plain rounding produces, by lower-case name.
ENCODED = {name.lower(): name for name in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")}
# Types with a search for scales and codes, which can use an imatrix.
SEARCHED = (*K_TYPES, *IQ4_TYPES)
# All types that `numflow quantize` can write, by lower-case name or alias.
WRITTEN = ENCODED | {name.lower(): name for name in SEARCHED} | {
    "q8": "Q8_0", "q6": "Q6_K", "q5": "Q5_0", "q4": "Q4_0", "q3": "Q3_K", "q2": "Q2_K"}
# Types with the same names in other file formats, where short names are numflow's own schemes.
BESIDE_SCHEMES = {name: kind for name, kind in WRITTEN.items() if name not in SCHEMES}
_OF_OTHER_TENSORS = ("split.no", "split.count", "split.tensors.count", "general.file_type")
_QUANTISATION = "general.quantization_version"
_PART = 1 << 22  # weights encoded at a time


def encode(x: np.ndarray, kind: str, name: str = "matrix", threads: int | None = None,
           importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [N, K] -> uint8 [N, row_bytes] of a GGUF type.

    Types in SEARCHED use numflow's search, the others GGML's reference rounding.

    importance: float32 [K] or [N, K], weights of squared errors, for SEARCHED only.

    Raises:
        FormatError: a NaN or an infinity among the weights. RequestError: a weight is out of the range of float16.
    """
    from gguf import GGMLQuantizationType, quants

    if not np.isfinite(x).all():
        row, column = np.argwhere(~np.isfinite(x))[0]
        raise FormatError(f"{name} cannot be quantised: row {row}, column {column} is {x[row, column]}")
    if kind == "F16" and np.abs(x).max(initial=0) > np.finfo(np.float16).max:
        raise RequestError(f"{name} has weights up to {np.abs(x).max():g}, which F16 cannot hold")
    raw = np.empty((len(x), tensor_type(kind).row_bytes(x.shape[1])), np.uint8)
    step = max(1, _PART // max(1, x.shape[1]))
    for first in range(0, len(x), step):
        rows = np.ascontiguousarray(x[first:first + step], np.float32)
        if kind in SEARCHED:
            part = importance[first:first + step] if importance is not None and importance.ndim == 2 else importance
            find = k_types.encode if kind in K_TYPES else iq4.encode
            raw[first:first + step] = find(rows, kind, name, threads, part)
            continue
        raw[first:first + step] = quants.quantize(rows, GGMLQuantizationType[kind]).view(np.uint8)
    return raw


def copied_pairs(source: Path) -> tuple[dict[str, bytes], int]:
    """Metadata pairs of a GGUF file for `write`, without keys about the file's tensors, and the alignment.

    Raises:
        FormatError: `source` is damaged, or of version 1, which has narrower integers.
    """
    pairs = {key: data for key, data in gguf.read_pairs(source).items() if key not in _OF_OTHER_TENSORS}
    return pairs, gguf.read_file(source)[1].get("general.alignment", 32)


def made_pairs(metadata: Mapping[str, Any]) -> tuple[dict[str, bytes], int]:
    """Metadata pairs for `write` from plain values, and the alignment. Raises: FormatError."""
    kept = {key: value for key, value in metadata.items() if key not in _OF_OTHER_TENSORS}
    return encode_pairs(kept), kept.get("general.alignment", 32)


def write(path: Path, pairs: Mapping[str, bytes], alignment: int, entries: Sequence[TensorEntry],
          written: Callable[[int], None] = lambda count: None) -> None:
    """Write a GGUF file atomically.

    pairs:   encoded metadata pairs (key, type and value), in order.
    entries: tensors; `dtype` is a GGML type name, `shape` has the outermost dimension first.

    Raises:
        RequestError: GGUF has no number for a type, the disk is full, or the file cannot be written.
    """
    pairs = {**pairs, **({} if _QUANTISATION in pairs else encode_pairs({_QUANTISATION: 2}))}
    padded = [_padded(entry, alignment) for entry in entries]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs)) + b"".join(pairs.values())
    at = 0
    for entry, whole in zip(entries, padded):
        if entry.dtype not in GGML_NUMBERS:
            raise RequestError(f"tensor {entry.name!r}: a GGUF file cannot hold {entry.dtype}")
        sizes = entry.shape[::-1]
        head += text(entry.name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, GGML_NUMBERS[entry.dtype], at)
        at += whole.nbytes
    write_whole(path, head + bytes(-len(head) % alignment), padded, written)


def _padded(entry: TensorEntry, alignment: int) -> TensorEntry:
    """The entry with zeros behind it, so that the next one is aligned."""
    more = -entry.nbytes % alignment
    if not more:
        return entry

    def read() -> np.ndarray:
        data = np.ascontiguousarray(entry.read()).reshape(-1).view(np.uint8)
        return np.concatenate([data, np.zeros(more, np.uint8)])

    return TensorEntry(entry.name, entry.dtype, entry.shape, entry.nbytes + more, read)
