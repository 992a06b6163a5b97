"""The three checkpoint formats of llama2.c. None names its tensors; their order is fixed. All numbers little-endian.

    version 0   7 x i32 (dim, hidden, layers, heads, key/value heads, vocabulary, context), float32 weights.
                A negative vocabulary means that the head is stored, not shared with the embedding.
    version 1   "24ka", i32 1, the 7 x i32, u8 shared head, zeros to byte 256; float32 weights, norms first.
    version 2   "24ka", i32 2, the 7 x i32, u8 shared head, i32 group size, zeros to byte 256; float32 norms, then per
                matrix its int8 codes and after them one float32 scale for each group of consecutive codes.

Tensors get GGUF's names.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numflow.errors import FormatError
from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import MappedFile
from numflow.formats.types import TYPES, q8_groups

MAGIC = b"24ka"
HEADER_BYTES = 256
_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


class _Stack(NamedTuple):
    """Consecutive tensors of one shape, one per layer ("{i}" in the name) or a single one."""

    name: str
    copies: int
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header fields of a file of any version.

    Returns:
        tensors by GGUF name, and dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len, version,
        shared_classifier and, in version 2, group_size.

    Raises:
        FormatError: a wrong header, or a file size that differs from the header.
    """
    file = MappedFile(path)
    config, position = _header(file)
    _check_size(file, config, position)
    tensors: dict[str, Tensor] = {}
    for stack in _layout(config):
        for i in range(stack.copies):
            name = stack.name.format(i=i)
            if config["version"] == 2 and stack.is_matrix:
                tensor = _quantised(file, name, stack.shape, position, config["group_size"])
            else:
                tensor = file.tensor(name, stack.shape, TYPES["F32"], position)
            position += _nbytes(stack.shape, config)
            if not name.startswith("rope_"):  # tables of cosines and sines, which are not needed
                tensors[name] = tensor
    return tensors, config


def is_legacy(file: MappedFile) -> bool:
    """Whether this is a version 0 file. These have no magic number, so the file size is compared with the header."""
    try:
        config, start = _header(file)
        _check_size(file, config, start)
    except FormatError:
        return False
    return config["version"] == 0


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """The header fields and the offset of the weights."""
    head = file.bytes(0, HEADER_BYTES)
    version = int.from_bytes(head[4:8], "little") if head.startswith(MAGIC) else 0
    if version not in (0, 1, 2) or (version == 0 and head.startswith(MAGIC)):
        raise file.fail(f"llama2.c version {version}; versions 0, 1 and 2 are read")
    if len(head) < (HEADER_BYTES if version else 28):
        raise file.fail(f"{len(head)} bytes, too short for a llama2.c header")
    config = dict(zip(_FIELDS, struct.unpack_from("<7i", head, 8 if version else 0)))
    shared = config["vocab_size"] > 0 if version == 0 else head[36]
    if shared not in (0, 1):
        raise file.fail(f"llama2.c header: shared classifier must be 0 or 1, got {shared}")
    if version == 0:
        config["vocab_size"] = abs(config["vocab_size"])
    config |= {"version": version, "shared_classifier": bool(shared)}
    if version == 2:
        config["group_size"] = struct.unpack_from("<i", head, 37)[0]
    _check_fields(file, config)
    return config, HEADER_BYTES if version else 28


def _check_fields(file: MappedFile, config: dict[str, Any]) -> None:
    for field in (*_FIELDS, *(["group_size"] if config["version"] == 2 else [])):
        if config[field] <= 0:
            raise file.fail(f"llama2.c header: {field} must be positive, got {config[field]}")
    for field, divisor in (("dim", "n_heads"), ("n_heads", "n_kv_heads")):
        if config[field] % config[divisor]:
            raise file.fail(f"llama2.c header: {field} {config[field]} is no multiple of {divisor} {config[divisor]}")
    if config["version"] == 2:
        for stack in _layout(config):
            if stack.is_matrix and math.prod(stack.shape) % config["group_size"]:
                raise file.fail(f"llama2.c header: group_size {config['group_size']} does not divide "
                                f"{stack.name.format(i=0)} {list(stack.shape)}")


def _layout(config: dict[str, Any]) -> list[_Stack]:
    """The stored stacks of tensors, in file order."""
    dim, hidden, layers, heads, kv_heads, vocabulary, context = (config[f] for f in _FIELDS)
    head_dim = dim // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    embedding = _Stack("token_embd.weight", 1, (vocabulary, dim))
    attention_norm = _Stack("blk.{i}.attn_norm.weight", layers, (dim,))
    attention = [_Stack("blk.{i}.attn_q.weight", layers, (q, dim)),
                 _Stack("blk.{i}.attn_k.weight", layers, (kv, dim)),
                 _Stack("blk.{i}.attn_v.weight", layers, (kv, dim)),
                 _Stack("blk.{i}.attn_output.weight", layers, (dim, q))]
    ffn_norm = _Stack("blk.{i}.ffn_norm.weight", layers, (dim,))
    ffn = [_Stack("blk.{i}.ffn_gate.weight", layers, (hidden, dim)),
           _Stack("blk.{i}.ffn_down.weight", layers, (dim, hidden)),
           _Stack("blk.{i}.ffn_up.weight", layers, (hidden, dim))]
    last_norm = _Stack("output_norm.weight", 1, (dim,))
    head = [] if config["shared_classifier"] else [_Stack("output.weight", 1, (vocabulary, dim))]
    if config["version"] == 0:
        rope = [_Stack(f"rope_{name}", 1, (context, head_dim // 2)) for name in ("cos", "sin")]
        return [embedding, attention_norm, *attention, ffn_norm, *ffn, last_norm, *rope, *head]
    return [attention_norm, ffn_norm, last_norm, embedding, *attention, *ffn, *head]


def _nbytes(shape: tuple[int, ...], config: dict[str, Any]) -> int:
    count = math.prod(shape)
    if config["version"] == 2 and len(shape) == 2:
        return count + count // config["group_size"] * 4
    return count * 4


def _check_size(file: MappedFile, config: dict[str, Any], start: int) -> None:
    expected = start + sum(stack.copies * _nbytes(stack.shape, config) for stack in _layout(config))
    if file.size != expected:
        raise file.fail(f"a llama2.c file of version {config['version']} with this header has {expected} bytes, "
                        f"this one has {file.size}")


def _quantised(file: MappedFile, name: str, shape: tuple[int, ...], start: int, group: int) -> Tensor:
    """An int8 matrix in blocks of a common divisor of group size and columns, each with its group's scale.

    Rows that are no whole number of groups are read as the C program reads them, which differs from the exported
    values.
    """
    rows, columns = shape
    block = math.gcd(group, columns)
    kind = q8_groups(block)

    def read_blocks() -> np.ndarray:
        count = rows * columns
        codes = file.data[start:start + count]
        scales = file.data[start + count:start + count + count // group * 4]
        raw = np.zeros((rows, columns // block, kind.size), np.uint8)
        # In the C program groups begin anew in each row, use the scale at (index of first weight) // group, and
        # remaining columns are ignored.
        used = columns // group * (group // block)
        first = np.arange(rows)[:, None] * columns + np.arange(used) * block // group * group
        raw[:, :used, :4] = scales.reshape(-1, 4)[first // group]
        raw[:, :used, 4:] = codes.reshape(rows, columns // block, block)[:, :used]
        raw.flags.writeable = False
        return raw.reshape(rows, kind.row_bytes(columns))

    return Tensor(name, shape, kind, read_blocks)
