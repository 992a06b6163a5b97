"""Conversion of a tokenizer of any format to GGUF metadata (tokenizer.ggml.*).

The metadata is read back and must give the same ids, for texts of many scripts and for texts of the vocabulary's own
tokens; a tokenizer that GGUF cannot express is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numflow.errors import NumflowError, TokenizerError
from numflow.tokenizer import gguf_scored, gguf_vocabulary, pretokenize, spm
from numflow.tokenizer.gguf_scored import model_of
from numflow.tokenizer.names import names
from numflow.tokenizer.probes import probes
from numflow.tokenizer.roles import END_TEXTS
from numflow.tokenizer.tokenizer import Tokenizer
from numflow.tokenizer.vocabulary import LibraryVocabulary
from numflow.tokenizer.wrapping import TEXT

_ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask",
              "cls": "cls"}  # "seperator" is the spelling of the format
_INSTEAD = "a target that ends in .safetensors stores the tokenizer unchanged"


def metadata_of(tokenizer: Tokenizer, rows: int, where: str, pre: str = "", also: Sequence[Tokenizer] = ()
                ) -> dict[str, Any]:
    """tokenizer.ggml.* and the chat template.

    rows: rows of the model's embedding table. pre: name of the pre-tokenizer rule, "" to find it by comparison.
    also: tokenizers of further files of the model, whose vocabularies may be easier to express.

    Raises:
        TokenizerError: GGUF cannot express this tokenizer; the message names the reason.
    """
    why = ""
    for candidate in (*also, tokenizer):
        try:
            for table in _tables(candidate, where, pre):
                table = _of_rows(table, rows, where)
                found = table | _roles(tokenizer, table, where)
                meta = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
                if tokenizer.chat_template is not None:
                    meta["tokenizer.chat_template"] = tokenizer.chat_template
                why = _difference(tokenizer, meta, rows, where)
                if not why:
                    return meta
        except TokenizerError as error:
            why = str(error)
    raise TokenizerError(f"{where}: {why.removeprefix(f'{where}: ')}; {_INSTEAD}")


def _tables(tokenizer: Tokenizer, where: str, pre: str) -> Iterator[dict[str, Any]]:
    """Candidate tables for the vocabulary: model, tokens, token_type and the fields of the model."""
    vocabulary = tokenizer.vocabulary
    if isinstance(vocabulary, spm.SentencePieceVocabulary):
        yield gguf_scored.of_sentencepiece(vocabulary, where)
        return
    if not isinstance(vocabulary, LibraryVocabulary):
        raise TokenizerError(f"{where}: no way to write this kind of vocabulary as GGUF")
    state = json.loads(vocabulary.library.to_str())
    model = state["model"]
    texts = [vocabulary.text(id) for id in range(vocabulary.size)]
    base = {"tokens": texts, "token_type": _types(vocabulary, texts)}
    match model["type"]:
        case "BPE" if model.get("byte_fallback"):
            yield gguf_scored.of_merges(model, state, base, where)
        case "BPE":
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
            for rule in _rules(vocabulary, model, where, pre):
                yield {"model": model_of("byte-level bpe"), "pre": rule, **base, "merges": merges}
        case "Unigram":
            yield gguf_scored.of_unigram(model, state, base, where)
        case "WordPiece":
            yield _wordpiece(model, state, base, where)
        case kind:
            raise TokenizerError(f"{where}: GGUF files cannot have a {kind} vocabulary")


def _types(vocabulary: Any, texts: list[str | None]) -> list[int]:
    types = [spm.NORMAL if text is not None else spm.UNUSED for text in texts]
    for id in vocabulary.added.values():
        types[id] = spm.CONTROL if id in vocabulary.special_ids else spm.USER_DEFINED
    return types


def _rules(vocabulary: LibraryVocabulary, model: Mapping[str, Any], where: str, pre: str) -> list[str]:
    """Names of the pre-tokenizer rules that split texts like this tokenizer; usually one."""
    if pre:
        return [pre]
    ours = vocabulary.library
    found = []
    for rule in names()["rule"]:
        if "spaces" in rule or rule.get("ignore_merges", False) != bool(model.get("ignore_merges")):
            continue
        normalizer, splitter = pretokenize.build(rule)
        if all(_cut(ours.normalizer, ours.pre_tokenizer, text) == _cut(normalizer, splitter, text)
               for text in probes()):
            found.append(rule["names"][0])
    if not found:
        raise TokenizerError(f"{where}: no pre-tokenizer of GGUF files splits text like this one (tokenizer.ggml.pre)")
    return found


def _cut(normalizer: Any, splitter: Any, text: str) -> list[str]:
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [text] if splitter is None else [piece for piece, _ in splitter.pre_tokenize_str(text)]


def _wordpiece(model: Mapping[str, Any], state: Mapping[str, Any], base: dict[str, Any], where: str) -> dict[str, Any]:
    """GGUF table of WordPiece: the first piece of a word is marked by U+2581, instead of ## before the others."""
    prefix = model["continuing_subword_prefix"]
    texts = [text if text is None or kind != spm.NORMAL or (text.startswith("[") and text.endswith("]"))
             else text[len(prefix):] if text.startswith(prefix) else f"\u2581{text}"
             for text, kind in zip(base["tokens"], base["token_type"], strict=True)]
    normalizer = state.get("normalizer") or {}
    lowercase = bool(normalizer.get("lowercase"))
    strip = normalizer.get("strip_accents")
    return {"model": model_of("wordpiece"), "pre": "default", **base, "tokens": texts,
            "normalizer.lowercase": lowercase, "normalizer.strip_accents": lowercase if strip is None else bool(strip)}


