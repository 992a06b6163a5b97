"""Generation defaults in a model's own files.

The files are generation_config.json and config.json, in this precedence; in GGUF files the metadata general.sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numflow.decoding.settings import DEFAULTS, check, without_effect
from numflow.engine.request.sampling import Source
from numflow.errors import FormatError, RequestError


@dataclass(frozen=True)
class Defaults:
    """Settings of a model that apply unless a request sets them.

    num_beams, length_penalty, early_stopping: as in Beams.
    no_repeat_ngram: as in Constraints.
    min_length, max_length: length of the decoder's text in tokens, its first tokens included; 0 and None if not set.
    forced_first: id of the first generated token. forced_last: id of the last token when the maximum length is reached.
    banned: token sequences that are never generated.
    sampling: sampling settings of the files; `do_sample: false` is temperature 0.
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
                       'true, false or "never"'),
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
    """Read the default settings of a checkpoint.

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
_SAMPLING_KEYS = {
    "temperature": ("temperature", "temp"), "top_k": ("top_k", "top_k"), "top_p": ("top_p", "top_p"),
    "min_p": ("min_p", "min_p"), "typical_p": ("typical_p", ""),
    "repetition_penalty": ("repetition_penalty", "penalty_repeat"), "repeat_last_n": ("", "penalty_last_n"),
    "mirostat": ("", "mirostat"), "mirostat_tau": ("", "mirostat_tau"), "mirostat_eta": ("", "mirostat_eta")}
_GREEDY_KEYS = ("temperature", "repetition_penalty", "repeat_last_n")  # effective with greedy decoding


def _sampling(config: Mapping[str, tuple[Any, Any]]) -> Source:
    """Sampling settings of a file, by the rules of transformers.

    Without `do_sample` and without a temperature the settings are incomplete. With `do_sample: false` decoding is
    greedy, regardless of other settings.
    """
    where, do_sample = config.get("do_sample", ("", None))
    if do_sample not in (None, True, False):
        raise FormatError(f"{where}: do_sample should be true or false, is {do_sample!r:.80}")
    found, files = {}, [where] * (do_sample is not None)
    for name, (key, _) in _SAMPLING_KEYS.items():
        where, value = config.get(key, ("", None))
        if value is not None:
            found[name] = _checked(name, value, f"{where}: {key}")
            files.append(where)
    if do_sample is False:
        found = {**{name: value for name, value in found.items() if name in _GREEDY_KEYS}, "temperature": 0.0}
    elif do_sample:
        found.setdefault("temperature", 1.0)
    return Source(_effective(found), Path(files[-1]).name if found else "")


def _gguf_sampling(checkpoint) -> Source:
    found = {}
    for name, (_, key) in _SAMPLING_KEYS.items():
        value = checkpoint.config.get(f"general.sampling.{key}") if key else None
        if value is not None:
            value = float(f"{value:.6g}") if isinstance(value, float) else value  # the digits of a float32
            found[name] = _checked(name, value, f"{checkpoint.path}: general.sampling.{key}")
    return Source(_effective(found), "general.sampling" if found else "")


def _checked(name: str, value: Any, where: str) -> Any:
    """Value of a setting, checked. top_k -1 means off; a whole number may be written as 40.0."""
    if isinstance(DEFAULTS[name], int) and isinstance(value, float) and value.is_integer():
        value = int(value)
    value = 0 if (name, value) == ("top_k", -1) else value
    try:
        check({**DEFAULTS, name: value})
    except RequestError as error:
        raise FormatError(f"{where}: {error}") from None
    return value


def _effective(found: dict[str, Any]) -> dict[str, Any]:
    """Remove settings that have no effect in combination with the others; keep all if there is no temperature yet."""
    if "temperature" not in found:
        return found
    dropped = without_effect({**DEFAULTS, **found})
    return {name: value for name, value in found.items() if name not in dropped}


def _sources(checkpoint) -> dict[str, tuple[Any, Any]]:
    """key -> (file, value); generation_config.json overrides config.json."""
    config = {key: (checkpoint.files.get("config", checkpoint.path), value) for key, value in checkpoint.config.items()}
    if "generation_config" not in checkpoint.files:
        return config
    from numflow.tokenizer.side_files import read_json

    path = Path(checkpoint.files["generation_config"])
    content = read_json(path)
    if not isinstance(content, Mapping):
        raise FormatError(f"{path}: should be a JSON object")
    return config | {key: (path, value) for key, value in content.items() if value is not None}
