"""A model folder as published on model hubs: weight files, configuration and tokenizer files."""

import re
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, ModelNotFoundError
from numflow.formats.mapped import read_json, show

# role: file names; the first existing file counts
SIDE_FILES = {
    "config": ("config.json",),
    "generation_config": ("generation_config.json",),
    "tokenizer.json": ("tokenizer.json",),
    "tokenizer_config": ("tokenizer_config.json",),
    "special_tokens_map": ("special_tokens_map.json",),
    "added_tokens": ("added_tokens.json",),
    "tokenizer.model": ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
                        "spm.model"),
    "source.spm": ("source.spm",),
    "target.spm": ("target.spm",),
    "vocab.json": ("vocab.json",),
    "merges.txt": ("merges.txt",),
    "vocab.txt": ("vocab.txt",),
    "chat_template": ("chat_template.jinja", "chat_template.json"),
    "modules": ("modules.json",),
    "pooling": ("1_Pooling/config.json",),
}

# Weight files in order of preference: a single file, an index of shards, the shards.
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SHARDS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
_LOOSE = (".bin", ".pt", ".pth", ".ckpt")
_NO_WEIGHTS = re.compile(r"(tok|training_args|optimizer|scheduler|scaler|rng_state).*", re.IGNORECASE)
CONTAINER = "numflow container"
_GGUF_SPLIT = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")


def side_files(folder: Path) -> dict[str, Path]:
    """Configuration and tokenizer files of a folder, by role."""
    found = {}
    for role, names in SIDE_FILES.items():
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is not None:
            found[role] = path
    if tokenizer := _llama2c_tokenizer(folder):
        found["tokenizer.bin"] = tokenizer
    return found


def _llama2c_tokenizer(folder: Path) -> Path | None:
    """tokenizer.bin, else a single tok*.bin."""
    if (folder / "tokenizer.bin").is_file():
        return folder / "tokenizer.bin"
    found = [p for p in folder.glob("tok*.bin") if p.is_file()]
    return found[0] if len(found) == 1 else None


def find_weights(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files of a folder, and the file of each tensor by the index ({} without one).

    Files written by numflow count only if there are no others, because they are often kept beside the model.

    Raises:
        FormatError: a wrong index, or several models.
        ModelNotFoundError: no weights.
    """
    for single, shards in zip(_SINGLE, _SHARDS):
        if (folder / single).is_file():
            return [folder / single], {}
        index = folder / f"{single}.index.json"
        if index.is_file():
            return read_index(index)
        if found := [p for p in _files(folder, shards) if not made_here(p)]:
            return found, {}
    if found := _files(folder, "*.gguf"):
        return [_one_gguf(folder, found)], {}
    loose = [p for p in _files(folder, "*") if p.suffix in _LOOSE and not _NO_WEIGHTS.fullmatch(p.name)]
    found = loose or [p for p in _files(folder, "*.safetensors") if made_here(p) == CONTAINER]
    if len(found) == 1:
        return found, {}
    if found:
        raise FormatError(f"{folder}: several models, name one: {', '.join(p.name for p in found)}")
    raise ModelNotFoundError(f"{folder}: no weights here (looked for {', '.join(_SHARDS)} and *{', *'.join(_LOOSE)})")


def index_of(path: Path) -> Path | None:
    """The index beside a weight file that lists the file as one of its shards."""
    for single in _SINGLE:
        index = path.parent / f"{single}.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if isinstance(weight_map, dict) and path.name in weight_map.values():
                return index
    return None


def read_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards of an index, sorted by name, and the file of each tensor.

    Raises:
        FormatError: no weight_map, a wrong file name, or a missing file.
    """
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: weight_map must be an object of tensor and file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name or name in (".", "..") or set(name) & set("/\\\0:"):
            raise FormatError(f"{path}: weight_map {show(tensor)}: {show(name)} is not the name of a file beside it")
    paths = [path.with_name(name) for name in sorted(set(weight_map.values()))]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise FormatError(f"{path}: {len(missing)} of {len(paths)} files are missing, the first is {show(missing[0])}")
    return paths, weight_map


def made_here(path: Path) -> str:
    """Kind of a file written by numflow: CONTAINER or another; "" for files of other programs."""
    from numflow.formats import container, safetensors

    try:
        metadata = safetensors.read_with_metadata(path)[1]
    except FormatError:  # another format, or damaged: opening it reports the error
        return ""
    kind = CONTAINER if container.is_container(metadata) else metadata.get("kind", "")
    return kind if kind.startswith("numflow") else ""


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if p.is_file() and not p.name.startswith("."))


def _one_gguf(folder: Path, found: list[Path]) -> Path:
    """The single model among GGUF files. Parts of a split model count as one; adapters etc. are no models."""
    def stems(paths: list[Path]) -> set[str]:
        return {match[1] if (match := _GGUF_SPLIT.fullmatch(p.name)) else p.name for p in paths}

    if len(stems(found)) > 1:
        found = [path for path in found if not _is_no_model(path)] or found
    if len(stems(found)) > 1:
        raise FormatError(f"{folder}: several models, name one: {', '.join(p.name for p in found)}")
    return found[0]


def _is_no_model(path: Path) -> bool:
    """Whether a GGUF file is no model; damaged files count as models."""
    from numflow.formats import gguf

    try:
        return bool(gguf.no_model(gguf.read_file(path)[1]))
    except FormatError:  # opening it reports the error
        return False
