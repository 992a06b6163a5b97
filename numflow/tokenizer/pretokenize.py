"""How byte-level BPE cuts text before merging: pretokenizers.toml as objects of the `tokenizers` package."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from numflow.errors import TokenizerError, did_you_mean


@cache
def _table() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    data = tomllib.loads(files("numflow.tokenizer").joinpath("pretokenizers.toml").read_text("utf-8"))
    return {name: rule for rule in data["rule"] for name in rule["names"]}, data["patterns"]


def rule_of(name: str, where: str) -> Mapping[str, Any]:
    """The row of pretokenizers.toml for a value of tokenizer.ggml.pre.

    Raises:
        TokenizerError: no row has this name; the message lists those there are.
    """
    rules, _ = _table()
    if name not in rules:
        near = did_you_mean(name, rules)
        known = "" if near.startswith("; known") else f"; known: {', '.join(sorted(rules))}"
        raise TokenizerError(f"{where}: tokenizer.ggml.pre {name!r} is not a known way to cut text; "
                             f"set `pre` in the spec's [tokenizer] section{near}{known}")
    return rules[name]


def build(rule: Mapping[str, Any]) -> tuple[Any, Any]:
    """Normalizer (or None) and pre-tokenizer (or None) of a rule."""
    from tokenizers import normalizers, pre_tokenizers

    if rule.get("spaces") == "mark":
        return normalizers.Replace(" ", "\u2581"), None
    normalizer = {"NFC": normalizers.NFC, None: lambda: None}[rule.get("normalizer")]()
    steps = [_step(name) for name in rule["steps"]]
    if not any(name == "gpt-2 words" for name in rule["steps"]):
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return normalizer, pre_tokenizers.Sequence(steps)


def _step(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name == "gpt-2 words":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "each digit":
        return pre_tokenizers.Digits(individual_digits=True)
    if name == "runs of punctuation":
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(_table()[1][name]), behavior="isolated")
