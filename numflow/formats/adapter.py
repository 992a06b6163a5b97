"""Adapters (LoRA, arXiv 2106.09685): changes that are added to tensors of a base model, and replacements of tensors.

    adapter = open_adapter(path)        # a PEFT folder, or a GGUF file

Changes are keyed by the base tensor's name in the adapter's files. network/adapters maps this name to a tensor of a
checkpoint. Tensors are read lazily.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from numflow import places
from numflow.errors import FormatError, ModelNotFoundError, quoted
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import TYPES, WHOLE


@dataclass(frozen=True)
class LowRank:
    """factor * B A, which is added to a matrix [..., N, K] of the base.

    a, b:      [..., r, K] and [..., N, r].
    magnitude: [N], the L2 norm that each row of the sum is scaled to (DoRA, arXiv 2402.09353); None for LoRA.
    by_column: the magnitude is [K], for columns.
    loose:     rows with magnitude NaN are not scaled.
    fixed:     a caller's scale has no effect.
    wide:      a may have more columns than the base matrix; the first K are used.
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
        """Factors that scale rows (or columns) of these L2 norms to the magnitude, in its shape."""
        assert self.magnitude is not None
        wanted = self.magnitude.f32().reshape(lengths.shape)
        found = wanted / np.where(lengths > 0, lengths, 1)
        return np.where(np.isnan(wanted), 1, found).astype(np.float32) if self.loose else found

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the changed matrix."""
        return (*self.a.shape[:-2], self.b.shape[-2], self.a.shape[-1])

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """A and B as float32."""
        return self.a.f32(), self.b.f32()


@dataclass(frozen=True)
class Multiplied:
    """diag(rows) W T in place of a matrix W [N, K] of the base.

    rows:  N factors, None for ones. bias: the factors apply to the matrix's bias too.
    turn:  [X, K / X, K / X], the diagonal blocks of T; None: T is the identity.
    every: turn has a single block, which is repeated.
    """

    rows: Tensor | None = None
    bias: bool = False
    turn: Tensor | None = None
    every: bool = False

    def fits(self, n: int, k: int) -> bool:
        """Whether the factors fit a matrix of this shape."""
        rows, turn = self.rows, self.turn
        return (rows is None or rows.rows * rows.columns == n) and (turn is None or (
            k % turn.shape[1] == 0 and turn.shape[0] == (1 if self.every else k // turn.shape[1])))

    def of(self, values: np.ndarray) -> np.ndarray:
        """diag(rows) W T for W [N, K]."""
        found = np.asarray(values, np.float32)
        if self.turn is not None:
            blocks = self.turn.f32()
            parts = found.reshape(len(found), -1, blocks.shape[1]).swapaxes(0, 1)
            found = (parts @ blocks).swapaxes(0, 1).reshape(found.shape)
        return found if self.rows is None else self.rows.f32().reshape(-1, 1) * found


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's files.

    naming:   "hf" or "gguf": the naming of its tensors. architecture: GGUF architecture of the base, or "".
    added:    name of a matrix -> low-rank change.
    offsets:  name of a matrix -> (vector [N], factor), added to the matrix's bias, also if the base has no bias.
    replaced: name of a tensor -> replacement.
    multiplied: name of a matrix -> factors.
    tokens:   name of a table -> (row indices, replacement rows).
    repeated: copies of base tensors in the adapter's files.
    head_too: whether changes of the embedding table also apply to a tied output matrix.
    invocation: tokens that start the adapter (aLoRA, arXiv 2504.12397): it has no effect before their last occurrence
                in the prompt. (): it has an effect on all tokens.
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
    invocation: tuple[int, ...] = ()


def open_adapter(path: str | Path) -> Adapter:
    """Open an adapter: a PEFT folder or its weight file, a GGUF file, or a folder with a single GGUF file.

    Raises:
        ModelNotFoundError: no such path, or no adapter.
        FormatError: the files are damaged, or use a variant that is not supported.
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
    """The transpose of a matrix in float32."""
    return computed(tensor.name, tensor.shape[::-1], lambda: tensor.f32().T)


def computed(name: str, shape: tuple[int, ...], values: Callable[[], np.ndarray]) -> Tensor:
    """A float32 tensor whose values are computed on demand."""
    def read() -> np.ndarray:
        return np.ascontiguousarray(values(), np.float32).reshape(-1, shape[-1]).view(np.uint8)

    return Tensor(name, shape, TYPES["F32"], read)


def invocation_of(where: str, tokens: object) -> tuple[int, ...]:
    """Checked token ids that start an adapter. where: file and key, for messages.

    Raises:
        FormatError: not a list of token ids.
    """
    if not isinstance(tokens, list | tuple) or not tokens or not all(type(token) is int and token >= 0
                                                                     for token in tokens):
        raise FormatError(f"{where}: expected token ids, found {quoted(tokens)}")
    return tuple(tokens)


def check_pair(where: str, a: Tensor | None, b: Tensor | None, dimensions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Check the matrices of a pair, and return both. where: file and name, for messages.

    Raises:
        FormatError: one is missing, has a wrong number of dimensions or an integer type, or their ranks differ.
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
    """Refuse tensors of integer types. where: file and name, for messages.

    Raises:
        FormatError: names the tensor and its type.
    """
    for tensor in tensors:
        if tensor is not None and tensor.type.name in WHOLE:
            raise FormatError(f"{where}: expected floating-point numbers, but {tensor.name!r} is {tensor.type.name}")


def check_finite(path: Path, name: str, *values: np.ndarray | None) -> None:
    """Refuse a change with values, or products of values, that are not finite in float32.

    Raises:
        FormatError: names adapter and tensor.
    """
    for each in values:
        if each is not None and not np.isfinite(each).all():
            raise FormatError(f"{path}: {name!r}: expected finite float32 numbers (A, B, magnitude, bias, alpha / r, "
                              f"the scale, their products), found {'nan' if np.isnan(each).any() else 'inf'}")
