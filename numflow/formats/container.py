"""numflow's container: a safetensors file with a complete model, its matrices in any tensor type.

Any safetensors reader can open the file. Tensors of types that safetensors lacks are U8 [..., bytes]. The metadata
"numflow", a JSON object, describes them:
    version   1
    naming    the spec table of tensor names: "hf", "gguf" or "llama2c"
    tensors   name -> {"type": "q3h", "shape": [N, K]}
    turned    tensors [..., N, K] that were [..., K, N] in the original model (optional)
    files     path -> role: the attached files, each in the U8 tensor "numflow/PATH"
Two more U8 tensors hold JSON: "numflow/config", the model's configuration, and "numflow/report", how the file was made.
"""

import json
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from numflow.errors import FormatError
from numflow.formats import safetensors
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.mapped import parse_json, show
from numflow.formats.types import tensor_type
from numflow.formats.writer import TensorEntry

KEY, VERSION, PREFIX = "numflow", 1, "numflow/"
CONFIG, REPORT = f"{PREFIX}config", f"{PREFIX}report"
ROLE_OF_NONE = ""  # role of files that are only referenced by other files
_PLAIN = safetensors.DTYPES
_NAMINGS = ("hf", "gguf", "llama2c")


class _Files(dict):
    """Paths by role, in a temporary folder that is removed with this table."""

    folder: Path | None = None


