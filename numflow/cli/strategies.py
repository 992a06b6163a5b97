"""Settings of a generation, from command-line options."""

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numflow.cli.inputs import read_text
from numflow.errors import RequestError

FILES = ("json_schema", "regex", "grammar")  # settings whose value may be read from a file: @FILE


def strategy(pairs: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Settings from options that are not None and from NAME=VALUE pairs.

    Raises:
        RequestError: a pair without "=", a setting given twice, or a file that cannot be read.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not name or not equals:
            raise RequestError(f"--set needs NAME=VALUE, got {pair!r}")
        if name in given:
            raise RequestError(f"{name} is given twice")
        given[name] = _value(value)
    for name in FILES:
        if isinstance(given.get(name), str) and given[name].startswith("@"):
            given[name] = read_text(Path(given[name][1:]))
    return given


def _value(text: str) -> Any:
    """The value of a text: parsed if it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def completed(model: Any, settings: Mapping[str, Any], raw: bool = False) -> dict[str, Any]:
    """Settings filled with the model's sampling defaults. Settings without effect are dropped, with a line on standard
    error.

    raw: do not use the model's defaults: without settings a raw text is continued greedily.
    """
    from numflow.engine.request.sampling import with_model_defaults
    from numflow.engine.request.settings import Settings

    found = dict(settings) if raw else with_model_defaults(settings, model.sampling.values)
    for name, reason in Settings.of(found).ignored.items():
        print(f"ignored: {reason}", file=sys.stderr)
        del found[name]
    return found


def seeded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with a random seed, if tokens are sampled and no seed is given, so that the seed can be reported."""
    from numflow.engine.request.settings import Settings

    draws = settings.get("seed") is None and not Settings.of(settings).deterministic
    return {**settings, "seed": secrets.randbelow(2**32)} if draws else dict(settings)


def streams(settings: Mapping[str, Any]) -> bool:
    """Whether the text can be streamed: not with several texts or beams."""
    return all(settings.get(name) in (None, 1) for name in ("n", "best_of", "num_beams"))
