"""A checkpoint of any format: lazily mapped tensors by name, metadata, tokenizer files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from numflow.formats.types import TensorType, to_f32


@dataclass(frozen=True)
class Tensor:
    """One stored tensor. Nothing is read from disk before `raw` or `f32` is called.

    shape: outermost dimension first, as in NumPy and torch; leading dimensions are flattened to rows.
    read:  returns the stored bytes as read-only uint8 [rows, row_bytes], memory-mapped where the format allows.
    turned: the last two dimensions are transposed, relative to the files that specs describe.
    ordered: the same matrix with permuted columns, if it takes fewer bits so.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    read: Callable[[], np.ndarray] = field(repr=False)
    turned: bool = False
    ordered: "OrderedTensor | None" = None

    @property
    def rows(self) -> int:
        """Number of rows when all but the last dimension are flattened (1 for vectors)."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.type.row_bytes(self.columns)

    def raw(self) -> np.ndarray:
        """Stored bytes, read-only uint8 [rows, row_bytes]."""
        return self.read()

    def f32(self, rows=None) -> np.ndarray:
        """De-quantised float32 values in the tensor's shape, or of the given flattened rows, [len(rows), columns]."""
        raw = self.raw()
        if rows is not None:
            return to_f32(raw[rows], self.type.name)
        return to_f32(raw, self.type.name).reshape(self.shape)


@dataclass(frozen=True)
class OrderedTensor:
    """A matrix with permuted columns: column j of `tensor` is column order[j] of the matrix."""

    tensor: Tensor
    order: np.ndarray


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    format:   "safetensors", "pickle", "gguf" or "llama2c".
    naming:   the spec table of tensor names for this file: "hf", "gguf" or "llama2c".
    tensors:  by stored name, in file order.
    config:   config.json's content ("hf"), GGUF metadata ("gguf", keys as stored), header fields ("llama2c").
    files:    paths of existing files by role: "config", "tokenizer.json", "tokenizer.model", "tokenizer_config",
              "generation_config", "vocab.json", "merges.txt", "vocab.txt", "special_tokens_map", "chat_template",
              "added_tokens", "source.spm", "target.spm", "modules", "pooling", "tokenizer.bin", and "weights" (list of
              weight files). `folder.SIDE_FILES` has the file names.
    unpacked: folder of the files that came inside the model file; None: the files are beside `path`.
    quantised: quantisation method of another program and where it is stated; "" for none.
    """

    path: Path
    format: str
    naming: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    files: Mapping[str, Any] = field(default_factory=dict)
    unpacked: Path | None = None
    quantised: str = ""

    @property
    def folder(self) -> Path:
        """Folder of the model's files that have no role in `files`."""
        return self.unpacked or (self.path if self.path.is_dir() else self.path.parent)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(t.nbytes for t in self.tensors.values())
