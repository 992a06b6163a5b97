"""Log-probabilities in OpenAI's shapes."""

from collections.abc import Iterable, Sequence
from typing import Any

from numflow.decoding.logprobs import TokenLogprob


def token_text(tokenizer, id: int) -> tuple[str, list[int]]:
    """A token's text and bytes. A special token's text is its name; incomplete UTF-8 is shown as bytes."""
    if tokenizer is None:
        return f"token:{id}", []
    if id in tokenizer.special_ids:
        text = tokenizer.token_text(id)
        return text, list(text.encode("utf-8", "replace"))
    raw = tokenizer.token_bytes(id)
    try:
        return raw.decode("utf-8"), list(raw)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)


def chat_entries(tokenizer, entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """choices[].logprobs.content of a chat answer. special: the token is a special one, not part of the text."""
    def shown(id: int, logprob: float) -> dict[str, Any]:
        text, raw = token_text(tokenizer, id)
        special = tokenizer is not None and id in tokenizer.special_ids
        return {"token": text, "logprob": finite(logprob), "bytes": raw, **({"special": True} if special else {})}

    return [{**shown(entry.id, entry.logprob), "top_logprobs": [shown(id, logprob) for id, logprob in entry.top]}
            for entry in entries]


class CompletionLogprobs:
    """choices[].logprobs of a text completion, token by token.

    top: number of alternatives. offset: characters of the text before.
    """

    def __init__(self, tokenizer, top: int, offset: int = 0):
        self._tokenizer, self._top, self._offset = tokenizer, top, offset

    def add(self, entries: Sequence[TokenLogprob | None], texts: Sequence[str]) -> dict[str, Any]:
        """The arrays for further tokens. An entry None is the first token of a prompt, which has no probability.

        texts: the text that each token adds, so that offsets are right for characters of several tokens.
        """
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": [text if entry is None else token_text(self._tokenizer, entry.id)[0]
                           for entry, text in zip(entries, texts, strict=True)],
                "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
                "top_logprobs": [self._alternatives(entry) for entry in entries] if self._top else None,
                "text_offset": offsets}

    def _alternatives(self, entry: TokenLogprob | None) -> dict[str, float] | None:
        """Token text -> log-probability, always with the token itself. Of two tokens with equal text the likelier."""
        if entry is None:
            return None
        found: dict[str, float] = {}
        for id, logprob in (*entry.top, (entry.id, entry.logprob)):
            found.setdefault(token_text(self._tokenizer, id)[0], finite(logprob))
        return found


def finite(logprob: float) -> float:
    """A log-probability for JSON: -9999 instead of -inf, as in OpenAI's interface."""
    return max(float(logprob), -9999.0)
