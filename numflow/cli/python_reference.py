"""Generator of docs/python.md from numflow.__all__: every public function, class and method with its docstring."""

import inspect
from typing import Any

import numflow

_INTRO = """# Python

The public Python interface of `import numflow`; other names may change. [stability.md](stability.md) has the rules.
(This page is written by `python -m numflow.cli.python_reference > docs/python.md`.)

"""


def markdown() -> str:
    """The whole page."""
    public = {name: getattr(numflow, name) for name in numflow.__all__ if not name.startswith("_")}
    errors = {name: each for name, each in public.items() if inspect.isclass(each) and issubclass(each, Exception)}
    lines = [_INTRO.rstrip("\n"), ""]
    for name, each in public.items():
        if name not in errors:
            lines += _entry(f"numflow.{name}", each, "##")
            if inspect.isclass(each):
                for member, value in public_members(each):
                    lines += _entry(f"{name}.{member}", value, "###")
    lines += ["## Errors", "", "Each has a message of one line; all are a `NumflowError`.", "",
              "| error | is also | raised when |", "|---|---|---|"]
    lines += [f"| `{name}` | {_bases(each)} | {_first(each)} |" for name, each in errors.items()]
    return "\n".join(lines) + "\n"


def public_members(of: type) -> list[tuple[str, Any]]:
    """(name, function, property or class method) of the public members of a class, in source order."""
    found: dict[str, Any] = {}
    for each in (*reversed(of.__mro__[:-1]),):
        if each.__module__.startswith("numflow."):
            found |= {name: value for name, value in vars(each).items() if not name.startswith("_")}
    return [(name, value) for name, value in found.items()
            if callable(value) or isinstance(value, property | classmethod | staticmethod)]


def _entry(title: str, value: Any, heading: str) -> list[str]:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    doc = inspect.getdoc(function) or ""
    lines = [f"{heading} {title}", ""]
    if not isinstance(value, property):
        lines += ["```text", f"{title.rpartition('.')[2]}{_signature(function)}", "```", ""]
    return lines + (["```text", doc, "```", ""] if "\n" in doc else [doc, ""] if doc else [])


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parts = [each for each in signature.parameters.values() if each.name != "self"]
    return str(signature.replace(parameters=[each.replace(annotation=each.empty) for each in parts],
                                 return_annotation=signature.empty))


def _first(error: type) -> str:
    return (inspect.getdoc(error) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _bases(error: type) -> str:
    return ", ".join(f"`{each.__name__}`" for each in error.__bases__ if each is not Exception)


if __name__ == "__main__":
    print(markdown(), end="")