class _Tensors(dict):
    """Tensors of a container by name, with the file's size and modification time at opening."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path, report: Tensor | None):
        super().__init__(tensors)
        facts = path.stat()
        self.report, self.size, self.date = report, facts.st_size, facts.st_mtime_ns


@dataclass(frozen=True)
class Attached:
    """A file attached to a model: its path, its name inside the container, its role ("" for none)."""

    path: Path
    name: str
    role: str


def is_container(metadata: Mapping[str, str]) -> bool:
    """Whether a safetensors file with this metadata is a container."""
    return KEY in metadata


def open_container(path: Path, stored: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
    """Open a container. stored: its tensors as safetensors returns them.

    Raises:
        FormatError: metadata and tensors are inconsistent.
    """
    info = parse_json(metadata[KEY].encode(), f"{path}: metadata {KEY}")
    if info.get("version") != VERSION or info.get("naming") not in _NAMINGS:
        raise FormatError(f"{path}: metadata {KEY}: version {show(info.get('version'))} with naming "
                          f"{show(info.get('naming'))}; this numflow reads version {VERSION} with naming "
                          f"{', '.join(_NAMINGS)}")
    types, names = (info.get(key, {}) for key in ("tensors", "files"))
    if not isinstance(types, dict) or not isinstance(names, dict):
        raise FormatError(f"{path}: metadata {KEY}: tensors and files should be objects")
    for name in [*types, *(PREFIX + name for name in names)]:
        if name not in stored:
            raise FormatError(f"{path}: metadata {KEY} names a tensor {show(name)} that is not in the file")
    tensors = {name: _typed(path, tensor, types[name]) if name in types else tensor
               for name, tensor in stored.items() if not name.startswith(PREFIX)}
    for name in _turned(path, info, tensors):
        tensors[name] = replace(tensors[name], turned=True)
    config = parse_json(_text(path, stored, CONFIG), f"{path}: {CONFIG}")
    files = _unpacked(path, stored, names)
    files["weights"] = [path]
    tensors = _Tensors(tensors, path, stored.get(REPORT))
    return Checkpoint(path, "safetensors", info["naming"], tensors, config, files, files.folder)


def identity(checkpoint: Checkpoint) -> str | None:
    """Fingerprint of a container's tensors; None if the tensors were not read from a container.

    A hash of the report, which has a hash of every tensor, and the file's size and modification time.
    """
    tensors = checkpoint.tensors
    if not isinstance(tensors, _Tensors) or tensors.report is None:
        return None
    report = tensors.report.raw().tobytes()
    return f"{zlib.crc32(report):08x}{zlib.adler32(report):08x}-{tensors.size:x}-{tensors.date:x}"


def read_report(path: Path) -> dict[str, Any]:
    """The report of a container: how each of its tensors was quantised.

    Raises:
        FormatError: the file is no container, or its report is damaged.
    """
    from numflow.formats import detect

    if (kind := detect(Path(path))) != "safetensors":
        raise FormatError(f"{path}: a file of {kind}, which carries no report; those of `numflow quantize` that do not "
                          f"end in .gguf do" + ("; --against SRC compares it with the model it was made of"
                                                if kind == "gguf" else ""))
    stored, metadata = safetensors.read_with_metadata(Path(path))
    if not is_container(metadata):
        raise FormatError(f"{path}: a safetensors file, but not one that `numflow quantize` made")
    return parse_json(_text(path, stored, REPORT).strip(), f"{path}: {REPORT}")


def _text(path: Path, stored: Mapping[str, Tensor], name: str) -> bytes:
    if name not in stored or stored[name].type.name != "U8":
        raise FormatError(f"{path}: no tensor {name!r} of type U8")
    return stored[name].raw().tobytes()


def _turned(path: Path, info: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    names = info.get("turned", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name in tensors for name in names):
        raise FormatError(f"{path}: metadata {KEY}: turned should be a list of names of tensors, is {show(names)}")
    return names


def _typed(path: Path, tensor: Tensor, entry: Any) -> Tensor:
    """A U8 tensor with the type and shape from the metadata."""
    where = f"{path}: tensor {show(tensor.name)}"
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{where}: metadata {KEY}: expected an object with type and shape")
    if not isinstance(entry.get("type"), str):
        raise FormatError(f"{where}: metadata {KEY}: type should be a text, is {show(entry.get('type'))}")
    try:
        kind = tensor_type(entry["type"])
    except FormatError as error:
        raise FormatError(f"{where}: metadata {KEY}: {error}") from None
    if shape[-1] % kind.block:
        raise FormatError(f"{where}: rows of {shape[-1]} are no whole number of {kind.name} blocks of {kind.block}")
    expected = (*shape[:-1], kind.row_bytes(shape[-1]))
    if tensor.type.name != "U8" or tensor.shape != expected:
        raise FormatError(f"{where}: {kind.name} {shape} is stored as U8 {list(expected)}, this is {tensor.type.name} "
                          f"{list(tensor.shape)}")
    return Tensor(tensor.name, tuple(shape), kind, lambda: tensor.raw().reshape(-1, expected[-1]))


def _unpacked(path: Path, stored: Mapping[str, Tensor], names: Mapping[str, Any]) -> _Files:
    """Write attached files to a temporary folder; paths by role. The folder is removed with the returned table."""
    files = _Files()
    if not names:
        return files
    outer = Path(tempfile.mkdtemp(prefix="numflow-"))
    weakref.finalize(files, shutil.rmtree, outer, ignore_errors=True)
    files.folder = folder = outer / path.name  # named in errors
    for name, role in names.items():
        parts = PurePosixPath(name).parts
        if not parts or not isinstance(role, str) or any(p in ("..", "/") or set(p) & set("\\:\0") for p in parts):
            raise FormatError(f"{path}: metadata {KEY}: files: {show(name)} is no file name with a role")
        target, content = folder.joinpath(*parts), _text(path, stored, PREFIX + name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        except OSError as error:
            raise FormatError(f"{path}: {show(name)} cannot be unpacked to {folder}: {error.strerror}") from None
        if role:
            files.setdefault(role, target)
    return files


def entry_of(tensor: Tensor, kind: str, read) -> TensorEntry:
    """Writer entry of a tensor in type `kind`; `read` returns its bytes."""
    row = tensor_type(kind).row_bytes(tensor.columns)
    if kind in _PLAIN:
        return TensorEntry(tensor.name, kind, tensor.shape, tensor.rows * row, read)
    return TensorEntry(tensor.name, "U8", (*tensor.shape[:-1], row), tensor.rows * row, read)


def metadata_of(naming: str, types: Mapping[str, tuple[str, tuple[int, ...]]],
                files: list[Attached], turned: Sequence[str] = ()) -> dict[str, str]:
    """The metadata of a container. types: (type, shape) of each of its tensors."""
    tensors = {name: {"type": kind, "shape": list(shape)} for name, (kind, shape) in types.items()
               if kind not in _PLAIN}
    return {KEY: json.dumps({"version": VERSION, "naming": naming, "tensors": tensors,
                             **({"turned": list(turned)} if turned else {}),
                             "files": {file.name: file.role for file in files}})}


def json_entry(name: str, value: Any) -> TensorEntry:
    """A JSON object as a U8 tensor."""
    return TensorEntry.of(name, np.frombuffer(json.dumps(value).encode(), np.uint8))


def attached(files: Mapping[str, Any]) -> list[Attached]:
    """Files beside a checkpoint to attach: those with a role, and those referenced by modules.json."""
    found = [Attached(Path(path), Path(path).name, role) for role, path in files.items()
             if role not in ("weights", "modules", "pooling", "spec")]
    if "pooling" in files:
        pooling = Path(files["pooling"])
        found.append(Attached(pooling, f"{pooling.parent.name}/{pooling.name}", "pooling"))
    if "modules" in files:
        modules = Path(files["modules"])
        found.append(Attached(modules, modules.name, "modules"))
        inner = [path for folder in sorted(modules.parent.iterdir()) if folder.name[:1].isdigit() and folder.is_dir()
                 for path in sorted(folder.iterdir()) if path.suffix in (".json", ".safetensors", ".bin")]
        beside = [modules.with_name(name) for name in ("sentence_bert_config.json",
                                                       "config_sentence_transformers.json")]
        found += [Attached(path, path.relative_to(modules.parent).as_posix(), ROLE_OF_NONE)
                  for path in (*inner, *beside) if path.is_file()]
    names: dict[str, Attached] = {}
    for file in found:
        names.setdefault(file.name, file)
    return list(names.values())
