"""Choice of the tokenizer file of a checkpoint."""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from numflow.errors import TokenizerError, did_you_mean, quoted
from numflow.tokenizer.names import names
from numflow.tokenizer.tokenizer import ROLES, Tokenizer

# Options of a spec's [tokenizer] section -> type of the value.
OPTIONS = {"file": str, "kind": str, "pre": str, "keep_space_after": str, "add_bos": bool, "add_eos": bool,
           **dict.fromkeys(ROLES, str), "chat_template": str, "language_codes": list, "added_tokens": dict}

# Tokenizer file -> (files required with it, module that reads it). In order of preference.
READERS = {
    "tokenizer.json": ((), "json_file"),
    "tokenizer.model": ((), "sentencepiece_file"),
    "source.spm": (("vocab.json",), "sentencepiece_file"),
    "vocab.json": (("merges.txt",), "bpe_files"),
    "vocab.txt": ((), "wordpiece_file"),
    "tokenizer.bin": ((), "scored_file"),
}
_BY_SUFFIX = {".json": "tokenizer.json", ".model": "tokenizer.model", ".spm": "source.spm", ".txt": "vocab.txt",
              ".bin": "tokenizer.bin"}


def load_tokenizer(checkpoint: Any, options: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint.

    checkpoint: a numflow.formats.checkpoint.Checkpoint (its path, format, naming, config and files are used).
    options:    the [tokenizer] section of a spec (OPTIONS); missing options are detected.

    Raises:
        TokenizerError: there is no tokenizer (the message lists the files looked for), it is of an unsupported
            kind, or an option does not fit.
        FormatError: a tokenizer file is broken.
    """
    options = _checked(options or {})
    in_metadata = checkpoint.naming == "gguf" and "tokenizer.ggml.model" in checkpoint.config
    if options.get("kind") == "gguf" or (in_metadata and not {"kind", "file"} & options.keys()):
        from numflow.tokenizer import gguf_vocabulary

        return gguf_vocabulary.load(checkpoint.config, options, str(checkpoint.path))
    role, path = _chosen(checkpoint, options)
    reader = import_module(f"numflow.tokenizer.{READERS[role][1]}")
    return reader.load(path, checkpoint, options)


def named_file(checkpoint: Any, name: str) -> Path:
    """The file named by a spec, in the model's folder or attached to the model's file.

    Raises:
        TokenizerError: there is no such file, or the name leads out of the folder.
    """
    # Refuse path separators and drive letters of all systems: an untrusted model must not choose files outside.
    if {"..", ""} & set(re.split(r"[\\/]", name)) or ":" in name or "\0" in name:
        raise TokenizerError(f"[tokenizer] file: {quoted(name)} is not the name of a file in the model's folder")
    path = checkpoint.folder / name
    if not path.is_file():
        raise TokenizerError(f"[tokenizer] file: no file {path}")
    return path


def _chosen(checkpoint: Any, options: Mapping[str, Any]) -> tuple[str, Path]:
    """Role and path of the chosen tokenizer file."""
    role = names()["kinds"][options["kind"]] if "kind" in options else None
    if "file" in options:
        path = named_file(checkpoint, options["file"])
        role = role or _BY_SUFFIX.get(path.suffix)
        if role is None:
            raise TokenizerError(f"[tokenizer] file: cannot tell what {path.name!r} is; set `kind` to one of "
                                 f"{', '.join(names()['kinds'])}")
        return role, path
    for candidate in (role,) if role else READERS:
        if candidate in checkpoint.files and all(other in checkpoint.files for other in READERS[candidate][0]):
            return candidate, Path(checkpoint.files[candidate])
    wanted = [" with ".join((name, *READERS[name][0])) for name in ((role,) if role else READERS)]
    raise TokenizerError(f"{checkpoint.path}: no tokenizer: looked for {', '.join(wanted)}; "
                         "name a file with `file` in the spec's [tokenizer] section")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are set, checked; None, "" and kind "auto" mean detection."""
    options = {key: value for key, value in options.items()
               if value is not None and value != "" and (key, value) != ("kind", "auto")}
    for key, value in options.items():
        if key not in OPTIONS:
            raise TokenizerError(f"[tokenizer] {key}: no such option{did_you_mean(key, OPTIONS)}")
        if not isinstance(value, OPTIONS[key]):
            raise TokenizerError(f"[tokenizer] {key}: should be of type {OPTIONS[key].__name__}, is {quoted(value)}")
    kinds = (*names()["kinds"], "gguf")
    if options.get("kind", "gguf") not in kinds:
        raise TokenizerError(f"[tokenizer] kind: {quoted(options['kind'])} is unknown"
                             f"{did_you_mean(options['kind'], kinds)}")
    return options
