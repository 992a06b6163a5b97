"""Translation: the languages of a model, and the positions of their tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from numflow.engine.request.prompt import check_size
from numflow.engine.request.request import Request, Requests, Settings
from numflow.errors import RequestError, did_you_mean, quoted

MAX_TOKENS = 256  # default maximum tokens of a translation

# Forms of language tokens. IN_TEXT is part of the text to translate and names the target. With FORMS, one token next to
# the text names the source, and the target's token is the first token of the decoder.
FORMS = tuple(map(re.compile, (r"__([a-z]{2,8})__", r"([a-z]{3}_[A-Z][a-z]{3})", r"([a-z]{2,3}_[A-Z]{2})")))
IN_TEXT = re.compile(r">>([\w-]+)<<")


@dataclass(frozen=True)
class Languages:
    """Language codes and token ids. in_text: whether the target's token precedes the text to translate."""

    ids: Mapping[str, int]
    in_text: bool = False

    def id(self, code: str) -> int:
        """Token id of a language, by its code, or by the part before "_" if that is unique.

        Raises:
            RequestError: unknown language.
        """
        if code in self.ids:
            return self.ids[code]
        alike = [language for language in self.ids if language.partition("_")[0] == code]
        if len(alike) != 1:
            hint = f"; it could be {', '.join(alike)}" if alike else did_you_mean(code, self.ids)
            raise RequestError(f"the model has no language {quoted(code)}{hint}")
        return self.ids[alike[0]]


def languages(tokenizer) -> Languages:
    """Languages of a vocabulary; empty if it has no language tokens."""
    added = tokenizer.vocabulary.added
    for form in FORMS:
        found = {match[1]: id for text, id in added.items() if (match := form.fullmatch(text))}
        if found:
            return Languages(found)
    texts = ((tokenizer.vocabulary.text(id), id) for id in range(tokenizer.vocab_size))
    return Languages({match[1]: id for text, id in texts if text and (match := IN_TEXT.fullmatch(text))}, in_text=True)


def chosen(known: Languages, source: str | None, target: str | None) -> tuple[int | None, int | None]:
    """Ids of the language tokens for the encoder and for the decoder; None without a token.

    Raises:
        RequestError: a language is missing, unknown, or cannot be chosen.
    """
    if not known.ids:
        if source is not None or target is not None:
            raise RequestError("the vocabulary names no languages, so there is none to choose: leave out source and "
                               "target (a task may have to be named in the text)")
        return None, None
    if known.in_text and source is not None:
        raise RequestError("the model reads one language only, or finds out itself: leave out source, and give target")
    if target is None or (source is None and not known.in_text):
        wanted = "target" if known.in_text else "source and target"
        raise RequestError(f"give {wanted}: the model has {', '.join(sorted(known.ids))}")
    return (known.id(target), None) if source is None else (known.id(source), known.id(target))


def encoder_ids(tokenizer, known: Languages, text: str, language: int | None, most: int | None = None) -> list[int]:
    """Input of the encoder: the text with special tokens and a language token.

    The language token replaces a language token among the special tokens; without one, it comes first.
    most: maximum tokens of the text.
    """
    check_size(tokenizer, text, most, "the text")
    content = tokenizer.encode(text, add_special=False, parse_special=False)
    if language is None:
        return tokenizer.wrapping.apply(content)[0]
    if known.in_text:
        return tokenizer.wrapping.apply([language, *content])[0]
    before, after = _around(tokenizer)
    of_language = set(known.ids.values())
    if of_language.isdisjoint([*before, *after]):
        return [language, *before, *content, *after]
    before, after = ([language if id in of_language else id for id in ids] for ids in (before, after))
    return [*before, *content, *after]


def _around(tokenizer) -> tuple[list[int], list[int]]:
    """Special token ids before and after a text."""
    slots = [slot for slot, _ in tokenizer.wrapping.single]
    index = next(n for n, slot in enumerate(slots) if not isinstance(slot, int))
    return slots[:index], slots[index + 1:]


def decoder_ids(known: Languages, start: int, language: int) -> tuple[list[int], int]:
    """First ids of the decoder, and how many of them count as generated.

    start: the model's decoder start token. If it is a language token, the target language replaces it.
    """
    return ([language], 0) if start in known.ids.values() else ([start, language], 1)


def translations(tokenizer, known: Languages, requests: Requests, texts, source, target, settings,
                 budget) -> list[Request]:
    """A request for each text; see Model.translate."""
    texts = [texts] if isinstance(texts, str) else texts
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"translate needs a text or a list of texts, has {quoted(texts)}")
    defaults, (reads, writes), forced = requests.defaults, chosen(known, source, target), 0
    given = dict(settings)
    if writes is not None:
        if settings.get("decoder_ids") is not None:
            raise RequestError("the target language decides the decoder's first tokens: leave out decoder_ids")
        given["decoder_ids"], forced = decoder_ids(known, requests.first_ids()[0], writes)
    given.setdefault("max_tokens",
                     MAX_TOKENS if defaults.max_length is None else max(1, defaults.max_length - 1 - forced))
    if not {"temperature", "stop"} & settings.keys():
        given.setdefault("num_beams", defaults.num_beams)
    chosen_settings = Settings.of(given)
    sources = [encoder_ids(tokenizer, known, text, reads, requests.facts.context) for text in texts]
    return [requests.make(ids, chosen_settings, forced, budget) for ids in sources]
