"""Session files: keys, values and states of texts that have run, for another process.

A safetensors file. Its metadata "numflow-session" is a JSON object:
    version   1
    model     identity of the model (identity.py); the file is refused for another model
    roots     roots of the texts in the prefix cache: everything but tokens that keys and values depend on
    note      note of the caller
Texts are a tree of full blocks, as in the prefix cache (engine/schedule/prefix.py): node n has the tokens ids[n] after
those of its parent parents[n] < n; parents -1, -2, ... are the roots 0, 1, ...
    parents I32 [N]    ids I32 [N, tokens of a block]    text I32 [T], all tokens of a single text
    rows.P I32 [R]     nodes with a block in pool P (a window of attention, or the states)
    data.P.K U8 [r, bytes of a block]    content of these blocks, in pieces
    sums U8            JSON: a checksum of the metadata and of each tensor
The file is data: nothing in it is executed, and sizes are checked against the file before anything is allocated.
"""

import json
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from numflow.errors import FormatError, NumflowError, RequestError
from numflow.formats import safetensors
from numflow.formats.checkpoint import Tensor
from numflow.formats.kept import checksum, piece_sum, pieces
from numflow.formats.mapped import show
from numflow.formats.writer import TensorEntry, write

KEY, VERSION = "numflow-session", 1
PIECE_BLOCKS = 64  # blocks of one data tensor


@dataclass(frozen=True)
class TextTree:
    """Texts as a tree of blocks, without the content of the blocks.

    roots: roots of the texts. parents: int32 [N]. ids: int32 [N, tokens of a block]. rows: for each pool, the nodes
    with a block in the pool, int32 [R]. text: int32 [T].
    """

    roots: Sequence[Hashable]
    parents: np.ndarray
    ids: np.ndarray
    rows: Sequence[np.ndarray]
    text: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def tokens(self) -> int:
        """Number of tokens of all nodes."""
        return self.ids.size


def save(path: Path, model: Mapping[str, Any], tree: TextTree, sizes: Sequence[int],
         read: Callable[[int, int, int], np.ndarray], note: Any = None) -> None:
    """Write a session file, atomically.

    sizes: bytes of a block of each pool. read: (pool, begin, end) -> content of these blocks, uint8 [n, size].

    Raises:
        RequestError: the file cannot be written.
    """
    metadata = json.dumps({"version": VERSION, "model": model, "roots": [_plain(root) for root in tree.roots],
                           "note": note})
    sums: dict[str, int] = {"": zlib.crc32(metadata.encode())}
    names = [("parents", tree.parents), ("ids", tree.ids), ("text", tree.text),
             *((f"rows.{pool}", rows) for pool, rows in enumerate(tree.rows))]
    entries = [_summed(name, "I32", array.shape, partial(np.asarray, array), sums) for name, array in names]
    for pool, (rows, size) in enumerate(zip(tree.rows, sizes, strict=True)):
        for begin in range(0, len(rows), PIECE_BLOCKS):
            end = min(begin + PIECE_BLOCKS, len(rows))
            entries.append(_summed(_piece(pool, begin), "U8", (end - begin, size),
                                   partial(read, pool, begin, end), sums))
    size = len(json.dumps({entry.name: 0xffffffff for entry in entries})) + 32  # maximum size of the checksums
    entries.append(TensorEntry("sums", "U8", (size,), size, lambda: np.frombuffer(
        json.dumps(sums).encode().ljust(size), np.uint8)))
    write(path, entries, {KEY: metadata}, kept=True)


def _summed(name: str, dtype: str, shape: tuple[int, ...], read: Callable[[], np.ndarray],
            sums: dict[str, int]) -> TensorEntry:
    """An entry that stores its checksum in `sums` when it is written."""
    def summed() -> np.ndarray:
        data = np.ascontiguousarray(read())
        sums[name] = _sum(data)
        return data

    return TensorEntry(name, dtype, shape, int(np.prod(shape)) * (4 if dtype == "I32" else 1), summed)


