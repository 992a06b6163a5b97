"""tokenizer.json, by the `tokenizers` package: BPE, unigram and WordPiece, whatever the file describes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.tokenizer import wrapping
from numflow.tokenizer.pieces import piece_rule
from numflow.tokenizer.pretokenize import faster
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import SideFiles
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import LibraryVocabulary, library_errors


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer a tokenizer.json describes.

    Raises:
        FormatError: the file cannot be read or is no tokenizer.json.
        TokenizerError: its decoder is not supported.
    """
    from tokenizers import Tokenizer as Library

    with library_errors(f"{path}: not a tokenizer.json"):
        library = Library.from_file(str(path))
        if library.pre_tokenizer is not None:
            library.pre_tokenizer = faster(library.pre_tokenizer)
    return of_library(library, SideFiles(checkpoint), options, str(path))


def of_library(library: Any, side: SideFiles, options: Mapping[str, Any], where: str) -> Tokenizer:
    """A Tokenizer around a `tokenizers.Tokenizer` that is complete with its decoder and post-processor."""
    decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    vocabulary = LibraryVocabulary(library, piece_rule(decoder), where)
    given = side.roles()
    if given["unk"] is None:
        given["unk"] = getattr(library.model, "unk_token", None)
    roles = resolve(vocabulary, given, options, side.end_ids())
    wanted = {key: options.get(key, side.flag(f"{key}_token")) for key in ("add_bos", "add_eos")}
    with library_errors(where):
        around = wrapping.of_library(library).changed(roles.bos, roles.eos, **wanted)
    return Tokenizer(vocabulary, roles, around, options.get("chat_template", side.chat_template()))
