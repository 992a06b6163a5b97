"""Conversion of prompts (text, ids, chat messages) to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from numflow.errors import RequestError

SHRINKS = 4  # bytes of a text that a tokenizer's normaliser may turn into one byte
PROBE, SPARE = 8, 64  # characters per token of the limit that are encoded first; tokens that cutting the text may add


def check_size(tokenizer, text: str, most: int | None, what: str = "the prompt") -> None:
    """Refuse a text that certainly has more than `most` tokens, without encoding all of it.

    Raises:
        RequestError: `most` tokens of the longest length in the vocabulary are shorter than the text, or the beginning
            of the text has more than `most` tokens already.
    """
    if most is None or len(text) <= PROBE * most + SPARE:
        return
    size, longest = len(text.encode("utf-8", "replace")), tokenizer.longest
    if size > SHRINKS * most * longest:
        raise RequestError(f"{what} has {size} bytes, which cannot be the {most} tokens that are the limit (no token "
                           f"has more than {longest} bytes)", "context_length_exceeded")
    first = text[:PROBE * most + SPARE]
    if len(tokenizer.encode(first)) > most + SPARE:
        raise RequestError(f"{what} has {size} bytes, and the first {len(first)} characters have more than the {most} "
                           "tokens that are the limit already", "context_length_exceeded")


class ConversationIds(list[int]):
    """Ids of a conversation in the model's chat template; the generated text is a new message."""


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is messages or ids of a conversation, not a text to be continued."""
    return isinstance(prompt, ConversationIds) or (
        not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping))


class Prompts:
    """Convert prompts to ids.

    tokenizer: function that returns the tokenizer, or raises TokenizerError if there is none.
    template, system_prompt: the specification's prompt template (one question), which takes precedence over the chat
        template of the model's files; "" without one.
    most: maximum tokens of a prompt; None: no limit.
    """

    def __init__(self, tokenizer, template: str = "", system_prompt: str = "", most: int | None = None):
        self._tokenizer = tokenizer
        self._template = template
        self._system_prompt = system_prompt
        self._most = most

    @property
    def has_own_template(self) -> bool:
        """Whether the specification or the configuration has a template."""
        return bool(self._template)

    @property
    def has_template(self) -> bool:
        """Whether there is any template for `chat`.

        Raises:
            TokenizerError: the model has no tokenizer.
        """
        return bool(self._template) or self._tokenizer().chat_template is not None

    def check(self) -> None:
        """Load the tokenizer.

        Raises:
            TokenizerError: the model has none.
        """
        self._tokenizer()

    @property
    def holds_one_question(self) -> bool:
        """Whether the template is the specification's, which takes no variables and no earlier messages."""
        return bool(self._template)

    def ids(self, prompt: str | Sequence[int] | Sequence[Mapping], chat: bool) -> Sequence[int]:
        """Token ids of a prompt; ids are returned unchanged.

        Raises:
            RequestError: chat with ids, or a conversation for a template that holds one question.
            TokenizerError: text and no tokenizer, chat and no template, messages that the template refuses.
        """
        if isinstance(prompt, ConversationIds):
            return prompt
        if isinstance(prompt, str):
            message = {"role": "user", "content": prompt}
            return self.conversation([message]) if chat else self.encode(prompt)
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self.conversation(prompt)
        if chat:
            raise RequestError("chat needs text or messages, not token ids")
        return prompt  # type: ignore[return-value]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
            TokenizerError: no tokenizer. RequestError: the text is far too long.
        """
        tokenizer = self._tokenizer()
        check_size(tokenizer, text, self._most)
        return tokenizer.encode(text)

    def conversation(self, messages: Sequence[Mapping], **variables: Any) -> ConversationIds:
        """Ids of messages in the model's template. variables: further variables of a Jinja template (tools, ...).

        Raises:
            RequestError: a conversation, or variables, for a template that holds one question.
            TokenizerError: no tokenizer, no template, or messages that the template refuses.
        """
        tokenizer = self._tokenizer()
        if not self._template:
            return ConversationIds(self.encode(tokenizer.apply_chat(messages, **variables)))
        if variables:
            raise RequestError(f"this model's prompt template holds one question and no {next(iter(variables))}")
        from numflow.tokenizer.inferflow_template import encode_template

        texts = {message.get("role"): message.get("content", "") for message in messages}
        if len(texts) != len(messages) or not texts.keys() <= {"system", "user"} or "user" not in texts:
            raise RequestError("this model's prompt template holds one question: give one user message, and at most a "
                               "system message beside it")
        system = texts.get("system", self._system_prompt)
        check_size(tokenizer, texts["user"] + system, self._most)
        return ConversationIds(encode_template(self._template, tokenizer, texts["user"], system))
