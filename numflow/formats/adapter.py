"""Adapters: what to add to tensors of a base model, or to put in their places (LoRA, arXiv 2106.09685).

    adapter = open_adapter(path)        # PEFT's folder, or a GGUF file

A change goes by the name of the base's tensor that it is for, as the adapter's files have it; which tensor of a
checkpoint that is, network/adapters finds out. Tensors are read when they are asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from numflow import places
from numflow.errors import FormatError, ModelNotFoundError
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import TYPES, WHOLE


@dataclass(frozen=True)
class LowRank:
    """factor * B A, to be added to a matrix [..., N, K] of the base.

    a, b:      [..., r, K] and [..., N, r].
    magnitude: [N], the length that each row of the sum gets (DoRA, arXiv 2402.09353); None: as it comes.
    by_column: the magnitude is [K], of columns.
    loose:     rows whose magnitude is NaN are as long as they come.
    fixed:     a caller's scale does not act on it.
    wide:      a may have more columns than the base's matrix, which has the first of them.
    """

    a: Tensor
    b: Tensor
    factor: float
    magnitude: Tensor | None = None
    by_column: bool = False
    loose: bool = False
    fixed: bool = False
    wide: bool = False

    def factor_at(self, scale: float) -> float:
        """The factor at a caller's scale."""
        return self.factor if self.fixed else self.factor * scale

    def lengthened(self, lengths: np.ndarray) -> np.ndarray:
        """The factors by which rows, or columns, of such lengths get those that the magnitude says, in its shape."""
        assert self.magnitude is not None
        wanted = self.magnitude.f32().reshape(lengths.shape)
        found = wanted / np.where(lengths > 0, lengths, 1)
        return np.where(np.isnan(wanted), 1, found).astype(np.float32) if self.loose else found

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that it is for."""
        return (*self.a.shape[:-2], self.b.shape[-2], self.a.shape[-1])

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B as float32."""
        return self.a.f32(), self.b.f32()


