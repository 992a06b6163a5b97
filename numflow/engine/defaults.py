"""What a model's own files say about generating with it: config.json, and generation_config.json before it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numflow.errors import FormatError


@dataclass(frozen=True)
class Defaults:
    """Settings of a model that hold unless a request says otherwise.

    num_beams, length_penalty, early_stopping: as Beams has them.
    no_repeat_ngram: as Constraints has it.
    min_length, max_length: tokens of the decoder's text, its first ones included; 0 and None where nothing is said.
    forced_first: id of the first token that is generated. forced_last: of the last one, where the length ends a text.
    banned: token sequences that never come.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    no_repeat_ngram: int = 0
    min_length: int = 0
    max_length: int | None = None
    decoder_start: int | None = None
    forced_first: int | None = None
    forced_last: int | None = None
    banned: tuple[tuple[int, ...], ...] = ()


_POSITIVE: tuple = (int, lambda value: value >= 1, "a whole number from 1")
_COUNT: tuple = (int, lambda value: value >= 0, "a whole number from 0")
# field -> (key in the files, type, test, what is expected)
_KEYS: dict[str, tuple] = {
    "num_beams": ("num_beams", *_POSITIVE),
    "length_penalty": ("length_penalty", (int, float), lambda value: True, "a number"),
    "early_stopping": ("early_stopping", (bool, str), lambda value: value in (True, False, "never"),
                       'a switch or "never"'),
    "no_repeat_ngram": ("no_repeat_ngram_size", *_COUNT),
    "min_length": ("min_length", *_COUNT),
    "max_length": ("max_length", *_POSITIVE),
    "decoder_start": ("decoder_start_token_id", *_COUNT),
    "forced_first": ("forced_bos_token_id", *_COUNT),
    "forced_last": ("forced_eos_token_id", *_COUNT),
    "banned": ("bad_words_ids", list, lambda value: all(isinstance(ids, list) and ids for ids in value),
               "a list of lists"),
}


def read_defaults(checkpoint) -> Defaults:
    """The settings of a checkpoint.

    Raises:
        FormatError: a value of the wrong kind, or a broken generation_config.json.
    """
    if checkpoint.naming != "hf":
        return Defaults()
    config = _sources(checkpoint)
    found: dict[str, Any] = {}
    for name, (key, kind, good, expected) in _KEYS.items():
        where, value = config.get(key, ("", None))
        if name == "forced_last" and isinstance(value, list):
            value = value[0] if value else None
        if value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and name != "early_stopping") or not good(value):
            raise FormatError(f"{where}: {key} should be {expected}, is {value!r}")
        found[name] = tuple(map(tuple, value)) if name == "banned" else value
    return Defaults(**found)


def _sources(checkpoint) -> dict[str, tuple[Any, Any]]:
    """key -> (file, value); generation_config.json comes before config.json."""
    config = {key: (checkpoint.files.get("config", checkpoint.path), value) for key, value in checkpoint.config.items()}
    if "generation_config" not in checkpoint.files:
        return config
    from numflow.tokenizer.side_files import read_json

    path = Path(checkpoint.files["generation_config"])
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise FormatError(f"{path}: should be a JSON object")
    return config | {key: (path, value) for key, value in content.items() if value is not None}