def _sum(array: np.ndarray) -> int:
    return checksum(map(piece_sum, pieces(array.reshape(-1).view(np.uint8))))


def _piece(pool: int, begin: int) -> str:
    return f"data.{pool}.{begin // PIECE_BLOCKS}"


class SessionFile:
    """A session file, checked except for the content of blocks, which `block_data` checks.

    model, note: as saved. tree: the texts.

    Raises:
        RequestError: the file is missing, no session or damaged; the message names the file and the reason.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self._tensors, metadata = safetensors.read_with_metadata(self.path)
            text = metadata.get(KEY)
            if text is None:
                raise self._fail(f"no session: a safetensors file without {KEY!r} in its metadata")
            self._sums = self._read_sums()
            if zlib.crc32(text.encode()) != self._sums.get(""):
                raise self._fail("damaged: its metadata are not as they were written")
            found = json.loads(text)
            if found["version"] != VERSION:
                raise self._fail(f"a session of version {show(found['version'])}; this numflow reads {VERSION}")
            self.model, self.note, self._roots = found["model"], found["note"], found["roots"]
            self.tree = self._read_tree()
        except RequestError:
            raise
        except FormatError as error:
            raise RequestError(str(error)) from None
        except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
            raise self._fail(f"damaged: {type(error).__name__} {show(str(error))}") from None

    def _fail(self, what: str) -> RequestError:
        return RequestError(f"{self.path}: {what}")

    def _read_sums(self) -> dict[str, int]:
        stored = self._tensor("sums", "U8", (None,))
        return json.loads(bytes(stored.raw().reshape(-1)))

    def _tensor(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> Tensor:
        """Tensor `name`, checked for type and shape (None: any size)."""
        found = self._tensors.get(name)
        if found is None:
            raise self._fail(f"damaged: it has no {name!r}")
        right = len(found.shape) == len(shape) and all(want in (None, size) for want, size in zip(shape, found.shape))
        if found.type.name != dtype or not right:
            raise self._fail(f"damaged: {name!r} is {found.type.name} {list(found.shape)}")
        return found

    def _array(self, name: str, shape: tuple[int | None, ...], dtype: str = "I32") -> np.ndarray:
        """Content of a tensor, checked against its checksum."""
        found = self._tensor(name, dtype, shape)
        data = found.raw().reshape(-1)
        if _sum(data) != self._sums.get(name):
            raise self._fail(f"damaged: {name!r} is not as it was written")
        return (data.view(np.int32) if dtype == "I32" else data).reshape(found.shape)

    def _read_tree(self) -> TextTree:
        ids = self._array("ids", (None, None))
        count = len(ids)
        parents, pools = self._array("parents", (count,)), 0
        while f"rows.{pools}" in self._tensors:
            pools += 1
        rows = [self._array(f"rows.{pool}", (None,)) for pool in range(pools)]
        if not isinstance(self._roots, list) or (count and not ids.shape[1]):
            raise self._fail("damaged: no roots, or blocks without tokens")
        if (parents >= np.arange(count)).any() or (parents < -len(self._roots)).any():
            raise self._fail("damaged: the parent of a block is not before the block")
        for nodes in rows:
            if len(nodes) and ((nodes < 0).any() or (nodes >= count).any() or (np.diff(nodes) <= 0).any()):
                raise self._fail("damaged: rows that belong to no block")
        return TextTree([_hashable(root) for root in self._roots], parents, ids, rows, self._array("text", (None,)))

    def block_data(self, pool: int, size: int, begin: int, end: int) -> np.ndarray:
        """Content of blocks `begin` .. `end` - 1 of a pool (one piece), uint8 [n, size].

        Raises:
            RequestError: the checksum does not match.
        """
        try:
            return self._array(_piece(pool, begin), (end - begin, size), "U8")
        except NumflowError as error:
            raise RequestError(str(error)) from None


def _plain(root: Hashable) -> Any:
    """Convert tuples to lists, for JSON."""
    return [_plain(item) for item in root] if isinstance(root, tuple) else root


def _hashable(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{type(value).__name__} in a root")
    return value
