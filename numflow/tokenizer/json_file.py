"""tokenizer.json, by the `tokenizers` package: BPE, unigram or WordPiece."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, quoted
from numflow.tokenizer import wrapping
from numflow.tokenizer.pieces import piece_rule
from numflow.tokenizer.pretokenize import faster
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import MAX_ID, SideFiles, read_bytes
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import LibraryVocabulary, library_errors

_LONG_NUMBER = re.compile(rb":\s*[0-9]{8}")  # such an id would make the library allocate that many entries


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a tokenizer.json.

    Raises:
        FormatError: the file cannot be read or is no tokenizer.json.
        TokenizerError: its decoder is not supported, or a token type is out of range.
    """
    from tokenizers import Tokenizer as Library

    data = read_bytes(path)
    with library_errors(f"{path}: not a tokenizer.json"):
        library = Library.from_buffer(data)
        if _LONG_NUMBER.search(data) and (id := max(library.get_vocab().values(), default=0)) >= MAX_ID:
            raise FormatError(f"{path}: token {quoted(library.id_to_token(id))} has id {id}; "
                              f"expected less than {MAX_ID}")
        if library.pre_tokenizer is not None:
            library.pre_tokenizer = faster(library.pre_tokenizer)
    return of_library(library, SideFiles(checkpoint), options, str(path))


def of_library(library: Any, side: SideFiles, options: Mapping[str, Any], where: str) -> Tokenizer:
    """A Tokenizer for a `tokenizers.Tokenizer` with decoder and post-processor."""
    decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
    vocabulary = LibraryVocabulary(library, piece_rule(decoder), where)
    given = side.roles()
    if given["unk"] is None:
        given["unk"] = getattr(library.model, "unk_token", None)
    roles = resolve(vocabulary, given, options, side.end_ids())
    wanted = {key: options.get(key, side.flag(f"{key}_token")) for key in ("add_bos", "add_eos")}
    with library_errors(where):
        around = wrapping.of_library(library, where).changed(roles.bos, roles.eos, **wanted)
    return Tokenizer(vocabulary, roles, around, options.get("chat_template", side.chat_template()))