@dataclass(frozen=True)
class Multiplied:
    """diag(rows) W T in place of a matrix W [N, K] of the base.

    rows:  N numbers, None for ones. bias: they act on the matrix's bias too.
    turn:  [X, K / X, K / X], the blocks on the diagonal of T; None: T is one.
    every: turn has one block, for all.
    """

    rows: Tensor | None = None
    bias: bool = False
    turn: Tensor | None = None
    every: bool = False

    def fits(self, n: int, k: int) -> bool:
        """Whether it is for matrices of this shape."""
        rows, turn = self.rows, self.turn
        return (rows is None or rows.rows * rows.columns == n) and (turn is None or (
            k % turn.shape[1] == 0 and turn.shape[0] == (1 if self.every else k // turn.shape[1])))

    def of(self, values: np.ndarray) -> np.ndarray:
        """The matrix [N, K] in place of this one."""
        found = np.asarray(values, np.float32)
        if self.turn is not None:
            blocks = self.turn.f32()
            parts = found.reshape(len(found), -1, blocks.shape[1]).swapaxes(0, 1)
            found = (parts @ blocks).swapaxes(0, 1).reshape(found.shape)
        return found if self.rows is None else self.rows.f32().reshape(-1, 1) * found


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's files.

    naming:   "hf" or "gguf": whose names of tensors it has. architecture: the base's, as GGUF files call it, or "".
    added:    name of a matrix -> what is added to it.
    offsets:  name of a matrix -> (vector [N], factor) that is added to its bias, which need not be there.
    replaced: name of a tensor -> the one in its place.
    multiplied: name of a matrix -> its factors.
    tokens:   name of a table -> (numbers of rows, the rows in their places).
    repeated: tensors of the base that the files have once more.
    head_too: whether an output matrix that is the embedding table gets what is added to that table.
    """

    path: Path
    naming: str
    added: Mapping[str, LowRank]
    offsets: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    multiplied: Mapping[str, Multiplied] = field(default_factory=dict)
    tokens: Mapping[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    repeated: Mapping[str, Tensor] = field(default_factory=dict)
    architecture: str = ""
    head_too: bool = False


def open_adapter(path: str | Path) -> Adapter:
    """An adapter: a folder as PEFT writes it, the weights in one, a GGUF file, or a folder with one.

    Raises:
        ModelNotFoundError: nothing there, or no adapter.
        FormatError: what is there is damaged, or does something else than its format's plain formula.
    """
    place = places.expanded(path)
    try:
        return _open(place)
    except OSError as error:
        raise FormatError(f"{place}: cannot be opened: {error}") from None


def _open(place: Path) -> Adapter:
    from numflow.formats import adapter_gguf, adapter_peft, detect

    if not place.exists():
        raise ModelNotFoundError(f"{place}: no such file or folder; an adapter is a folder with "
                                 f"{adapter_peft.CONFIG}, or a GGUF file")
    if place.is_file():
        if detect(place) == "gguf":
            return adapter_gguf.read(place)
        place = place.parent
    if (place / adapter_peft.CONFIG).is_file():
        return adapter_peft.read(place)
    files = sorted(place.glob("*.gguf"))
    if len(files) != 1:
        raise ModelNotFoundError(f"{place}: no adapter: expected {adapter_peft.CONFIG} in it, or one GGUF file, found "
                                 f"{len(files)}")
    return adapter_gguf.read(files[0])


def turned(tensor: Tensor) -> Tensor:
    """The transpose of a matrix, as float32."""
    return computed(tensor.name, tensor.shape[::-1], lambda: tensor.f32().T)


def computed(name: str, shape: tuple[int, ...], values: Callable[[], np.ndarray]) -> Tensor:
    """A tensor of float32 numbers that are made when they are asked for."""
    def read() -> np.ndarray:
        return np.ascontiguousarray(values(), np.float32).reshape(-1, shape[-1]).view(np.uint8)

    return Tensor(name, shape, TYPES["F32"], read)


def check_pair(where: str, a: Tensor | None, b: Tensor | None, dimensions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Both matrices of a pair, which must fit together. where: file and name, for messages.

    Raises:
        FormatError: one is missing, has other than so many dimensions or whole numbers, or they have different ranks.
    """
    if a is None or b is None:
        raise FormatError(f"{where}: matrix {'A' if a is None else 'B'} of the pair is missing")
    if len(a.shape) != len(b.shape) or len(a.shape) not in dimensions or a.shape[:-2] != b.shape[:-2]:
        raise FormatError(f"{where}: A {list(a.shape)} and B {list(b.shape)} should be [r, K] and [N, r]")
    check_floats(where, a, b)
    if a.shape[-2] != b.shape[-1] or not a.shape[-2]:
        raise FormatError(f"{where}: A {list(a.shape)} has rank {a.shape[-2]}, B {list(b.shape)} {b.shape[-1]}")
    return a, b


def check_floats(where: str, *tensors: Tensor | None) -> None:
    """Refuse tensors of whole numbers. where: file and name, for messages.

    Raises:
        FormatError: names the tensor and its type.
    """
    for tensor in tensors:
        if tensor is not None and tensor.type.name in WHOLE:
            raise FormatError(f"{where}: expected floating-point numbers, but {tensor.name!r} is {tensor.type.name}")


def check_finite(path: Path, name: str, *values: np.ndarray | None) -> None:
    """Refuse a change whose numbers, or products of them, are not finite in float32.

    Raises:
        FormatError: names the adapter and the tensor that it is for.
    """
    for each in values:
        if each is not None and not np.isfinite(each).all():
            raise FormatError(f"{path}: {name!r}: expected finite float32 numbers (A, B, magnitude, bias, alpha / r, "
                              f"the scale, their products), found {'nan' if np.isnan(each).any() else 'inf'}")
