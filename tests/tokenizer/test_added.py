"""Splitting text at added tokens: leftmost match, longest of several."""

import pytest

from numflow.tokenizer.added import AddedTokens
from numflow.tokenizer.vocabulary import AddedToken

TOKENS = AddedTokens([AddedToken(1, "<a>"), AddedToken(2, "<a>b"), AddedToken(3, "\n\n", special=False),
                      AddedToken(4, "\n", special=False), AddedToken(5, "[m]", lstrip=True),
                      AddedToken(6, "|u|", rstrip=True), AddedToken(7, "")])


@pytest.mark.parametrize(("text", "parts", "plain"), [
    ("", [], []),
    ("xyz", ["xyz"], ["xyz"]),
    ("<a>", [1], ["<a>"]),
    ("x<a>by", ["x", 2, "y"], ["x<a>by"]),
    ("<a><a>b<a", [1, 2, "<a"], ["<a><a>b<a"]),
    ("<<a>", ["<", 1], ["<<a>"]),
    ("a\n\n\nb", ["a", 3, 4, "b"], ["a", 3, 4, "b"]),
    ("a  [m]  b", ["a", 5, "  b"], ["a  [m]  b"]),
    ("  [m]", [5], ["  [m]"]),
    ("a |u| \t b", ["a ", 6, "b"], ["a |u| \t b"]),
    ("|u|  ", [6], ["|u|  "]),
    ("|u|  |u|x", [6, 6, "x"], ["|u|  |u|x"]),
])
def test_cutting(text, parts, plain):
    assert TOKENS.split(text, parse_special=True) == parts
    assert TOKENS.split(text, parse_special=False) == plain


def test_without_tokens_text_stays_whole():
    assert AddedTokens([]).split("<a>", parse_special=True) == ["<a>"]
    assert AddedTokens([]).split("", parse_special=True) == []
