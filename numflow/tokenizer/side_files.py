"""Side files of a vocabulary: roles, added tokens, chat template, generation settings."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError, quoted
from numflow.tokenizer.tokenizer import ROLES
from numflow.tokenizer.vocabulary import AddedToken

MAX_BYTES = 256 << 20
MAX_ID = 1 << 24
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # one half of a surrogate pair, or both
_SENTINEL = re.compile(r"<extra_id_(\d+)>")  # special tokens with descending ids


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        FormatError: the file cannot be read, or is too large for a tokenizer file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FormatError(f"{path}: larger than {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file. Raises: FormatError."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises: FormatError."""
    try:
        content = json.loads(data := read_bytes(path))
        if _SURROGATE.search(data):
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        return content
    except UnicodeEncodeError as error:
        raise FormatError(f"{path}: has a lone surrogate, U+{ord(error.object[error.start]):04X}, which is no "
                          "character") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from None


def read_vocab(path: Path, highest: int | None = None) -> dict[str, int]:
    """vocab.json or added_tokens.json: token -> id.

    Raises:
        FormatError: the file is not a table of tokens and ids below `highest` (if None, near the number of tokens).
    """
    vocab = read_json(path)
    if not isinstance(vocab, dict) or not (vocab or highest):
        raise FormatError(f"{path}: should be a JSON object of tokens and ids")
    highest = highest or 4 * len(vocab) + 10_000  # ids may have gaps, but a huge id must not make a huge table
    bad = next(((text, id) for text, id in vocab.items() if type(id) is not int or not 0 <= id < highest), None)
    if bad:
        raise FormatError(f"{path}: token {quoted(bad[0])} should have an id, has {quoted(bad[1])}")
    return vocab


def _object(files: Mapping[str, Any], role: str) -> dict[str, Any]:
    if role not in files:
        return {}
    content = read_json(Path(files[role]))
    if not isinstance(content, dict):
        raise FormatError(f"{files[role]}: should be a JSON object, is a {type(content).__name__}")
    return content


class SideFiles:
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json, the chat template."""

    def __init__(self, checkpoint: Any):
        files = checkpoint.files
        self._files = files
        self.tokenizer_config = _object(files, "tokenizer_config")
        self._special_tokens_map = _object(files, "special_tokens_map")
        self._generation_config = _object(files, "generation_config")
        self._model_config = checkpoint.config if checkpoint.naming == "hf" else {}

    def roles(self) -> dict[str, Any]:
        """Role -> token text or id; the tokenizer's files take precedence over the model's."""
        roles: dict[str, Any] = {}
        for role in ROLES:
            texts = (source.get(f"{role}_token") for source in (self.tokenizer_config, self._special_tokens_map))
            ids = (_first(source.get(f"{role}_token_id")) for source in (self._generation_config, self._model_config))
            roles[role] = next((found for found in (*texts, *ids) if found is not None), None)
        return roles

    def flag(self, name: str) -> bool | None:
        """Boolean of tokenizer_config.json, None if missing."""
        value = self.tokenizer_config.get(name)
        return value if isinstance(value, bool) else None

    def end_ids(self) -> frozenset[int]:
        """All end token ids in the generation and model configuration."""
        ids: set[int] = set()
        for source in (self._generation_config, self._model_config):
            value = source.get("eos_token_id")
            ids.update(id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int))
        return frozenset(ids)

    def added_tokens(self) -> list[AddedToken]:
        """tokenizer_config.json's added_tokens_decoder, else added_tokens.json: added tokens with their ids.

        Raises:
            FormatError: an entry is not {"content": text, ...} under a reasonable number.
        """
        if "added_tokens_decoder" not in self.tokenizer_config and "added_tokens" in self._files:
            vocab = read_vocab(Path(self._files["added_tokens"]), MAX_ID)
            special = {token.text for token in self.named_tokens()}
            return [AddedToken(id, text, special=text in special) for text, id in vocab.items()]
        table = self.tokenizer_config.get("added_tokens_decoder", {})
        try:
            found = [AddedToken(int(id), t["content"], *(bool(t.get(k)) for k in ("special", "lstrip", "rstrip")))
                     for id, t in table.items()]
            if any(not isinstance(t.text, str) or not 0 <= t.id < MAX_ID for t in found):
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError):
            where = self._files["tokenizer_config"]
            raise FormatError(f"{where}: added_tokens_decoder should map ids to {{content, special, ...}}") from None
        return found

    def named_tokens(self) -> list[AddedToken]:
        """Special tokens named in the files without an id (-1 here): roles, then additional special tokens in order."""
        sources = (self.tokenizer_config, self._special_tokens_map)
        more: Any = next((tokens for s in sources if (tokens := s.get("additional_special_tokens"))), [])
        more = more if isinstance(more, list) else []
        sentinels = [match for token in more if (match := _SENTINEL.fullmatch(text_of(token) or ""))]
        if len(sentinels) == len(more):
            more = [match[0] for match in sorted(sentinels, key=lambda match: -int(match[1]))]
        return [AddedToken(-1, text, lstrip=_flag(token, "lstrip"), rstrip=_flag(token, "rstrip"))
                for token in (*self.roles().values(), *more) if (text := text_of(token)) is not None]

    def chat_template(self) -> str | None:
        """chat_template.jinja, else tokenizer_config.json's chat_template (of several, "default" or the first)."""
        if "chat_template" in self._files:
            path = Path(self._files["chat_template"])
            if path.suffix != ".json":
                return read_text(path)
            return _template_of(_object(self._files, "chat_template").get("chat_template"))
        return _template_of(self.tokenizer_config.get("chat_template"))


def text_of(token: Any) -> str | None:
    """The text of a token given as text or as {"content": text, ...}; None for an id or nothing."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _flag(token: Any, name: str) -> bool:
    return isinstance(token, Mapping) and bool(token.get(name))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None if isinstance(value, list) else value


def _template_of(value: Any) -> str | None:
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None
