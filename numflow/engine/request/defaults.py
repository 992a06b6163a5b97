"""Generation defaults in a model's own files.

They are config.json, and generation_config.json before it; in GGUF files the metadata general.sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numflow.decoding.settings import DEFAULTS, check, idle
from numflow.engine.request.sampling import Source
from numflow.errors import FormatError, RequestError


@dataclass(frozen=True)
class Defaults:
    """Settings of a model that hold unless a request says otherwise.

    num_beams, length_penalty, early_stopping: as Beams has them.
    no_repeat_ngram: as Constraints has it.
    min_length, max_length: tokens of the decoder's text, its first ones included; 0 and None where nothing is said.
    forced_first: id of the first token that is generated. forced_last: of the last one, where the length ends a text.
    banned: token sequences that never come.
    sampling: how tokens are picked, as far as the files say; `do_sample: false` is temperature 0.
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
    sampling: Source = field(default_factory=Source)


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
        return Defaults(sampling=_gguf_sampling(checkpoint))
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
    return Defaults(**found, sampling=_sampling(config))


# field -> (key in JSON files, in GGUF files; "": none)
_DRAWING = {
    "temperature": ("temperature", "temp"), "top_k": ("top_k", "top_k"), "top_p": ("top_p", "top_p"),
    "min_p": ("min_p", "min_p"), "typical_p": ("typical_p", ""),
    "repetition_penalty": ("repetition_penalty", "penalty_repeat"), "repeat_last_n": ("", "penalty_last_n"),
    "mirostat": ("", "mirostat"), "mirostat_tau": ("", "mirostat_tau"), "mirostat_eta": ("", "mirostat_eta")}
_GREEDY = ("temperature", "repetition_penalty", "repeat_last_n")  # what has an effect where nothing is drawn


def _sampling(config: Mapping[str, tuple[Any, Any]]) -> Source:
    """Sampling settings of a file, by the rules of transformers.

    Without `do_sample: true` or a temperature a file says nothing of drawing; with `do_sample: false` the best token is
    taken, whatever else the file says.
    """
    where, drawn = config.get("do_sample", ("", None))
    if drawn not in (None, True, False):
        raise FormatError(f"{where}: do_sample should be true or false, is {drawn!r:.80}")
    found, places = {}, [where] * (drawn is not None)
    for name, (key, _) in _DRAWING.items():
        place, value = config.get(key, ("", None))
        if value is not None:
            found[name] = _checked(name, value, f"{place}: {key}")
            places.append(place)
    if drawn is False:
        found = {**{name: value for name, value in found.items() if name in _GREEDY}, "temperature": 0.0}
    elif drawn:
        found.setdefault("temperature", 1.0)
    return Source(_effective(found), Path(places[-1]).name if found else "")


def _gguf_sampling(checkpoint) -> Source:
    found = {}
    for name, (_, key) in _DRAWING.items():
        value = checkpoint.config.get(f"general.sampling.{key}") if key else None
        if value is not None:
            value = float(f"{value:.6g}") if isinstance(value, float) else value  # float32, as it was written
            found[name] = _checked(name, value, f"{checkpoint.path}: general.sampling.{key}")
    return Source(_effective(found), "general.sampling" if found else "")


def _checked(name: str, value: Any, place: str) -> Any:
    """A setting's value, in range. -1 is no top_k, and a whole number may be written as 40.0."""
    if isinstance(DEFAULTS[name], int) and isinstance(value, float) and value.is_integer():
        value = int(value)
    value = 0 if (name, value) == ("top_k", -1) else value
    try:
        check({**DEFAULTS, name: value})
    except RequestError as error:
        raise FormatError(f"{place}: {error}") from None
    return value


def _effective(found: dict[str, Any]) -> dict[str, Any]:
    """Without what has no effect beside the others; without a temperature that is not known yet."""
    if "temperature" not in found:
        return found
    without = idle({**DEFAULTS, **found})
    return {name: value for name, value in found.items() if name not in without}


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
