"""Settings of a generation: all keywords of `generate`, with their defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from numflow.decoding.names import inferflow
from numflow.decoding.settings import FILTERS, Sampling, check, idle
from numflow.errors import RequestError, did_you_mean, quoted

BREAKERS = ("\n", ":", '"', "*")


@dataclass(frozen=True)
class Settings(Sampling):
    """Settings of a generation. Sampling has those for picking tokens; besides:

    max_tokens:      new tokens at most; None: as many as the context holds.
    min_tokens:      so many new tokens come before an end token may.
    ignore_eos:      go on where the model ends its text.
    stop:            text (or texts) that end the generation; not part of the result.
    stop_token_ids:  tokens that end the generation, beside the model's own; not part of the result.
    banned_tokens:   ids, or lists of ids: tokens and sequences that never come.
    no_repeat_ngram: no sequence of so many tokens comes twice; 0: off.
    dry_sequence_breakers: texts; a repetition does not reach over a token that has one of them (dry_multiplier).
    chat:            put the prompt into the model's chat template.
    decoder_ids:     encoder-decoders: the decoder's first tokens, instead of the model's own.
    num_beams, length_penalty, early_stopping: num_beams above 1 is a beam search; see Beams.
    n:               so many texts, in Generation.choices. best_of: generate so many, and keep the n with the highest
                     mean log-probability.
    prompt_logprobs: also tell the log-probability of each token of the prompt, and of the N most probable ones.
    echo:            also tell the prompt's text, in Generation.prompt; with logprobs, prompt_logprobs is that number.
    json_schema, regex, grammar: the text follows a JSON schema (dict or JSON text), a regular expression, or a grammar
                     (Lark or GBNF); an end token comes only where it is complete.
    json_whitespace: with json_schema: allow white space between the parts of the JSON text; else it is compact.
    speculate:       how tokens are guessed ahead, so that several are checked at once: "ngram" (what came after the
                     latest tokens earlier in the text), "draft" (the model's draft model), "off"; None: "draft" if
                     the model has one. The text is the same kind of text.
    draft_tokens:    tokens guessed at once, at most; None: as many as pay.
    adapter:         name of one of the model's adapters (numflow.load(..., adapters=)); None: the base alone.
    cache_salt:      a text; the prefix cache shares keys and values only between requests that have the same one.
    context_shift:   where the text fills the context, drop the older half of it and go on: the rest is read again.
    id_slot:         the engine's slot that remembers the text, to be saved (Engine.save_session); None: any.

    None for length_penalty, early_stopping, no_repeat_ngram or min_tokens: as the model's own files say.

    ignored:         what `of` has left out because it has no effect beside the other settings -> why.
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
        """From keyword arguments: fields, and decoding_alg, Inferflow's name or JSON configuration of a strategy.

        A temperature of None is one that is not given. A setting that has no effect beside the others is left out, and
        told in `ignored`.

        Raises:
            RequestError: one that does not exist, or values that are wrong or contradict each other.
        """
        known = [field.name for field in fields(cls) if field.name not in ("dry_breakers", "ignored")]
        own = {name: value for name, value in given.items() if (name, value) != ("temperature", None)}
        algorithm, ignored = own.pop("decoding_alg", None), dict[str, str]()
        for name in own:
            if name not in known:
                raise RequestError(f"there is no setting {quoted(name)} for generating"
                                   f"{did_you_mean(name, [*known, 'decoding_alg'])}")
        if algorithm is not None:
            own = _with_algorithm(algorithm, own, ignored)
        if isinstance(own.get("samplers"), (list, str)):
            names = own["samplers"]
            own["samplers"] = tuple(names.replace(";", ",").split(",") if isinstance(names, str) else names)
        if isinstance(own.get("logit_bias"), Mapping):  # JSON has only text as keys
            own["logit_bias"] = {_id(id): value for id, value in own["logit_bias"].items()}
        elif own.get("logit_bias", 0) is None:
            del own["logit_bias"]
        unset = {"top_k": 0, "seed": None, "id_slot": None}  # which are -1 elsewhere
        own |= {name: off for name, off in unset.items() if own.get(name) == -1}
        values = vars(cls()) | own
        check(values)
        ignored |= {name: why for name, why in _idle(values).items() if name in own}
        own |= {"temperature": FILTERS["temperature"]} if "temperature" in idle(values) else {}
        return cls(**{name: value for name, value in own.items() if name not in ignored or name == "temperature"},
                   ignored={name: why for name, why in ignored.items() if name in given})

    def sampling(self, **changes: Any) -> Sampling:
        """The part that concerns how tokens are picked, with changes."""
        return replace(Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)}), **changes)


def _idle(values: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have no effect beside the others -> why. values: all settings, in range."""
    found = idle(values)
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
    """Settings of Inferflow's algorithm, with those that are given beside it. Temperature 0 is greedy, whatever would
    be drawn from; an algorithm that draws nothing goes before any temperature."""
    found, temperature = inferflow(algorithm), given.get("temperature")
    draws = found["temperature"] != 0 and found.get("fsd") is not True
    if temperature == 0 and draws and "fsd" not in found:
        ignored["decoding_alg"] = f"decoding_alg {quoted(algorithm)} has no effect at temperature 0, which is greedy"
        return given
    if temperature is not None and not draws and (temperature == 0) != (found["temperature"] == 0):
        if temperature != 1:  # which changes nothing anywhere
            ignored["temperature"] = (f"temperature={temperature} has no effect beside decoding_alg "
                                      f"{quoted(algorithm)}, which draws nothing")
        given = {name: value for name, value in given.items() if name != "temperature"}
    return found | given


def _id(key) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
