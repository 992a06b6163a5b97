"""From what a caller gives as a prompt (text, ids, chat messages) to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from numflow.errors import RequestError


class Conversation(list[int]):
    """Ids of a conversation in the model's template already; what comes next is a text of its own."""


class Prompts:
    """Turns prompts into ids.

    tokenizer: function that returns the tokenizer, or raises TokenizerError where there is none.
    template, system_prompt: the specification's prompt template (one question), which goes before the chat template
        of the model's files; "" if it has none.
    """

    def __init__(self, tokenizer, template: str = "", system_prompt: str = ""):
        self._tokenizer = tokenizer
        self._template = template
        self._system_prompt = system_prompt

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

    def ids(self, prompt: str | Sequence[int] | Sequence[Mapping], chat: bool) -> Sequence[int]:
        """Token ids of a prompt; what is no text and no message passes as it is.

        Raises:
            RequestError: chat with ids, or a conversation for a template that holds one question.
            TokenizerError: text and no tokenizer, chat and no template, messages that the template refuses.
        """
        if isinstance(prompt, Conversation):
            return prompt
        if isinstance(prompt, str):
            message = {"role": "user", "content": prompt}
            return self.conversation([message]) if chat else self._tokenizer().encode(prompt)
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            return self.conversation(prompt)
        if chat:
            raise RequestError("chat needs text or messages, not token ids")
        return prompt  # type: ignore[return-value]

    def conversation(self, messages: Sequence[Mapping], **variables: Any) -> Conversation:
        """Ids of messages in the model's template. variables: more names for a Jinja template (tools, ...).

        Raises:
            RequestError: a conversation, or variables, for a template that holds one question.
            TokenizerError: no tokenizer, no template, or messages that the template refuses.
        """
        tokenizer = self._tokenizer()
        if not self._template:
            return Conversation(tokenizer.encode(tokenizer.apply_chat(messages, **variables)))
        if variables:
            raise RequestError(f"this model's prompt template holds one question and no {next(iter(variables))}")
        from numflow.tokenizer.inferflow_template import encode_template

        texts = {message.get("role"): message.get("content", "") for message in messages}
        if len(texts) != len(messages) or not texts.keys() <= {"system", "user"} or "user" not in texts:
            raise RequestError("this model's prompt template holds one question: give one user message, and at most a "
                               "system message beside it")
        system = texts.get("system", self._system_prompt)
        return Conversation(encode_template(self._template, tokenizer, texts["user"], system))
