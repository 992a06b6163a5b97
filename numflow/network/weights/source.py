"""Data of a network's weights, read from the checkpoint on demand, in the stored type where possible."""

from dataclasses import dataclass

import numpy as np

from numflow.errors import NetworkError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.mapped import release_pages
from numflow.formats.types import tensor_type, to_f32
from numflow.network.weights.columns import can_cut, stored_columns
from numflow.ops import Network, Part, Weight
from numflow.quant import find
from numflow.quant.apart import Outliers, joined, take_apart


@dataclass(frozen=True)
class RawMatrix:
    """A matrix as stored: `rows` uint8 [N, row_bytes] of tensor type `type`, standing for [N, K] = `shape`.

    groups: number of equal matrices stacked along N (experts), else 1.
    outliers: values added to some weights, for columns cut out of a type with outliers, whose base type is `type`.
    Whole
              rows contain their outliers.
    """

    name: str
    type: str
    rows: np.ndarray
    shape: tuple[int, int]
    groups: int = 1
    outliers: Outliers | None = None

    def f32(self) -> np.ndarray:
        """float32 [N, K], the caller's own."""
        values = np.array(to_f32(self.rows, self.type), np.float32)
        return values if self.outliers is None else self.outliers.add_to(values)


def is_computed(weight: Weight) -> bool:
    """Whether a weight is computed at load, as float32, instead of being returned in the stored type."""
    blocks = any(tensor_type(name).block > 1 for name in weight.types)
    return (weight.constant is not None or bool(weight.add) or weight.normalize_rows or weight.negative_exp
            or bool(weight.project)
            or len(set(weight.types)) != 1 or any(part.transpose or (part.turned and blocks) for part in weight.parts))


def stored_tensor(checkpoint: Checkpoint, part: Part) -> Tensor:
    """The tensor of a part, with permuted columns if the part is `ordered`."""
    tensor = checkpoint.tensors[part.tensor]
    return tensor.ordered.tensor if part.ordered and tensor.ordered else tensor


class WeightSource:
    """Source of the weights of `network` for executors. Results belong to the caller; nothing is cached."""

    def __init__(self, network: Network, checkpoint: Checkpoint):
        self.network, self.checkpoint = network, checkpoint

    def raw(self, name: str) -> RawMatrix:
        """A matrix in the stored type, or as F32 if its parts differ in type or are computed at load."""
        weight = self._weight(name)
        columns = weight.shape[-1]
        shape = (int(np.prod(weight.shape[:-1])), columns)
        if is_computed(weight):
            rows = self.f32(name).reshape(shape)
            return RawMatrix(name, "F32", rows.view(np.uint8).reshape(shape[0], columns * 4), shape, weight.groups)
        if any(part.columns is not None and not can_cut(self._tensor(part).type) for part in weight.parts):
            return self._cut_apart(weight, shape)
        pieces = [self._stored(part, name) for part in weight.parts]
        rows = pieces[0] if len(pieces) == 1 else _joined(pieces)
        return RawMatrix(name, weight.types[0], rows, shape, weight.groups)

    def _cut_apart(self, weight: Weight, shape: tuple[int, int]) -> RawMatrix:
        """Columns of tensors with outliers."""
        scheme, rows, outliers = find(weight.types[0]), [], []
        for part in weight.parts:
            tensor = self._tensor(part)
            begin, end = self._between_blocks(part, weight.name)
            base, added = take_apart(_select(tensor.raw(), part.rows), scheme, tensor.columns)
            rows.append(stored_columns(base, tensor_type(scheme.base.name), tensor.columns, begin, end))
            outliers.append(added.between(begin, end))
        return RawMatrix(weight.name, scheme.base.name, np.concatenate(rows), shape, weight.groups, joined(outliers))

    def f32(self, name: str) -> np.ndarray:
        """De-quantised float32 values in the weight's shape."""
        weight = self._weight(name)
        if weight.constant is not None:
            return np.ascontiguousarray(weight.constant, np.float32)
        if weight.project:
            return self._projected(weight)
        pieces = [self._part(part, vector=len(weight.shape) == 1) for part in weight.parts]
        values = _joined(pieces) if len(pieces) > 1 else pieces[0]
        if weight.add:
            values = values + np.float32(weight.add)
        if weight.normalize_rows:
            values = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12).astype(np.float32)
        if weight.negative_exp:
            values = -np.exp(values)
        return np.ascontiguousarray(values.reshape(weight.shape), np.float32)

    def _projected(self, weight: Weight) -> np.ndarray:
        """float32 [H * n, K]: head h of norm(table) @ matrix.T + bias."""
        parts = {role: self._part(part, vector=role not in ("table", "matrix"))
                 for role, part in zip(weight.project, weight.parts, strict=True)}
        x, matrix = parts["table"], parts["matrix"]
        if "norm" in parts:
            x = x - x.mean(axis=1, keepdims=True)
            x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(weight.eps)) * parts["norm"]
            x = x + parts.get("norm_bias", np.float32(0))
        y = x @ matrix.T + parts.get("bias", np.float32(0))
        y = y.reshape(len(x), weight.groups, weight.shape[1]).swapaxes(0, 1)
        return np.ascontiguousarray(y.reshape(weight.shape), np.float32)

    def _weight(self, name: str) -> Weight:
        if name not in self.network.weights:
            raise NetworkError(f"network {self.network.name!r} has no weight {name!r}")
        return self.network.weights[name]

    def _tensor(self, part: Part) -> Tensor:
        return stored_tensor(self.checkpoint, part)

    def _stored(self, part: Part, name: str) -> np.ndarray:
        """The part's bytes, uint8 [rows, row_bytes]."""
        tensor = self._tensor(part)
        rows = _select(tensor.raw(), part.rows)
        if part.turned:
            size = tensor.type.row_bytes(1)
            return np.ascontiguousarray(rows.reshape(len(rows), -1, size).swapaxes(0, 1)).reshape(-1, len(rows) * size)
        if part.columns is None:
            return rows
        return stored_columns(rows, tensor.type, tensor.columns, *self._between_blocks(part, name))

    def _between_blocks(self, part: Part, name: str) -> tuple[int, int]:
        """Column range of a part; must be whole blocks."""
        tensor = self._tensor(part)
        begin, end = part.columns or (0, tensor.columns)
        if begin % tensor.type.block or end % tensor.type.block:
            raise NetworkError(f"weight {name!r}: columns {begin} .. {end} of tensor {part.tensor!r} cut a block of "
                               f"{tensor.type.block} {tensor.type.name} weights")
        return begin, end

    def _part(self, part: Part, vector: bool) -> np.ndarray:
        values = self._all_columns(part, vector)
        values = values if part.columns is None else values[:, slice(*part.columns)]
        return values.T if part.turned else values

    def _all_columns(self, part: Part, vector: bool) -> np.ndarray:
        tensor = self._tensor(part)
        if vector:
            return _select(tensor.f32().reshape(-1), part.rows)
        if part.transpose:
            values = np.swapaxes(tensor.f32(), -1, -2)
            return _select(values.reshape(-1, values.shape[-1]), part.rows)
        if part.rows is None:
            return tensor.f32().reshape(tensor.rows, tensor.columns)
        return tensor.f32(_index(part.rows))


def _index(rows):
    return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows


def _select(values: np.ndarray, rows) -> np.ndarray:
    """Selected rows in order; a range returns a view, so that mapped bytes are not copied."""
    return values if rows is None else values[_index(rows)]


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenated rows; the memory pages of the pieces are released."""
    rows = np.concatenate(pieces)
    for piece in pieces:
        release_pages(piece)
    return rows