def _of_rows(table: dict[str, Any], rows: int, where: str) -> dict[str, Any]:
    """The table with one unique entry for each row of the embeddings."""
    texts, types = list(table["tokens"]), list(table["token_type"])
    if any(kind == spm.NORMAL for kind in types[rows:]):
        raise TokenizerError(f"{where}: the tokenizer has {len(texts)} tokens, the model {rows}")
    more = max(0, rows - len(texts))
    texts, types = texts[:rows] + [None] * more, types[:rows] + [spm.UNUSED] * more
    texts = [f"[PAD{id}]" if text is None else text for id, text in enumerate(texts)]
    if "scores" in table:  # user-defined tokens are matched in the raw text, which has spaces
        texts = [text.replace("\u2581", " ") if kind == spm.USER_DEFINED else text for text, kind in zip(texts, types)]
    if len(set(texts)) < len(texts):
        raise TokenizerError(f"{where}: two tokens have the same text, which GGUF files cannot have")
    table = table | {"tokens": texts, "token_type": types}
    if "scores" in table:
        table["scores"] = [*map(float, table["scores"][:rows]), *([-10000.0] * (rows - len(table["scores"])))]
    return table


def _roles(tokenizer: Tokenizer, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    roles, meta = tokenizer.roles, {}
    for role, key in _ROLE_KEYS.items():
        if (id := getattr(roles, role)) is not None and id < len(table["tokens"]):
            meta[f"{key}_token_id"] = id
    known = {id for text, id in tokenizer.vocabulary.added.items() if text in END_TEXTS} | {roles.eos}
    for key, id in zip(("eot", "eom"), sorted(roles.ends - known)):
        meta[f"{key}_token_id"] = id
    return meta | _around(tokenizer, table["model"] == model_of("wordpiece"), where)


def _around(tokenizer: Tokenizer, bracketed: bool, where: str) -> dict[str, Any]:
    """Metadata of special tokens around a text: BOS and EOS, or always CLS and SEP for WordPiece (`bracketed`)."""
    slots = [content for content, _ in tokenizer.wrapping.single]
    before, after = slots[:slots.index(TEXT)], slots[slots.index(TEXT) + 1:]
    if any(not isinstance(id, int) for id in (*before, *after)) or len(before) > 1 or len(after) > 1:
        raise TokenizerError(f"{where}: the tokenizer puts {len(before)} tokens before a text and {len(after)} after "
                             f"it, GGUF files one at most")
    if bracketed:
        if not before or not after:
            raise TokenizerError(f"{where}: GGUF's WordPiece puts a token before a text and one after it, this "
                                 "tokenizer does not")
        return {"bos_token_id": before[0], "cls_token_id": before[0], "seperator_token_id": after[0],
                "add_bos_token": True}
    for role, ids in (("bos", before), ("eos", after)):
        if ids and getattr(tokenizer.roles, role) not in (None, ids[0]):
            raise TokenizerError(f"{where}: the token around a text is not {role}, which is all that GGUF files have")
    return {**({"bos_token_id": before[0]} if before else {}), **({"eos_token_id": after[0]} if after else {}),
            "add_bos_token": bool(before), "add_eos_token": bool(after)}


def _difference(tokenizer: Tokenizer, meta: dict[str, Any], rows: int, where: str) -> str:
    """First difference between the tokenizer and its GGUF table read back; "" if there is none."""
    try:
        read = gguf_vocabulary.load(meta, {}, where)
    except NumflowError as error:
        return f"as GGUF it cannot be read: {error}"
    for text in probes(tokenizer, rows):
        ours, theirs = tokenizer.encode(text), read.encode(text)
        if ours != theirs:
            index = next((n for n, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            context = tokenizer.decode(ours[max(0, index - 3):index + 3])
            return f"as GGUF ({meta['tokenizer.ggml.model']}) it would cut text otherwise, such as {context!r}"
    return ""
