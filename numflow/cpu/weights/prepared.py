"""Packed weights on disk: the first start with a model file that numflow made writes them, later starts read them.

A file holds the quantised matrices of one program. Its name is a digest of the model file's path and content, of the
matrices (or slices of matrices) and of the sources of the packing code; formats/kept.py decides how long a file stays.
A matrix that is missing or has another checksum is packed again, and the file is rewritten if there is room.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from numflow import kernel_cache, trust
from numflow.cpu.memory import array_file
from numflow.cpu.weights.layout import Packed, Scheme, scheme_of, tiles_of
from numflow.cpu.weights.pack import KERNELS
from numflow.errors import NumflowError
from numflow.formats import container, kept
from numflow.network.weights.source import WeightSource, is_computed
from numflow.ops import Weight
from numflow.quant.stored import kept_as

_SMALLEST = 8 << 20  # bytes; packing less takes no noticeable time
_PARTS = ("codes", "headers")
_LOCK = threading.Lock()  # one writer at a time in this process; other processes use temporary names of their own


class Prepared:
    """The packed matrices of one program that are on disk.

    weights: the weights that may be on disk, by name. spread: grid types have a code per weight.
    """

    def __init__(self, path: Path, weights: Mapping[str, Weight], n_threads: int, spread: bool = False):
        self.path, self._weights, self._n_threads, self._missed = path, weights, n_threads, False
        self._spread = spread
        self._file = array_file.ArrayFile(path)

    @classmethod
    def open(cls, source, n_threads: int, spread: bool = False) -> "Prepared | None":
        """Prepared weights for a WeightSource; None if its weights are not to be stored."""
        if type(source) is not WeightSource or not kept.is_on():
            return None
        identity = container.identity(source.checkpoint)
        weights = {name: weight for name, weight in source.network.weights.items() if _may_be_kept(weight)}
        if identity is None or sum(sum(_sizes(weight, spread)) for weight in weights.values()) < _SMALLEST:
            return None
        name = kept.file_name(source.checkpoint.path, identity, [
            _packer(), repr(spread), *map(_describe, weights.values())])
        if not trust.usable(folder(), "prepared weights"):
            return None
        kept.prune(folder())
        return cls(folder() / name, weights, n_threads, spread)

    def take(self, name: str) -> Packed | None:
        """A packed matrix from disk; None if it has to be packed now."""
        if name not in self._weights:
            return None
        weight = self._weights[name]
        codes, headers = (self._file.read(f"{name} {part}", size, self._n_threads)
                          for part, size in zip(_PARTS, _sizes(weight, self._spread), strict=True))
        if codes is None or headers is None:
            self._missed = True
            return None
        kind = _scheme(weight, self._spread).name
        return Packed(kind, weight.types[0], _matrix(weight), weight.groups, codes, headers)

    def keep(self, matrices: Mapping[str, Packed]) -> None:
        """Write the file, if a matrix was missing. matrices: all matrices of the program, by name."""
        if not self._missed:
            return
        arrays = {f"{name} {part}": getattr(matrices[name], part) for name in self._weights if name in matrices
                  for part in _PARTS}
        with contextlib.suppress(OSError, NumflowError):  # the file only saves time
            if kept.make_room(self.path, sum(array.nbytes for array in arrays.values())):
                with _LOCK:
                    array_file.write(self.path, arrays)
                self._missed = False


def folder() -> Path:
    """Folder of the prepared files."""
    return kernel_cache.root("prepared")


def _may_be_kept(weight: Weight) -> bool:
    """Whether a weight is a quantised matrix of one stored type that is packed without expansion."""
    if len(weight.shape) < 2 or len(set(weight.types)) != 1:
        return False
    return not is_computed(weight) and not _scheme(weight).is_float


def _scheme(weight: Weight, spread: bool = False) -> Scheme:
    return scheme_of(kept_as(weight.types[0], weight.shape[-1]), spread)


def _matrix(weight: Weight) -> tuple[int, int]:
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _sizes(weight: Weight, spread: bool) -> tuple[int, int]:
    """Bytes of codes and headers."""
    rows, columns = _matrix(weight)
    codes, headers = _scheme(weight, spread).tile_bytes(columns)
    tiles = weight.groups * tiles_of(rows // weight.groups)
    return tiles * codes, tiles * headers


def _describe(weight: Weight) -> str:
    """Everything that a packed matrix depends on, except the content of the tensors."""
    parts = [(part.tensor, part.rows if part.rows is None or isinstance(part.rows, range)
              else kept.digest([np.asarray(part.rows, np.int64).tobytes()]), part.columns) for part in weight.parts]
    return repr((weight.name, weight.shape, weight.groups, weight.types, parts))


@functools.cache
def _packer() -> str:
    """The versions of all code that packed arrays depend on."""
    return " ".join(kernel_cache.fingerprint(module) for module in (__name__, *KERNELS))
