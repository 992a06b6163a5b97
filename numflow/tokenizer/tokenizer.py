"""Tokenizer: a vocabulary, special tokens around texts, and decoding."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numflow.errors import TokenizerError, did_you_mean, quoted
from numflow.tokenizer.vocabulary import Vocabulary, check_text
from numflow.tokenizer.wrapping import Wrapping

ROLES = ("bos", "eos", "unk", "pad", "mask", "sep", "cls", "user", "assistant")


@dataclass(frozen=True)
class Roles:
    """Ids of special tokens by role; None if the model has none.

    user, assistant: tokens that start a turn.
    ends:            all end tokens, of a text or a turn.
    """

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    mask: int | None = None
    sep: int | None = None
    cls: int | None = None
    user: int | None = None
    assistant: int | None = None
    ends: frozenset[int] = frozenset()


class Tokenizer:
    """Text to token ids and back, with the same interface for every kind of vocabulary."""

    def __init__(self, vocabulary: Vocabulary, roles: Roles, wrapping: Wrapping, chat_template: str | None = None):
        self.vocabulary = vocabulary
        self.roles = roles
        self.wrapping = wrapping
        self.chat_template = chat_template
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special_ids
        self.bos_id = roles.bos
        self.eos_ids = roles.ends
        self.pad_id = roles.pad
        self.unk_id = roles.unk
        self.mask_id = roles.mask
        self._pieces: dict[int, bytes] = {}
        self._ids_of_plain_text: dict[bytes, int] | None = None

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts a BOS token first."""
        return self.bos_id is not None and self.wrapping.prefix[:1] == [self.bos_id]

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        add_special:   add the model's special tokens (BOS, EOS, [CLS], ...). Tokens before the text are not repeated if
                       the text starts with them, as a rendered chat template may.
        parse_special: recognise special tokens written in the text; if False, they are ordinary characters.

        Raises:
            TokenizerError: the text has lone surrogates.
        """
        check_text(text)
        ids = self.vocabulary.encode(text, parse_special)
        if not add_special:
            return ids
        prefix = self.wrapping.prefix
        if prefix and ids[: len(prefix)] == prefix:
            ids = ids[len(prefix) :]
        return self.wrapping.apply(ids)[0]

    def encode_pair(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Token ids and token type ids of one text or a pair, with special tokens."""
        texts = [first] if second is None else [first, second]
        for text in texts:
            check_text(text)
        return self.wrapping.apply(*(self.vocabulary.encode(text, True) for text in texts))

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD, ids without a token are ignored.

        continues: the text continues another text: the leading space, which a SentencePiece vocabulary drops at the
                   start of a text, is kept.
        """
        stream = self.stream(skip_special, continues)
        return b"".join([stream.piece(id) for id in ids]).decode("utf-8", errors="replace")

    def stream(self, skip_special: bool = True, continues: bool = False) -> "StreamDecoder":
        """Incremental decoder: takes ids one by one; its pieces joined are the result of `decode`."""
        return StreamDecoder(self, skip_special, continues)

    @cached_property
    def longest(self) -> int:
        """Length of the longest token in bytes; special tokens count with their written form."""
        vocabulary = self.vocabulary
        texts = ((id, vocabulary.text(id)) for id in range(self.vocab_size))
        return max((max(len(text.encode("utf-8", "replace")), len(vocabulary.piece(id, first=False)))
                    for id, text in texts if text is not None), default=1)

    def token_bytes(self, id: int) -> bytes:
        """Bytes of a token inside a text: UTF-8, possibly only a part of a character.

        Raises:
            TokenizerError: no such id.
        """
        piece = self._pieces.get(id)
        if piece is None:
            self.token_text(id)
            piece = self._pieces[id] = self.vocabulary.piece(id, first=False)
        return piece

    def token_text(self, id: int) -> str:
        """Written form of a token in the vocabulary, such as "Ġthe", "▁the" or "<0x0A>".

        Raises:
            TokenizerError: no such id.
        """
        text = self.vocabulary.text(int(id))
        if text is None:
            raise TokenizerError(f"no token {id}: the vocabulary has {self.vocab_size} tokens")
        return text

    def id_of(self, text: str) -> int | None:
        """Id of the token with the written form `text`, else of the first token that decodes to `text`, else None."""
        id = self.vocabulary.id(text)
        if id is None:
            if self._ids_of_plain_text is None:
                ids = reversed(range(self.vocab_size))
                self._ids_of_plain_text = {self.vocabulary.piece(id, first=False): id for id in ids}
                self._ids_of_plain_text.pop(b"", None)
            id = self._ids_of_plain_text.get(text.encode("utf-8", errors="surrogatepass"))
        return id

    def special_texts(self) -> dict[str, str]:
        """Special tokens by role, for templates: {"bos_token": "<s>", ...}."""
        ids = {role: getattr(self.roles, role) for role in ROLES}
        return {f"{role}_token": self.token_text(id) for role, id in ids.items() if id is not None}

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
                   template: str | None = None, **variables: Any) -> str:
        """Text of a conversation in the model's chat template.

        messages:  dicts with "role" and "content", and further keys that the template uses.
        template:  Jinja template instead of the model's.
        variables: further variables of the template (tools, enable_thinking, ...).

        Raises:
            TokenizerError: there is no template, or the template is invalid, refuses the messages or takes too long.
        """
        from numflow.tokenizer.chat import render

        template = template if template is not None else self.chat_template
        if template is None:
            raise TokenizerError("this model has no chat template; give one, or use the text unchanged")
        variables = {"tools": None, "documents": None, **self.special_texts(), **variables}
        return render(template, messages=list(messages), add_generation_prompt=add_generation_prompt, **variables)

    def role_id(self, name: str) -> int:
        """Id of the token with a role ("bos", "eos", "pad", ...).

        Raises:
            TokenizerError: the model has none.
        """
        if name not in ROLES:
            raise TokenizerError(f"no token role {quoted(name)}{did_you_mean(name, ROLES)}")
        id = getattr(self.roles, name)
        if id is None:
            raise TokenizerError(f"this model has no {name} token")
        return id


class StreamDecoder:
    """Incremental decoder of ids; holds back the bytes of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer.vocabulary.unused | (tokenizer.special_ids if skip_special else frozenset())
        self._first = not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Text released by `id`; "" inside a character of several tokens."""
        return self._utf8.decode(self.piece(id))

    def flush(self) -> str:
        """Release the text that is held back, after the last token."""
        return self._utf8.decode(b"", final=True)

    def piece(self, id: int) -> bytes:
        """Bytes of `id` at this position."""
        id = int(id)
        if id in self._skip or not 0 <= id < self._tokenizer.vocab_size:
            return b""
        first, self._first = self._first, False
        return self._tokenizer.vocabulary.piece(id, first)
