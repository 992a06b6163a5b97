"""Recipes: the quantisation scheme of each matrix of a model.

A recipe is a scheme's name ("q3h": every matrix), a preset's ("q4-mix"), or a TOML file:

    weights = "q4"              # for matrices that no pattern matches; "keep" leaves them unchanged
    [tensors]                   # pattern = scheme; the first match counts
    "token_embd" = "q6"
    "blk.[0-3].ffn_down" = "q5"
    "model.layers.*.v_proj.weight" = "keep"

Patterns, with * and ? and [...], match a matrix's name in the network ("blk.7.attn_q", see `numflow inspect`), which is
the same for every file format, or its tensor name in the file.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numflow.errors import RequestError, did_you_mean
from numflow.quant import SCHEMES, find

KEEP = "keep"
NONE: Mapping[str, str] = MappingProxyType({})
AUTOMATIC = "auto-"  # name prefix of recipes that were found by measurement

# Embedding table and output matrix need more bits than the rest, value and down projections a few more.
PRESETS: dict[str, tuple[str, dict[str, str]]] = {
    f"{base}-mix": (base, {"token_embd": table, "output": table, "*attn_v": more, "*ffn_down": more})
    for base, more, table in (("q2", "q3", "q4"), ("q3", "q3h", "q5"), ("q3h", "q4", "q5"), ("q4", "q5", "q6"),
                              ("q5", "q6", "q8"), ("q6", "q8", "q8"))
}


@dataclass(frozen=True)
class Recipe:
    """Rules that assign a scheme to every matrix.

    name:    for reports. weights: scheme of matrices that no rule matches, or KEEP.
    rules:   (pattern, scheme or KEEP); the first match counts.
    """

    name: str
    weights: str
    rules: tuple[tuple[str, str], ...] = ()

    def rule(self, *names: str) -> str | None:
        """Scheme of the first rule that matches one of a matrix's names; None for no match."""
        fitting = (scheme for pattern, scheme in self.rules if any(fnmatchcase(name, pattern) for name in names))
        return next(fitting, None)

    def scheme(self, *names: str) -> str:
        """The scheme of a matrix with these names, or KEEP."""
        return self.rule(*names) or self.weights

    def over(self, other: "Recipe") -> "Recipe":
        """This recipe's rules, then those of `other`, with `other`'s default scheme."""
        return Recipe(self.name, other.weights, self.rules + other.rules)

    def idle(self, matrices: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        """Patterns of a recipe file that match no matrix. matrices: names of each matrix."""
        if self.name in PRESETS:
            return ()
        names = [name for aliases in matrices for name in aliases]
        return tuple(pattern for pattern, _ in self.rules if not any(fnmatchcase(name, pattern) for name in names))

    def as_dict(self) -> dict[str, Any]:
        """Content of the recipe's TOML file."""
        return {"name": self.name, "weights": self.weights, "tensors": dict(self.rules)}

    def toml(self) -> str:
        """Text of the recipe's TOML file."""
        lines = [f'name = "{self.name}"', f'weights = "{self.weights}"', "[tensors]"]
        return "\n".join([*lines, *(f'"{pattern}" = "{scheme}"' for pattern, scheme in self.rules)]) + "\n"


def read_recipe(name: str | Path, types: Mapping[str, str] | None = None, mixes: Collection[str] = (),
                beside: Mapping[str, str] = NONE) -> Recipe:
    """The recipe of that name: a scheme, a preset, or a TOML file.

    types: GGUF types by lower-case name, which replace the schemes; presets are available if all their schemes are
    names
           here. mixes: upper-case names of mixes, allowed as default.
    beside: further types beside the schemes, by lower-case name.

    Raises:
        RequestError: no such name, or a wrong file; the message names key and expected value.
    """
    text = str(name)
    if text.upper() in mixes:
        return Recipe(text.upper(), text.upper())
    if types is not None and text.lower() in types:
        return Recipe(types[text.lower()], types[text.lower()])
    if types is None and text.lower() in beside:
        return Recipe(beside[text.lower()], beside[text.lower()])
    if types is None and (text.lower() in SCHEMES or text.endswith("%")):
        scheme = find(text).name
        return Recipe(scheme, scheme)
    if text.lower() in PRESETS:
        weights, rules = PRESETS[text.lower()]
        if types is None:
            return Recipe(text.lower(), weights, tuple(rules.items()))
        if all(scheme in types for scheme in (weights, *rules.values())):
            typed = tuple((pattern, types[scheme]) for pattern, scheme in rules.items())
            return Recipe(text.lower(), types[weights], typed)
    path = Path(name)
    if not path.is_file():
        if types is not None:
            raise RequestError(f"no GGUF type that can be written or recipe file {text!r}{_listing(types, mixes)}")
        raise RequestError(f"no quantisation scheme, preset or recipe file {text!r}"
                           f"{did_you_mean(text.lower(), (*SCHEMES, *PRESETS, *beside, *map(str.lower, mixes)))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: not a readable TOML file: {error}") from None
    return recipe_of(table, str(path), types, mixes, beside)


def _listing(types: Mapping[str, str], mixes: Collection[str]) -> str:
    """Text of all allowed names, with the meaning of short ones."""
    short = ", ".join(f"{name} is {kind}" for name, kind in types.items() if name.upper() != kind)
    return f"; known: {', '.join((*dict.fromkeys(types.values()), *mixes))}" + (f" ({short})" if short else "")


def recipe_of(table: Mapping[str, Any], where: str, types: Mapping[str, str] | None = None,
              mixes: Collection[str] = (), beside: Mapping[str, str] = NONE) -> Recipe:
    """A recipe from the content of its file; `where` is the prefix of error messages.

    Raises:
        RequestError: an unknown key, a value of the wrong type, or an unknown scheme.
    """
    for key in table:
        if key not in ("name", "weights", "tensors"):
            raise RequestError(f"{where}: unknown key {key!r}{did_you_mean(key, ('name', 'weights', 'tensors'))}")
    rules = table.get("tensors", {})
    if not isinstance(rules, Mapping):
        raise RequestError(f"{where}: tensors should be a table of patterns and schemes")
    name = table.get("name", Path(where).stem)
    if not isinstance(name, str) or '"' in name or not name.isprintable():
        raise RequestError(f"{where}: name should be a plain text")
    read = tuple((pattern, _scheme(value, f"{where}: tensors: {pattern!r}", types, beside))
                 for pattern, value in rules.items())
    weights = table.get("weights", KEEP)
    if isinstance(weights, str) and weights.upper() in mixes:
        return Recipe(name, weights.upper(), read)
    return Recipe(name, _scheme(weights, f"{where}: weights", types, beside), read)


def _scheme(value: Any, where: str, types: Mapping[str, str] | None, beside: Mapping[str, str]) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where}: should be a scheme's name or {KEEP!r}, is {value!r}")
    if value.lower() == KEEP:
        return KEEP
    if types is not None:
        if value.lower() not in types:
            raise RequestError(f"{where}: no GGUF type {value!r} that can be written{_listing(types, ())}")
        return types[value.lower()]
    if value.lower() in beside:
        return beside[value.lower()]
    try:
        return find(value).name
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
