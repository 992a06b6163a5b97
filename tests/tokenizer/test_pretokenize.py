"""Pre-tokenizer rules of names.toml; common ones by hand."""

import random
from copy import deepcopy

import pytest

from numflow.errors import TokenizerError
from numflow.tokenizer.names import names
from numflow.tokenizer.pieces import byte_level
from numflow.tokenizer.pretokenize import build, faster, rule_of
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
    (("spark2_5",), "ab 1234 你好かな.foo!\n\n", "ab| |1|2|3|4| |你好かな|.foo|!|\n|\n"),
    (("kimi-k2",), "HelloWorld'S 1234 漢字Ab漢字、x!\n", "Hello|World'S| |123|4| |漢字|Ab|漢字|、x|!\n"),
    (("kimi-k2",), "々〇 e\u0301 的'S", "々〇| e\u0301| |的|'S"),
    (("tekken",), "HelloWorld 12/", "Hello|World| |1|2|/"),
    (("gpt-4o",), "HelloWorld'S 1234", "Hello|World'S| |123|4"),
    (("bloom", "poro-chat"), "a, b (c)", "a|,| b| (|c|)"),
    (("viking",), "a 12", "a| |1|2"),
    (("superbpe",), "1234567 a", "1|234|567| a"),
    (("superbpe",), "12½34567a123", "12½34|567|a|123"),
    (("tiny_aya",), "1234567 a", "1|234|567| a"),
    (("tiny_aya",), "1234567a ½12345", "123|456|7|a| |½|12|345"),
    (("chameleon",), "a  b1!\n", "a|  |b|1|!|\n"),
    (("default",), "a+b 1234", "a|+|b| |123|4"),
    (("default",), "мир 我想 ½", "мир| 我想| |½"),  # bytes of these letters look like digits once they are characters
])
def test_worked_by_hand(names, text, expected):
    for name in names:
        assert "|".join(cut(name, text)) == expected, name


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_keeps_every_byte(name):
    normalizer, pre_tokenizer = build(rule := rule_of(name, "test"))
    if "spaces" in rule:
        return
    for text in NASTY.values():
        normal = normalizer.normalize_str(text) if normalizer else text
        pieces = pre_tokenizer.pre_tokenize_str(normal)
        assert b"".join(byte_level(piece, False) for piece, _ in pieces) == normal.encode()


def test_names_are_given_once_and_patterns_are_used():
    assert len(NAMES) == len(set(NAMES))
    steps = {step for rule in names()["rule"] for step in rule["steps"]}.union(*names()["faster"].values())
    assert set(names()["patterns"]) == steps - {"byte-level words", "each digit", "runs of punctuation"}


@pytest.mark.parametrize("name", ["llama-bpq", "", None, 3, ["gpt-2"]])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.ggml\.pre .* set `pre`.*; known: .*chameleon"):
        rule_of(name, "model.gguf")


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("sarvam-moe", "a  b\n", ["a▁▁b\n"]),
    ("mmbert", "Hi  you\nand\n\n me", ["▁Hi", "▁", "▁you", "\n", "▁and", "\n\n", "▁me"]),
    ("mmbert", "▁a\n", ["▁a", "\n"]),
    ("whitespace", " Hi,  you\n\u3000你好\n", ["Hi,", "you", "你好"]),
])
def test_rules_of_characters(name, text, expected):
    normalizer, pre_tokenizer = build(rule_of(name, "test"))
    text = normalizer.normalize_str(text) if normalizer else text
    assert ([piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]) == expected


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "tiny_aya"])
@pytest.mark.parametrize("after", ["", "_", "½"])
@pytest.mark.thin(3)
def test_a_long_run_of_digits_is_cut_in_linear_time(name, after):
    """Looking ahead over all digits at each three would take longer than a test may."""
    cuts = [len(piece) for piece, _ in build(rule_of(name, "test"))[1].pre_tokenize_str("1" * 400_000 + after)]
    assert len(cuts) >= 133_334 and set(cuts[1:-2]) == {3}


@pytest.mark.parametrize(("name", "patterns"), [
    ("superbpe", [r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    ("jais-2", [names()["patterns"]["words, 3 digits, spaces by powers of 2"]]),
    ("tiny_aya", [r"\d{1,3}(?=(?:\d{3})*\b)", names()["patterns"]["words by case with contractions, 3 digits"]]),
])
def test_steps_that_are_faster_cut_as_the_published_patterns(name, patterns):
    from tokenizers import Regex, pre_tokenizers

    published = pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                                         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours, of_file, rng = build(rule_of(name, "test"))[1], faster(deepcopy(published)), random.Random(0)
    assert str(of_file) != str(published) and len(of_file.pre_tokenize_str("1" * 400_000)) == 133_334
    for _ in range(2000):
        alphabet = rng.choice(["123", "12½ a", "1²½٣٤ a_\u0301-.", "12a \n", "1½", "1_", "  \t\n", "  \r\n.a"])
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 25)))
        expected = published.pre_tokenize_str(text)
        assert ours.pre_tokenize_str(text) == of_file.pre_tokenize_str(text) == expected, text
