"""Which of a checkpoint's files describes its tokenizer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numflow.errors import TokenizerError, did_you_mean
from numflow.tokenizer.tokenizer import Tokenizer

OPTIONS = {"file": str, "kind": str, "pre": str, "add_bos": bool, "add_eos": bool, "bos": str, "eos": str, "unk": str,
           "pad": str, "mask": str, "sep": str, "cls": str, "chat_template": str, "language_codes": list,
           "added_tokens": dict}


def load_tokenizer(checkpoint: Any, options: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint.

    checkpoint: a numflow.formats.checkpoint.Checkpoint (its path, format, naming, config and files are used).
    options:    the [tokenizer] section of a spec (OPTIONS); what is absent is found out.

    Raises:
        TokenizerError: there is no tokenizer (the message lists the files looked for), it is of an unsupported
            kind, or an option does not fit.
        FormatError: a tokenizer file is broken.
    """
    options = _checked(options or {})
    where = str(checkpoint.path)
    if options.get("kind", checkpoint.format) == "gguf":
        from numflow.tokenizer import gguf_vocabulary

        return gguf_vocabulary.load(checkpoint.config, options, where)
    from numflow.tokenizer import json_file
    from numflow.tokenizer.side_files import SideFiles
    return json_file.load(Path(checkpoint.files["tokenizer.json"]), SideFiles(checkpoint), options)


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in options.items():
        if key not in OPTIONS:
            raise TokenizerError(f"[tokenizer] {key}: no such option{did_you_mean(key, OPTIONS)}")
        if not isinstance(value, OPTIONS[key]):
            raise TokenizerError(f"[tokenizer] {key}: should be a {OPTIONS[key].__name__}, is {value!r}")
    return dict(options)
