"""Checkpoints of any format behind one interface: `open_checkpoint(path) -> Checkpoint`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow import places
from numflow.errors import FormatError, ModelNotFoundError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TensorType

__all__ = ["Checkpoint", "Tensor", "TensorType", "detect", "open_checkpoint"]

# First bytes of files that users mistake for weights, and messages.
_NOT_WEIGHTS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"<", "a web page, not weights: the download did not work"),
    (b"{", "a JSON file, not weights: give the folder it is in"),
    (b"lmgg", "an old GGML file: convert the model to GGUF"),
    (b"fmgg", "an old GGML file: convert the model to GGUF"),
    (b"tjgg", "an old GGML file: convert the model to GGUF"),
    (b"\x89HDF", "an HDF5 file: convert the model to safetensors"),
    (b"\x93NUMPY", "a NumPy file, not a checkpoint"),
)


def detect(path: Path) -> str:
    """The format of a weight file, from its content: "safetensors", "gguf", "llama2c" or "pickle".

    Raises:
        FormatError: none of them.
    """
    from numflow.formats import llama2c
    from numflow.formats.mapped import MappedFile

    file = MappedFile(path)
    head = file.bytes(0, 32)
    if head[5:9] == b"\0\0\0{":  # a header length below 2^40, then JSON
        return "safetensors"
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith(llama2c.MAGIC) or llama2c.is_legacy(file):
        return "llama2c"
    if head.startswith(b"PK\x03\x04") or (head[:1] == b"\x80" and 2 <= head[1] <= 5):
        return "pickle"
    for start, message in _NOT_WEIGHTS:
        if head.startswith(start):
            raise file.fail(message)
    raise file.fail(f"not a checkpoint of a known format (safetensors, GGUF, torch, llama2.c); it begins with "
                    f"{head[:16]!r}")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model: a weight file, or a folder as published on model hubs. Tensors are read when asked for.

    In a folder, safetensors files are preferred to pickles, and pickles to GGUF. With a weight file, the configuration
    and tokenizer files beside the file are found too. A shard that an index lists opens all shards.

    Raises:
        ModelNotFoundError: nothing there, or no weights.
        FormatError: the files are damaged or not supported.
        UnsafePickleError: a pickle requests other objects than tensors.
    """
    try:
        return _open(places.expanded(path))
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {error}") from None


def _is_there(path: Path) -> bool:
    """Whether there is such a file or folder.

    Raises:
        OSError: the name is invalid (Path.exists hides this since Python 3.14), or access is denied.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def _open(path: Path) -> Checkpoint:
    from numflow.formats import folder

    if path.is_dir():
        paths, weight_map = folder.find_weights(path)
    elif not _is_there(path):
        raise ModelNotFoundError(f"{path}: no such file or folder")
    elif detect(path) in ("safetensors", "pickle") and (index := folder.index_of(path)):
        paths, weight_map = folder.read_index(index)
    else:
        paths, weight_map = [path], {}
    formats = {detect(p) for p in paths}
    if len(formats) > 1:
        raise FormatError(f"{path}: the weight files are of different formats: {', '.join(sorted(formats))}")
    return _OPEN[formats.pop()](path, paths, weight_map)


def _open_gguf(path: Path, paths: list[Path], weight_map: Mapping[str, str]) -> Checkpoint:
    from numflow.formats import folder, gguf

    tensors, metadata, files = gguf.read(paths[0])
    if message := gguf.no_model(metadata):
        raise FormatError(f"{paths[0]}: {message}")
    # If the file has a vocabulary, files beside it are ignored: they may belong to another model.
    beside = {} if "tokenizer.ggml.tokens" in metadata else folder.side_files(files[0].parent)
    return Checkpoint(path, "gguf", "gguf", tensors, metadata, {**beside, "weights": files})


def _open_llama2c(path: Path, paths: list[Path], weight_map: Mapping[str, str]) -> Checkpoint:
    from numflow.formats import folder, llama2c

    tensors, config = llama2c.read(paths[0])
    tokenizer = {r: p for r, p in folder.side_files(paths[0].parent).items() if r.startswith("tokenizer.")}
    return Checkpoint(path, "llama2c", "llama2c", tensors, config, {**tokenizer, "weights": paths})


def _open_hub(kind: str):
    def open_files(path: Path, paths: list[Path], weight_map: Mapping[str, str]) -> Checkpoint:
        from importlib import import_module

        from numflow.formats import folder
        from numflow.formats.mapped import read_json
        from numflow.formats.quantised.view import readable

        read = import_module(f"numflow.formats.{kind}").read
        shards = {p: read(p) for p in paths}
        stored = _merge(shards, weight_map)
        files: dict[str, Any] = folder.side_files(paths[0].parent)
        config = read_json(files["config"]) if "config" in files else {}
        tensors, config, method = readable(
            config, stored, paths[0].parent, lambda name: next(p for p in paths if shards[p].get(name) is stored[name]))
        return Checkpoint(path, kind, "hf", tensors, config, {**files, "weights": paths}, quantised=method)

    return open_files


def _merge(shards: Mapping[Path, Mapping[str, Tensor]], weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors of all shards; the index decides which shard a tensor is read from."""
    merged: dict[str, Tensor] = {}
    for path, tensors in shards.items():
        for name, tensor in tensors.items():
            if weight_map and weight_map.get(name) != path.name:
                continue
            if name in merged:
                raise FormatError(f"{path}: tensor {name!r} is in another file of this model too")
            merged[name] = tensor
    for name, file in weight_map.items():
        if name not in merged:
            raise FormatError(f"{file}: the index says that tensor {name!r} is in this file, but it is not")
    return merged


def _open_safetensors(path: Path, paths: list[Path], weight_map: Mapping[str, str]) -> Checkpoint:
    from numflow.formats import container, safetensors

    if len(paths) == 1:
        tensors, metadata = safetensors.read_with_metadata(paths[0])
        if container.is_container(metadata):
            return container.open_container(paths[0], tensors, metadata)
    return _open_hub("safetensors")(path, paths, weight_map)


_OPEN = {
    "safetensors": _open_safetensors,
    "pickle": _open_hub("pickle"),
    "gguf": _open_gguf,
    "llama2c": _open_llama2c,
}
