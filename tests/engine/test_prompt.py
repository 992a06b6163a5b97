"""Prompts: text, ids, messages, and templates of a specification."""

import pytest

from numflow.engine.request.prompt import Prompts
from numflow.errors import RequestError, TokenizerError
from tests.engine.fake import BOS, FakeTokenizer


class PlainTokenizer(FakeTokenizer):
    """What a specification's template needs beside: no BOS on request."""

    def encode(self, text, add_special=True, parse_special=True):
        return [BOS, *text.encode()] if add_special else list(text.encode())

    def role_id(self, role):
        return {"bos": BOS}[role]


def prompts(template="", system_prompt=""):
    return Prompts(PlainTokenizer, template, system_prompt)


def test_text_is_encoded_and_ids_pass():
    assert prompts().ids("ab", False) == [BOS, 97, 98]
    assert prompts().ids([5, 6], False) == [5, 6]
    assert prompts().ids([], False) == []


def test_the_chat_template_of_the_files():
    expected = [BOS, *b"<user>hi<assistant>"]
    assert prompts().ids("hi", True) == expected
    assert prompts().ids([{"role": "user", "content": "hi"}], False) == expected


def test_the_template_of_the_specification_comes_first():
    own = prompts("{bos}[{system_prompt}] Q:{query} A:", "be kind")
    assert own.ids("hi", True) == [BOS, *b"[be kind] Q:hi A:"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert own.ids(messages, True) == [BOS, *b"[be brief] Q:hi A:"]
    assert own.ids("hi", False) == [BOS, *b"hi"]


@pytest.mark.parametrize("roles", [["user", "assistant", "user"], ["system"], ["user", "tool"]])
def test_a_template_of_one_question_refuses_a_conversation(roles):
    with pytest.raises(RequestError, match="holds one question"):
        prompts("{query}").ids([{"role": role, "content": "x"} for role in roles], True)


def test_ids_are_no_chat():
    with pytest.raises(RequestError, match="not token ids"):
        prompts().ids([1], True)


def test_without_a_tokenizer_only_ids_work():
    def none():
        raise TokenizerError("no tokenizer")

    assert Prompts(none).ids([1], False) == [1]
    with pytest.raises(TokenizerError):
        Prompts(none).ids("text", False)


def test_far_too_long_texts_are_refused_before_they_are_encoded():
    class Tokenizer:
        longest = 10

        def encode(self, text):
            raise AssertionError("it was encoded")

    prompts = Prompts(Tokenizer, most=100)
    for text in ("x" * 4001, "é" * 2001):
        with pytest.raises(RequestError, match="bytes, which cannot be the 100 tokens") as caught:
            prompts.ids(text, chat=False)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(AssertionError, match="encoded"):
        prompts.ids("x" * 800, chat=False)


def test_of_a_long_text_the_beginning_is_encoded_first():
    seen = []

    class Tokenizer:
        longest = 10

        def encode(self, text):
            seen.append(len(text))
            return [1] * (len(text) // self.each)

    prompts = Prompts(Tokenizer, most=100)
    Tokenizer.each = 2
    with pytest.raises(RequestError, match="the first 864 characters have more than the 100 tokens") as caught:
        prompts.ids("x" * 4000, chat=False)
    assert seen == [864] and caught.value.code == "context_length_exceeded"
    Tokenizer.each = 40  # it may fit: all of it is encoded
    assert len(prompts.ids("x" * 4000, chat=False)) == 100 and seen[1:] == [864, 4000]
