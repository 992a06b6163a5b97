"""How each rule of names.toml cuts text, worked by hand for the common ones."""

import time

import pytest

from numflow.errors import TokenizerError
from numflow.tokenizer.names import names
from numflow.tokenizer.pieces import byte_level
from numflow.tokenizer.pretokenize import build, rule_of
from tests.tokenizer.conftest import NASTY

NAMES = [name for rule in names()["rule"] for name in rule["names"]]


def cut(name, text):
    normalizer, pre_tokenizer = build(rule_of(name, "test"))
    text = normalizer.normalize_str(text) if normalizer else text
    return [byte_level(piece, False).decode(errors="replace") for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(("names", "text", "expected"), [
    (("gpt-2", "mpt", "olmo", "phi-2"), "It's  12345 a\n\n b", "It|'s| | 12345| a|\n\n| b"),
    (("smollm", "starcoder", "refact", "command-r"), "It's 123\n x", "It|'s| |1|2|3|\n| x"),
    (("llama-bpe", "llama3", "dbrx", "smaug-bpe", "chatglm-bpe"), "IT'S 12345!\n\n  x", "IT|'S| |123|45|!\n\n| | x"),
    (("qwen2", "stablelm2"), "it's 123?\n", "it|'s| |1|2|3|?\n"),
    (("qwen2",), "e\u0301", "é"),
    (("stablelm2",), "e\u0301", "e|\u0301"),
    (("qwen35",), "न\u093f a", "न\u093f| a"),
    (("falcon",), "a, b... 12345", "a|,| b|...| |123|45"),
    (("deepseek-llm",), "ab 12 你好!\n", "ab| |1|2| |你好|!|\n"),
    (("deepseek-coder",), "ab 12 x=1;", "ab| |1|2| x|=|1|;"),
    (("deepseek-v3",), "ab 1234 你好かな.foo", "ab| |123|4| |你好かな|.foo"),
    (("afmoe",), "12 123 1234 12345 123456", "12| |123| |1|234| |12|345| |123|456"),
    (("afmoe",), "ab 1234567 你好かな a.b", "ab| |1|234|567| |你好かな| a|.b"),
    (("tekken",), "HelloWorld 12/", "Hello|World| |1|2|/"),
    (("gpt-4o",), "HelloWorld'S 1234", "Hello|World'S| |123|4"),
    (("bloom", "poro-chat"), "a, b (c)", "a|,| b| (|c|)"),
    (("viking",), "a 12", "a| |1|2"),
    (("superbpe",), "1234567 a", "1|234|567| a"),
    (("tiny_aya",), "1234567 a", "1|234|567| a"),
    (("chameleon",), "a  b1!\n", "a|  |b|1|!|\n"),
    (("default",), "a+b 1234", "a|+|b| |123|4"),
    (("default",), "мир 我想 ½", "мир| 我想| |½"),  # bytes of these letters look like digits once they are characters
])
def test_worked_by_hand(names, text, expected):
    for name in names:
        assert "|".join(cut(name, text)) == expected, name


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_keeps_every_byte(name):
    normalizer, pre_tokenizer = build(rule_of(name, "test"))
    if pre_tokenizer is None:
        assert normalizer.normalize_str("a b") == "a▁b"
        return
    for text in NASTY.values():
        normal = normalizer.normalize_str(text) if normalizer else text
        pieces = pre_tokenizer.pre_tokenize_str(normal)
        assert b"".join(byte_level(piece, False) for piece, _ in pieces) == normal.encode()


def test_names_are_given_once_and_patterns_are_used():
    assert len(NAMES) == len(set(NAMES))
    steps = {step for rule in names()["rule"] for step in rule["steps"]}
    assert set(names()["patterns"]) == steps - {"byte-level words", "each digit", "runs of punctuation"}


@pytest.mark.parametrize("name", ["llama-bpq", "", None, 3, ["gpt-2"]])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.ggml\.pre .* set `pre`.*; known: .*chameleon"):
        rule_of(name, "model.gguf")


def test_a_long_run_of_numbers_takes_linear_time():
    _, pre_tokenizer = build(rule_of("afmoe", "test"))
    begun = time.process_time()
    pieces = pre_tokenizer.pre_tokenize_str("1" * 100_000)
    assert [len(piece) for piece, _ in pieces[:2]] == [1, 3] and len(pieces) == 33_334
    assert time.process_time() - begun < 3
