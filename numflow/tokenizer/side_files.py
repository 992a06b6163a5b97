"""What the small files beside a vocabulary say: roles, added tokens, chat template, generation settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import FormatError
from numflow.tokenizer.roles import NAMES
from numflow.tokenizer.vocabulary import AddedToken

MAX_JSON_BYTES = 256 << 20


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        FormatError: it cannot be read, is too large to be one of these files, or is not JSON.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise FormatError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON: {error}") from None


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file.

    Raises:
        FormatError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 at byte {error.start}") from None


def _object(files: Mapping[str, Any], role: str) -> dict[str, Any]:
    if role not in files:
        return {}
    content = read_json(Path(files[role]))
    if not isinstance(content, dict):
        raise FormatError(f"{files[role]}: should be a JSON object, is a {type(content).__name__}")
    return content


class SideFiles:
    """tokenizer_config.json, special_tokens_map.json, generation_config.json and the chat template file."""

    def __init__(self, checkpoint: Any):
        files = checkpoint.files
        self._files = files
        self.tokenizer_config = _object(files, "tokenizer_config")
        self._special_tokens_map = _object(files, "special_tokens_map")
        self._generation_config = _object(files, "generation_config")
        self._model_config = checkpoint.config if checkpoint.naming == "hf" else {}

    def roles(self) -> dict[str, Any]:
        """Role -> token text or id; the tokenizer's own files come before the model's."""
        roles: dict[str, Any] = {}
        for role in NAMES:
            texts = (source.get(f"{role}_token") for source in (self.tokenizer_config, self._special_tokens_map))
            ids = (_first(source.get(f"{role}_token_id")) for source in (self._generation_config, self._model_config))
            roles[role] = next((found for found in (*texts, *ids) if found is not None), None)
        return roles

    def end_ids(self) -> frozenset[int]:
        """Every end-of-text id that the generation or the model configuration lists."""
        ids: set[int] = set()
        for source in (self._generation_config, self._model_config):
            value = source.get("eos_token_id")
            ids.update(id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int))
        return frozenset(ids)

    def added_tokens(self) -> list[AddedToken]:
        """tokenizer_config.json's added_tokens_decoder.

        Raises:
            FormatError: an entry is not {"content": text, ...} under a number.
        """
        table = self.tokenizer_config.get("added_tokens_decoder", {})
        try:
            return [AddedToken(int(id), t["content"], t.get("special", False), t.get("lstrip", False),
                               t.get("rstrip", False)) for id, t in table.items()]
        except (TypeError, ValueError, KeyError, AttributeError):
            where = self._files["tokenizer_config"]
            raise FormatError(f"{where}: added_tokens_decoder should map ids to {{content, special, ...}}") from None

    def additional_special_tokens(self) -> list[str]:
        """Texts of further special tokens, in the order of their ids."""
        for source in (self.tokenizer_config, self._special_tokens_map):
            if tokens := source.get("additional_special_tokens"):
                return [t["content"] if isinstance(t, Mapping) else t for t in tokens]
        return []

    def chat_template(self) -> str | None:
        """chat_template.jinja, else tokenizer_config.json's chat_template (of several, "default" or the first)."""
        if "chat_template" in self._files:
            path = Path(self._files["chat_template"])
            if path.suffix != ".json":
                return read_text(path)
            return _template_of(_object(self._files, "chat_template").get("chat_template"))
        return _template_of(self.tokenizer_config.get("chat_template"))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None if isinstance(value, list) else value


def _template_of(value: Any) -> str | None:
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None
