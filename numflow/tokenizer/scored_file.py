"""tokenizer.bin: SentencePiece BPE as a flat list of tokens.

    longest token in bytes i32 | per token, to the end of the file: score f32, length i32, bytes

Ids 0, 1 and 2 are unknown, BOS and EOS; id 3 + b is byte b. Special tokens written in a text are not recognised.
"""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError
from numflow.tokenizer import spm, wrapping
from numflow.tokenizer.added import AddedTokens
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import read_bytes
from numflow.tokenizer.tokenizer import Tokenizer

_HEAD = struct.Struct("<fi")
_FIXED = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a tokenizer.bin.

    Raises:
        FormatError: the file is truncated or has fewer than 259 tokens.
    """
    texts, scores = _read(path)
    types = [spm.UNKNOWN, spm.CONTROL, spm.CONTROL] + [spm.BYTE] * 256 + [spm.NORMAL] * (len(texts) - len(_FIXED))
    proto = spm.write_proto(texts, scores, types, spm.BPE, unk=0, add_dummy_prefix=True, remove_extra_whitespaces=False)
    vocabulary = spm.SentencePieceVocabulary(proto, AddedTokens(()), texts=texts, where=str(path),
                                             special_ids=frozenset((0, 1, 2)))
    roles = resolve(vocabulary, {"unk": 0, "bos": 1, "eos": 2}, options)
    around = wrapping.around(bos=1).changed(roles.bos, roles.eos, options.get("add_bos"), options.get("add_eos"))
    return Tokenizer(vocabulary, roles, around, options.get("chat_template"))


def _read(path: Path) -> tuple[list[str], list[float]]:
    data = read_bytes(path)
    texts: list[str] = []
    scores: list[float] = []
    offset = 4
    while offset < len(data):
        if offset + _HEAD.size > len(data):
            raise FormatError(f"{path}: truncated at token {len(texts)}")
        score, length = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        if not 0 <= length <= len(data) - offset:
            raise FormatError(f"{path}: token {len(texts)} should fit in the file's {len(data)} bytes, "
                              f"says it has {length}")
        texts.append(data[offset : offset + length].decode("utf-8", errors="replace").replace(" ", "\u2581"))
        scores.append(score)
        offset += length
    if len(texts) <= len(_FIXED):
        raise FormatError(f"{path}: should have more than {len(_FIXED)} tokens (3 special ones and 256 bytes), "
                          f"has {len(texts)}")
    texts[: len(_FIXED)] = _FIXED
    return texts, scores
