"""Tokenizer: a vocabulary, the special tokens around text, and the way back from ids to text."""

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
    """Ids with a meaning; None where the model has none.

    user, assistant: tokens that start a turn.
    ends:            every id that ends a text or a turn.
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
    """Text to token ids and back, the same for every kind of vocabulary."""

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

        add_special:   put the model's own tokens around it (BOS, EOS, [CLS], ...), none of the first ones twice
                       when the text itself starts with them, as a rendered chat template may.
        parse_special: recognise special tokens written in the text; off, they are ordinary characters.

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
        """Token ids and token type ids of one text or a pair, with the model's own tokens around them."""
        texts = [first] if second is None else [first, second]
        for text in texts:
            check_text(text)
        return self.wrapping.apply(*(self.vocabulary.encode(text, True) for text in texts))

    def decode(self, ids: Iterable[int], skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids that are no tokens become nothing.

        continues: the text goes on after other text, so that the space a SentencePiece vocabulary drops at the
                   very start of a text is kept.
        """
        stream = self.stream(skip_special, continues)
        return b"".join([stream.piece(id) for id in ids]).decode("utf-8", errors="replace")

    def stream(self, skip_special: bool = True, continues: bool = False) -> "StreamDecoder":
        """A decoder that takes ids one by one; its pieces joined are what `decode` returns."""
        return StreamDecoder(self, skip_special, continues)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token; special ones count as they are written."""
        vocabulary = self.vocabulary
        texts = ((id, vocabulary.text(id)) for id in range(self.vocab_size))
        return max((max(len(text.encode("utf-8", "replace")), len(vocabulary.piece(id, first=False)))
                    for id, text in texts if text is not None), default=1)

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token adds inside a text: UTF-8, possibly only a part of a character.

        Raises:
            TokenizerError: no such id.
        """
        piece = self._pieces.get(id)
        if piece is None:
            self.token_text(id)
            piece = self._pieces[id] = self.vocabulary.piece(id, first=False)
        return piece

    def token_text(self, id: int) -> str:
        """The token as the vocabulary writes it, such as "Ġthe", "▁the" or "<0x0A>".

        Raises:
            TokenizerError: no such id.
        """
        text = self.vocabulary.text(int(id))
        if text is None:
            raise TokenizerError(f"no token {id}: the vocabulary has {self.vocab_size} tokens")
        return text

    def id_of(self, text: str) -> int | None:
        """Id of the token the vocabulary writes as `text`, else of the first one that decodes to it, else None."""
        id = self.vocabulary.id(text)
        if id is None:
            if self._ids_of_plain_text is None:
                ids = reversed(range(self.vocab_size))
                self._ids_of_plain_text = {self.vocabulary.piece(id, first=False): id for id in ids}
                self._ids_of_plain_text.pop(b"", None)
            id = self._ids_of_plain_text.get(text.encode("utf-8", errors="surrogatepass"))
        return id

    def special_texts(self) -> dict[str, str]:
        """Texts of the tokens with a role: {"bos_token": "<s>", ...}, for templates."""
        ids = {role: getattr(self.roles, role) for role in ROLES}
        return {f"{role}_token": self.token_text(id) for role, id in ids.items() if id is not None}

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
                   template: str | None = None, **variables: Any) -> str:
        """The text of a conversation in the model's own format.

        messages:  dicts with "role" and "content", and whatever else the template knows.
        template:  Jinja text to use instead of the model's own.
        variables: more names for the template (tools, enable_thinking, ...).

        Raises:
            TokenizerError: there is no template, or it is wrong, refuses the messages or takes too long.
        """
        from numflow.tokenizer.chat import render

        template = template if template is not None else self.chat_template
        if template is None:
            raise TokenizerError("this model has no chat template; give one, or use the text as it is")
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
    """Text of ids that come one by one; holds back the bytes of a character that is not complete."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continues: bool = False):
        self._tokenizer = tokenizer
        self._skip = tokenizer.vocabulary.unused | (tokenizer.special_ids if skip_special else frozenset())
        self._first = not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Text that is certain now that `id` has come; often "" inside a character of several tokens."""
        return self._utf8.decode(self.piece(id))

    def flush(self) -> str:
        """The text held back so far, once no more tokens come."""
        return self._utf8.decode(b"", final=True)

    def piece(self, id: int) -> bytes:
        """The bytes `id` adds at this place."""
        id = int(id)
        if id in self._skip or not 0 <= id < self._tokenizer.vocab_size:
            return b""
        first, self._first = self._first, False
        return self._tokenizer.vocabulary.piece(id, first)
