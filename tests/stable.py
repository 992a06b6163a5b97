"""What docs/stability.md promises, listed from the code: python -m tests.stable > tests/golden/stable.json"""

import inspect
import json
from typing import Any

import typer

import numflow
from numflow.cli.app import app
from numflow.cli.help import options_by_heading
from numflow.cli.python_reference import public_members
from numflow.formats import container
from numflow.server.app import ENDPOINTS
from numflow.spec.schema import SECTIONS


def promises() -> dict[str, list[str]]:
    """Names by kind, each list in order."""
    return {"container": [f"version {container.VERSION}"], "commands": sorted(_commands()), "python": sorted(_python()),
            "routes": sorted(f"{e.method} {path}" for e in ENDPOINTS for path in e.paths),
            "spec": sorted(f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys)}


def _python():
    for name in numflow.__all__:
        value = getattr(numflow, name)
        yield name
        if inspect.isclass(value) and not issubclass(value, Exception):
            for member, each in public_members(value):
                yield f"{name}.{member}"
                yield from _parameters(f"{name}.{member}", getattr(each, "__func__", each))
        elif inspect.isfunction(value):
            yield from _parameters(name, value)


def _parameters(name: str, function: Any):
    if inspect.isfunction(function):
        yield from (f"{name}({each.name})" for each in inspect.signature(function).parameters.values()
                    if each.name != "self" and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))


def _commands():
    group: Any = typer.main.get_command(app)
    yield from _of(group, group.context_class(group, info_name="numflow", **group.context_settings))


def _of(command: Any, context: Any):
    path = context.command_path
    yield path
    for rows in options_by_heading(command, context).values():
        for flags, _ in rows:
            yield from (f"{path} {word}" for word in flags.replace(",", " ").replace("/", " ").split()
                        if word.startswith("-") and word != "-")
    for name, sub in getattr(command, "commands", {}).items():
        yield from _of(sub, sub.context_class(sub, info_name=name, parent=context))


if __name__ == "__main__":
    print(json.dumps(promises(), indent=1))
