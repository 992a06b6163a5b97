"""tokenizer.model or source.spm: a SentencePiece model, alone or with a vocab.json that gives its pieces other ids."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError
from numflow.tokenizer import spm, wrapping
from numflow.tokenizer.added import AddedTokens, collect
from numflow.tokenizer.roles import resolve
from numflow.tokenizer.side_files import SideFiles, read_bytes, read_vocab, text_of
from numflow.tokenizer.tokenizer import Roles, Tokenizer

_AROUND = ("[CLS]", "[SEP]")  # control pieces of encoders: texts are [CLS] A [SEP] B [SEP]
_LANGUAGE = re.compile(r">>[^<>]+<<")  # token of the target language of a translation model


def load(path: Path, checkpoint: Any, options: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a SentencePiece model and its side files.

    Raises:
        FormatError: a file is damaged.
        TokenizerError: an option does not fit.
    """
    side = SideFiles(checkpoint)
    proto = read_bytes(path)
    processor = spm.load_proto(proto, str(path))
    texts = pieces = spm.texts_of(processor, str(path))
    remap = None
    if "vocab.json" in checkpoint.files and "merges.txt" not in checkpoint.files:
        texts, remap = _other_ids(Path(checkpoint.files["vocab.json"]), texts, side)
    vocab = {text: id for id, text in reversed(list(enumerate(texts)))}
    control = [text for n, text in enumerate(pieces) if processor.IsControl(n) or processor.IsUnknown(n)]
    if remap is not None:
        control += [text for text in texts if _LANGUAGE.fullmatch(text)]
    added = collect(vocab, len(texts), control, side, options)
    texts = [*texts, *(f"<unused {n}>" for n in range(len(texts), max((t.id for t in added), default=-1) + 1))]
    for token in added:
        texts[token.id] = token.text
    prefixed = any(pieces[id].startswith("\u2581") for id in processor.encode("a")[:1])
    vocabulary = spm.SentencePieceVocabulary(
        proto, AddedTokens(added), prefix_each=side.flag("legacy") is not False, strip_first=prefixed,
        texts=texts, remap=remap, where=str(path))
    by_role = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id(),
               "pad": processor.pad_id()}
    by_role = {role: None if id < 0 else texts[id if remap is None else remap[id]] for role, id in by_role.items()}
    encoder = remap is None and all(text in control for text in _AROUND)
    by_role |= dict(zip(("cls", "sep"), _AROUND, strict=True)) if encoder else {}
    given = by_role | {role: token for role, token in side.roles().items() if token is not None}
    roles = resolve(vocabulary, given, options, side.end_ids())
    bos_first = processor.bos_id() >= 0 and remap is None
    return Tokenizer(vocabulary, roles, _around(roles, bos_first, encoder, side, options),
                     options.get("chat_template", side.chat_template()))


def _around(roles: Roles, bos_first: bool, encoder: bool, side: SideFiles,
            options: Mapping[str, Any]) -> wrapping.Wrapping:
    """Default special tokens: BOS first, else EOS last, or [CLS] and [SEP] of an encoder; files and options override.

    Decoders have BOS; other encoders, and translation models (with a vocab.json), end with EOS.
    """
    add_bos, add_eos = (options.get(name, side.flag(f"{name}_token")) for name in ("add_bos", "add_eos"))
    if encoder:
        between = () if roles.sep is None else (roles.sep,)
        return wrapping.around(roles.cls, roles.sep, between, 1).changed(roles.cls, roles.sep, add_bos, add_eos)
    add_bos = bos_first if add_bos is None else add_bos
    add_eos = not bos_first if add_eos is None else add_eos
    return wrapping.each(roles.bos if add_bos else None, roles.eos if add_eos else None)


def _other_ids(path: Path, pieces: list[str], side: SideFiles) -> tuple[list[str], list[int]]:
    """Tokens by the ids of vocab.json, and the vocab.json id of each SentencePiece id."""
    vocab = read_vocab(path)
    unk = text_of(side.roles()["unk"]) or "<unk>"
    if unk not in vocab:
        raise FormatError(f"{path}: no token {unk!r} for unknown text")
    texts = [f"<unused {n}>" for n in range(max(vocab.values()) + 1)]
    for text, id in vocab.items():
        texts[id] = text
    return texts, [vocab.get(piece, vocab[unk]) for piece in pieces]
