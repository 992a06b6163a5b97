"""A loaded model of the service: its engine, prompts and default settings."""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numflow
from numflow.decoding.names import inferflow
from numflow.engine.engine import Engine
from numflow.engine.request.prompt import ConversationIds, Prompts, check_size
from numflow.engine.request.sampling import with_model_defaults
from numflow.engine.runner.kv_memory import MemoryPlan
from numflow.errors import NumflowError, RequestError, TokenizerError
from numflow.server.config.config import ModelConfig
from numflow.server.http.errors import ApiError, bad_request
from numflow.server.http.ignored import Ignored
from numflow.server.messages.reply import THINKING, ThinkMarks, shown_marks, special_marks
from numflow.server.messages.settings import with_defaults
from numflow.server.messages.tool_formats import GENERIC, find_format
from numflow.server.models.facts import weight_files
from numflow.server.models.one_system import folded
from numflow.tokenizer.fill_in import FillIn, find_fill_in

SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # samples of each weight file, and bytes of each, for the fingerprint


class Served:
    """A loaded model.

    engine:      None for models that do not generate text.
    tool_format: format of tool calls. template_tools: whether the chat template renders tools.
    fingerprint: a hash that changes with weights, specification, options and version.
    """

    def __init__(self, config: ModelConfig, queue: int):
        self.config, self.name = config, config.name
        self.created = int(time.time())
        self.last_request = (0, 0)  # prompt tokens and new tokens
        self.limits: Any = None  # limits of this machine, once they have been measured (roofline)
        try:
            self.model = numflow.load(config.path, **config.load)
        except NumflowError as error:
            error.respell(config.spell)
            raise
        try:
            self.prompts = self._prompts()
            self.chat_template = self._chat_template()
            found = find_format(self.chat_template, config.prompt.get("tool_format"))
            self.tool_format, self.template_tools = found or GENERIC, found is not None and self.mentions(
                "tools") and not self.prompts.holds_one_question
            self.engine = Engine(self.model, max_queue=queue, budget=config.budget, **config.engine) \
                if self.generates else None
            if self.engine is None and (idle := config.own & config.engine.keys()):
                raise RequestError(f"{min(idle)} has no effect: {config.name} does not generate text")
        except BaseException:
            self.model.close()
            raise
        self.fingerprint = _fingerprint(config, self.model)

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self.model.runner.causal and "logits" in self.model.network.outputs

    @property
    def chats(self) -> bool:
        """Whether the model generates text and has a template for messages."""
        return self.generates and (self.chat_template is not None or self.prompts.has_own_template)

    @property
    def thinks(self) -> bool:
        """Whether the chat template supports thinking."""
        return shown_marks(self.chat_template) is not None or self.mentions("enable_thinking")

    @cached_property
    def think_marks(self) -> ThinkMarks:
        """Marks around thinking text."""
        return shown_marks(self.chat_template) or THINKING[0]

    @property
    def capabilities(self) -> list[str]:
        """Names of the model's capabilities."""
        labels = self.model.facts.labels
        able = {"completion": self.generates, "chat": self.chats, "tools": self.chats and (
            self.template_tools or not self.prompts.holds_one_question), "thinking": self.thinks,
                "insert": self.generates and self.fill_in is not None,
                "embedding": not self.generates and not labels, "rerank": 0 < labels < 3, "classify": labels > 0}
        return [name for name, can in able.items() if can]

    @cached_property
    def fill_in(self) -> FillIn | None:
        """Special tokens for fill-in-the-middle; None if the model has none."""
        try:
            return find_fill_in(self.tokenizer)
        except NumflowError:
            return None

    def filled_in(self, before: str, after: str,
                  files: Sequence[tuple[str, str]] = ()) -> tuple[list[int], dict[str, Any]]:
        """A fill-in-the-middle prompt, and the settings that it needs. files: names and texts of further files.

        Raises:
            ApiError: the model has no tokens for it.
        """
        if self.fill_in is None:
            raise bad_request(f"{self.name} cannot fill in the middle: its vocabulary has no tokens for prefix and "
                              "suffix", "suffix", "unsupported")
        for text in (before, after, *(text for _, text in files)):
            check_size(self.tokenizer, text, self.model.context)
        return self.fill_in.ids(self.tokenizer, before, after, files), {"stop_token_ids": list(self.fill_in.ends)}

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Default settings of requests, from the configuration."""
        return self.config.prompt

    @cached_property
    def sampling(self) -> Mapping[str, Any]:
        """Default sampling settings of a conversation."""
        given = with_defaults({}, self.defaults, talks=True)
        if "decoding_alg" in given:
            return inferflow(given.pop("decoding_alg")) | given
        return with_model_defaults(given, self.model.sampling.values)

    @property
    def failure(self) -> str:
        """Reason why every request fails until the model is loaded again; "" if the model works."""
        return self.engine.failure if self.engine is not None else self.model.core.failure

    @property
    def nbytes(self) -> int:
        """Bytes of weights and KV cache."""
        program = self.model.program
        return int(program.weights_bytes) + self.model.runner.kv_bytes()

    @property
    def memory(self) -> MemoryPlan | None:
        """Memory that the model takes, and its limits."""
        return self.engine.memory if self.engine is not None else self.model.runner.memory

    @property
    def tokenizer(self):
        """The model's tokenizer.

        Raises:
            TokenizerError: it has none.
        """
        return self.model.tokenizer

    @cached_property
    def marks(self) -> dict[int, str]:
        """Special tokens that mark tool calls and thinking: id -> text."""
        return special_marks(self.tokenizer, (*self.think_marks, *self.tool_format.marks))

    def need_engine(self) -> Engine:
        """The engine.

        Raises:
            ApiError: the model does not generate text.
        """
        if self.engine is None:
            raise bad_request(f"{self.name} does not generate text: it is for embeddings or for masked tokens", "model",
                              "unsupported")
        return self.engine

    def knows(self, name: str, field: str, ignored: Ignored) -> bool:
        """Whether the chat template uses a name; if not, the field with its value is ignored."""
        if self.mentions(name):
            return True
        ignored.add(field, f"the chat template of {self.name} does not use {name!r:.80}", "unsupported")
        return False

    def mentions(self, name: str) -> bool:
        """Whether a name occurs in the chat template."""
        return name in self._template_words

    @cached_property
    def _template_words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.chat_template or ""))

    def with_system(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages with the configured system message, if they have no system message."""
        system_prompt = self.config.prompt.get("system_prompt")
        if system_prompt and not any(message["role"] in ("system", "developer") for message in messages):
            return [{"role": "system", "content": system_prompt}, *messages]
        return messages

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> ConversationIds:
        """Token ids of a conversation. If the template refuses the system messages, they are moved (one_system.py).

        variables: further variables of the template.

        Raises:
            TokenizerError: the template refuses the messages.
        """
        messages = self.with_system(messages)
        if "developer" not in (self.chat_template or ""):
            messages = [{**message, "role": "system"} if message["role"] == "developer" else message
                        for message in messages]
        if "chat_template" in self.config.prompt:
            variables = {**variables, "template": self.chat_template}
        try:
            return self.prompts.conversation(messages, **variables)
        except TokenizerError as error:
            for other in folded(messages):
                with suppress(TokenizerError):
                    return self.prompts.conversation(other, **variables)
            raise error

    def text_of(self, messages, variables) -> str:
        """The prompt of a conversation as text, with special tokens."""
        return self.tokenizer.decode(self.render(messages, variables), skip_special=False)

    def check_length(self, ids: Sequence[int], limit: int, param: str = "messages") -> None:
        """Check that a prompt fits into the context, and into the service's limit (0: none).

        Raises:
            ApiError: it does not; the message has both lengths.
        """
        most = min(limit or self.model.context, self.model.context)
        if len(ids) > most:
            raise ApiError(400, f"the prompt has {len(ids)} tokens; the limit is {most} tokens", param=param,
                           code="context_length_exceeded")

    def close(self) -> None:
        """Close engine and model. Running requests are cancelled."""
        if self.engine is not None:
            self.engine.close(drain=False)
        self.model.close()

    def _prompts(self) -> Prompts:
        template = self.config.prompt.get("prompt_template")
        if template is None:
            return self.model.prompts
        return Prompts(lambda: self.model.tokenizer, template, self.config.prompt.get("system_prompt", ""),
                       self.model.context)

    def _chat_template(self) -> str | None:
        path = self.config.prompt.get("chat_template")
        if path is not None:
            try:
                return Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RequestError(f"chat_template {path}: {error}") from None
        try:
            return self.model.tokenizer.chat_template
        except NumflowError:
            return None  # a model without a tokenizer, which takes only token ids


def _fingerprint(config: ModelConfig, model) -> str:
    """A hash of everything that answers depend on: version, options, network, and sizes and samples of weight files."""
    parts = [numflow.__version__, repr(sorted(config.load.items())), model.network.name, repr(model.network.facts)]
    digest = hashlib.sha256("\n".join(map(str, parts)).encode())
    for file in weight_files(config.path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            for sample in range(SAMPLES):
                data.seek(size * sample // SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return f"fp_{digest.hexdigest()[:16]}"
