"""Settings of a generation: all keywords of `generate`, with their defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from numflow.decoding.names import inferflow
from numflow.decoding.settings import FILTERS, Sampling, check, without_effect
from numflow.errors import RequestError, did_you_mean, quoted

BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True)
class Settings(Sampling):
    """Settings of a generation: the sampling settings of Sampling, and:

    max_tokens:      maximum number of new tokens; None: as many as the context holds.
    min_tokens:      minimum number of new tokens before an end token.
    ignore_eos:      continue after the model's end tokens.
    stop:            stop string (or strings); not part of the result.
    stop_token_ids:  tokens that end the generation, besides the model's end tokens; not part of the result.
    banned_tokens:   ids, or lists of ids: tokens and sequences that are never generated.
    no_repeat_ngram: size of n-grams that must not occur twice; 0: off.
    dry_sequence_breakers: texts; a repetition ends at a token that contains one of them (dry_multiplier).
    chat:            put the prompt into the model's chat template.
    decoder_ids:     first tokens of the decoder of an encoder-decoder, instead of the model's own.
    num_beams, length_penalty, early_stopping: num_beams above 1 is a beam search; see Beams.
    n:               number of texts, in Generation.choices. best_of: generate this many texts, and return the n with
                     the highest mean log-probability.
    prompt_logprobs: also return the log-probability of each token of the prompt, and of the N most probable tokens.
    echo:            also return the prompt's text, in Generation.prompt; with logprobs, prompt_logprobs has that value.
    json_schema, regex, grammar: the text follows a JSON schema (dict or JSON text), a regular expression, or a grammar
                     (Lark or GBNF); an end token is allowed only where the text is complete.
    json_whitespace: with json_schema: allow white space between the parts of the JSON text; else the text is compact.
    speculate:       source of draft tokens for speculative decoding: "ngram" (tokens that followed the latest tokens
                     earlier in the text), "draft" (the model's draft model), "off"; None: "draft" if the model has a
                     draft model. The distribution of texts is the same.
    draft_tokens:    maximum number of draft tokens per step; None: chosen for speed.
    adapter:         name of one of the model's adapters (numflow.load(..., adapters=)); None: the base model alone.
    cache_salt:      a text; the prefix cache shares keys and values only between requests with the same salt.
    context_shift:   if the text fills the context, drop its older half and continue: the rest is recomputed.
    id_slot:         the engine's slot that keeps the text, to be saved (Engine.save_session); None: any.

    None for length_penalty, early_stopping, no_repeat_ngram or min_tokens: the value of the model's files.

    ignored:         settings that `of` left out because they have no effect in combination with the others -> reason.
    """

    max_tokens: int | None = 64
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    banned_tokens: Sequence[int | Sequence[int]] = ()
    no_repeat_ngram: int | None = None
    dry_sequence_breakers: Sequence[str] = BREAKERS
    chat: bool = False
    decoder_ids: Sequence[int] | None = None
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_whitespace: bool = False
    speculate: str | None = None
    draft_tokens: int | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    context_shift: bool = False
    id_slot: int | None = None
    ignored: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Settings":
        """Settings from keyword arguments: the fields, and decoding_alg, an Inferflow name or JSON configuration.

        A temperature of None counts as not given. A setting that has no effect in combination with the others is left
        out and listed in `ignored`.

        Raises:
            RequestError: an unknown setting, or values that are wrong or contradict each other.
        """
        known = [field.name for field in fields(cls) if field.name not in ("dry_breakers", "ignored")]
        keywords = {name: value for name, value in given.items() if (name, value) != ("temperature", None)}
        algorithm, ignored = keywords.pop("decoding_alg", None), dict[str, str]()
        for name in keywords:
            if name not in known:
                raise RequestError(f"there is no setting {quoted(name)} for generating"
                                   f"{did_you_mean(name, [*known, 'decoding_alg'])}")
        if algorithm is not None:
            keywords = _with_algorithm(algorithm, keywords, ignored)
        if isinstance(keywords.get("samplers"), (list, str)):
            names = keywords["samplers"]
            keywords["samplers"] = tuple(names.replace(";", ",").split(",") if isinstance(names, str) else names)
        if isinstance(keywords.get("logit_bias"), Mapping):  # keys of JSON objects are strings
            keywords["logit_bias"] = {_id(id): value for id, value in keywords["logit_bias"].items()}
        elif keywords.get("logit_bias", 0) is None:
            del keywords["logit_bias"]
        unset = {"top_k": 0, "seed": None, "id_slot": None}  # other programs write -1 for these
        keywords |= {name: off for name, off in unset.items() if keywords.get(name) == -1}
        values = vars(cls()) | keywords
        check(values)
        ignored |= {name: why for name, why in _without_effect(values).items() if name in keywords}
        keywords |= {"temperature": FILTERS["temperature"]} if "temperature" in without_effect(values) else {}
        return cls(**{name: value for name, value in keywords.items() if name not in ignored or name == "temperature"},
                   ignored={name: why for name, why in ignored.items() if name in given})

    def sampling(self, **changes: Any) -> Sampling:
        """The sampling settings alone, with changes."""
        return replace(Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)}), **changes)


def _without_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings that have no effect in combination with the others -> reason. values: all settings, in range."""
    found = without_effect(values)
    if values["num_beams"] == 1:
        found |= {name: f"{name}={values[name]} has no effect with one beam; give num_beams above 1"
                  for name in ("length_penalty", "early_stopping") if values[name] is not None}
    breakers = values["dry_sequence_breakers"]
    if not values["dry_multiplier"] and isinstance(breakers, Sequence) and tuple(breakers) != BREAKERS:
        found["dry_sequence_breakers"] = "dry_sequence_breakers has no effect without dry_multiplier"
    if values["json_whitespace"] and values["json_schema"] is None:
        found["json_whitespace"] = "json_whitespace has no effect without json_schema"
    return found


def _with_algorithm(algorithm, given: dict[str, Any], ignored: dict[str, str]) -> dict[str, Any]:
    """Settings of an Inferflow algorithm, overridden by the given ones. Temperature 0 is greedy for every algorithm; a
    deterministic algorithm overrides a temperature above 0."""
    found, temperature = inferflow(algorithm), given.get("temperature")
    draws = found["temperature"] != 0 and found.get("fsd") is not True
    if temperature == 0 and draws and "fsd" not in found:
        ignored["decoding_alg"] = f"decoding_alg {quoted(algorithm)} has no effect at temperature 0, which is greedy"
        return given
    if temperature is not None and not draws and (temperature == 0) != (found["temperature"] == 0):
        if temperature != 1:  # temperature 1 never has an effect, so there is nothing to report
            ignored["temperature"] = (f"temperature={temperature} has no effect beside decoding_alg "
                                      f"{quoted(algorithm)}, which draws nothing")
        given = {name: value for name, value in given.items() if name != "temperature"}
    return found | given


def _id(key) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
