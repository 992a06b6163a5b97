"""Reader of torch checkpoints (.bin, .pt, .pth) without torch, and without executing code from the file.

    zip format     an uncompressed zip: NAME/data.pkl, and each storage as NAME/data/KEY
    older format   consecutive pickles: a magic number, the protocol, facts about the machine, the object, the list of
                   storage keys; then for each key a count (i64) and the elements
"""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.formats.checkpoint import Tensor
from numflow.formats.mapped import MappedFile, show
from numflow.formats.pickle_machine import MAX_BYTES, Machine
from numflow.formats.pickle_torch import KNOWN, Storage, StoredTensor, storage, to_tensor
from numflow.formats.zipped import ZipMember, entries

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
# Keys under which training programs store the state dict.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "weights")
_ZIP = b"PK\x03\x04"


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. One level of nesting, {"model": {...}}, is removed.

    Tensors with a common storage are views of the same mapped bytes. Other values are ignored.

    Raises:
        UnsafePickleError: the file requests other globals than tensors; `requested` lists them.
        FormatError: damaged, truncated, compressed, big-endian, or without tensors.
    """
    file = MappedFile(path)
    root, starts = _Reader(file).load()
    tensors: dict[str, Tensor] = {}
    for name, stored in _state(file, root).items():
        file.check_name(name, tensors)
        if stored.storage.key not in starts:
            raise file.fail(f"tensor {show(name)}: its storage {show(stored.storage.key)} is not in the file")
        tensors[name] = to_tensor(file, name, stored, starts[stored.storage.key])
    return tensors


def _state(file: MappedFile, root: Any) -> dict[str, StoredTensor]:
    """The state dict in the unpickled object."""
    if not isinstance(root, dict):
        raise file.fail(f"expected a dictionary of tensors, got {type(root).__name__}")
    for key in WRAPPERS:
        if isinstance(root.get(key), dict) and (found := _tensors_of(root[key])):
            return found
    if found := _tensors_of(root):
        return found
    # By identity: many keys may refer to one large dictionary.
    nested = {id(value): key for key, value in root.items() if isinstance(value, dict)}
    filled = {key: found for key in nested.values() if (found := _tensors_of(root[key]))}
    if len(filled) != 1:
        raise file.fail(f"tensors are in several dictionaries: {show(list(filled))}" if filled else
                        "there are no tensors in it")
    return next(iter(filled.values()))


def _tensors_of(values: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in values.items() if isinstance(value, StoredTensor)}


class _Reader:
    """Reader of a file's pickles; collects the storages and globals that they name."""

    def __init__(self, file: MappedFile):
        self.file = file
        self.storages: dict[str, Storage] = {}
        self.requested: dict[str, None] = {}

    def load(self) -> tuple[Any, dict[str, int]]:
        """The unpickled object, and the file offset of each storage."""
        return self._zip() if self.file.bytes(0, 4) == _ZIP else self._legacy()

    def _run(self, start: int, end: int) -> tuple[Any, int]:
        """The value of the pickle at `start`, and its end position."""
        machine = Machine(self.file, start, end, KNOWN, self._storage)
        try:
            return machine.run(), machine.position
        finally:
            self.requested |= machine.requested

    def _storage(self, key: Any) -> Storage:
        whole, part = storage(key)
        if self.storages.setdefault(whole.key, whole) != whole:
            raise ValueError(f"storage {show(whole.key)} is described in two ways")
        return part

    def _zip(self) -> tuple[Any, dict[str, int]]:
        found = entries(self.file)
        pickles = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self.file.fail("a zip file, but not a torch checkpoint: NAME/data.pkl is not in it")
        prefix = pickles[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in found or any(name.startswith(f"{prefix}code/") for name in found):
            raise self.file.fail("a TorchScript program, not a checkpoint: save its state_dict")
        self._check_byte_order(found.get(f"{prefix}byteorder"))
        entry = found[pickles[0]]
        if entry.size > MAX_BYTES:
            raise self.file.fail(f"data.pkl has {entry.size} bytes, at most {MAX_BYTES} are read")
        root, _ = self._run(entry.start, entry.start + entry.size)
        if zlib.crc32(self.file.bytes(entry.start, entry.size)) != entry.crc:
            raise self.file.fail("data.pkl does not have its checksum: the file is damaged")
        starts = {}
        for key, stored in self.storages.items():
            data = found.get(f"{prefix}data/{key}")
            if data is None:
                raise self.file.fail(f"storage {show(key)} is not in the zip file")
            if data.size < stored.nbytes:
                raise self.file.fail(f"storage {show(key)}: {stored.count} x {stored.kind} takes {stored.nbytes} "
                                     f"bytes, the zip file has {data.size}")
            starts[key] = data.start
        return root, starts

    def _check_byte_order(self, entry: ZipMember | None) -> None:
        order = b"little" if entry is None else self.file.bytes(entry.start, min(entry.size, 16))
        if order != b"little":
            raise self.file.fail(f"byte order {order!r}; only little-endian checkpoints are read")

    def _legacy(self) -> tuple[Any, dict[str, int]]:
        size = self.file.size
        magic, position = self._run(0, size)
        if magic != MAGIC_NUMBER:
            raise self.file.fail("a pickle, but not a torch checkpoint")
        version, position = self._run(position, size)
        if version != LEGACY_PROTOCOL:
            raise self.file.fail(f"torch protocol {show(version)}, expected {LEGACY_PROTOCOL}")
        machine, position = self._run(position, size)
        if not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise self.file.fail("it does not say that its numbers are little-endian; only such checkpoints are read")
        root, position = self._run(position, size)
        keys, position = self._run(position, size)
        if not isinstance(keys, list):
            raise self.file.fail(f"expected the list of storages, got {type(keys).__name__}")
        return root, self._legacy_storages(keys, position)

    def _legacy_storages(self, keys: list[Any], position: int) -> dict[str, int]:
        starts: dict[str, int] = {}
        for key in keys:
            stored = self.storages.get(key) if isinstance(key, str) else None
            if stored is None or key in starts:
                raise self.file.fail(f"the list of storages has one that no tensor uses, or one twice: {show(key)}")
            count = int.from_bytes(self.file.bytes(position, 8), "little", signed=True)
            position += 8
            if count != stored.count or position + stored.nbytes > self.file.size:
                raise self.file.fail(f"storage {show(key)}: {stored.count} elements expected at byte {position}, found "
                                     f"{count} (is the file truncated?)")
            starts[key] = position
            position += stored.nbytes
        return starts
