"""Pre-tokenisers of byte-level BPE: the rules of names.toml as objects of the `tokenizers` package."""

import json
from collections.abc import Mapping
from typing import Any

from numflow.errors import TokenizerError, did_you_mean, quoted
from numflow.tokenizer.names import names

MARK = "\u2581"  # replaces a space


def rule_of(name: Any, where: str) -> Mapping[str, Any]:
    """Rule in names.toml for a value of tokenizer.ggml.pre.

    Raises:
        TokenizerError: no rule has this name; the message lists the known names.
    """
    rules = {value: rule for rule in names()["rule"] for value in rule["names"]}
    if not isinstance(name, str) or name not in rules:
        near = did_you_mean(name, rules)
        known = "" if near.startswith("; known") else f"; known: {', '.join(sorted(rules))}"
        raise TokenizerError(f"{where}: tokenizer.ggml.pre {quoted(name)} is not a known pre-tokenizer; "
                             f"set `pre` in the spec's [tokenizer] section{near}{known}")
    return rules[name]


def build(rule: Mapping[str, Any], lowercase: bool = False) -> tuple[Any, Any]:
    """Normalizer (or None) and pre-tokenizer (or None) of a rule.

    lowercase: whether to lower-case first; only for rules that drop spaces.
    """
    from tokenizers import Regex, normalizers, pre_tokenizers

    if rule.get("spaces") == "mark":
        return normalizers.Replace(" ", MARK), None
    if rule.get("spaces") == "drop":
        return normalizers.Lowercase() if lowercase else None, pre_tokenizers.WhitespaceSplit()
    if rule.get("spaces") == "mark words":
        starts = normalizers.Replace(Regex(rf"(?<![^\n])(?=[^\n{MARK}])"), MARK)
        words = pre_tokenizers.Split(Regex(rf"{MARK}[^{MARK}\n]*|\n+"), behavior="isolated")
        return normalizers.Sequence([normalizers.Replace(" ", MARK), starts]), words
    normalizer = {"NFC": normalizers.NFC, None: lambda: None}[rule.get("normalizer")]()
    steps = [_step(name) for step in rule["steps"] for name in names()["faster"].get(step, [step])]
    if "byte-level words" not in rule["steps"]:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return normalizer, pre_tokenizers.Sequence(steps)


def faster(pre_tokenizer: Any) -> Any:
    """Equivalent pre-tokenizer with slow patterns replaced by the steps of [faster]."""
    patterns = names()["patterns"]
    steps = {patterns[slow]: quick for slow, quick in names()["faster"].items()}
    state = json.loads(pre_tokenizer.__getstate__())
    old = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    if not any(_pattern(part) in steps for part in old):
        return pre_tokenizer
    new = []
    for part in old:
        quick = steps.get(_pattern(part))
        new += [part] if quick is None else [part | {"pattern": {"Regex": patterns[name]}} for name in quick]
    pre_tokenizer.__setstate__(json.dumps({"type": "Sequence", "pretokenizers": new}).encode())
    return pre_tokenizer


def _pattern(part: Mapping[str, Any]) -> str | None:
    """Regular expression of a part that isolates matches, None for other parts."""
    isolates = part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]
    return part["pattern"].get("Regex") if isolates else None


def _step(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name == "byte-level words":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "each digit":
        return pre_tokenizers.Digits(individual_digits=True)
    if name == "runs of punctuation":
        return pre_tokenizers.Punctuation(behavior="contiguous")
    return pre_tokenizers.Split(Regex(names()["patterns"][name]), behavior="isolated")
