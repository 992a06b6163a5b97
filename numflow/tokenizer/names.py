"""names.toml: names used in files and specs, and their meaning here."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def names() -> dict[str, Any]:
    """The table, read once."""
    return tomllib.loads(files("numflow.tokenizer").joinpath("names.toml").read_text("utf-8"))
