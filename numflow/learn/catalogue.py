"""The labs, one Python file each. A file is parsed, without running it, into the student's blank file and the solution.

A lab's file contains, in this order: the docstring, which is the page that the student reads; `LAB`, a literal dict;
given functions; the functions of LAB["functions"], which are the solution; functions `NAME__MISTAKE`, known mistakes,
whose docstring is the sentence that the student is told. Functions with a leading "_" belong to the solution. `grade`,
if it exists, replaces the grader of LAB["grader"]. `story` generates text with the functions. `bench` measures them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numflow.errors import RequestError, did_you_mean

OWN = Path(__file__).parent / "labs"
KEYS = {"number": int, "title": str, "minutes": int, "functions": list, "grader": str, "hints": list}
BLANK = "still blank"
_MORE = {"needs": list, "cases": list, "start": str}
_CHECKS = ("grade", "story", "bench")  # functions of a lab that are not in the student's file


@dataclass(frozen=True)
class LabFile:
    """A lab. facts: its LAB, and the parameters of the functions to write."""

    name: str
    path: Path
    source: str
    facts: dict[str, Any]

    @property
    def number(self) -> int:
        """Number of the lab in the course."""
        return self.facts["number"]

    @property
    def title(self) -> str:
        """Title of the lab, one line."""
        return self.facts["title"]

    @property
    def functions(self) -> list[str]:
        """Names of the functions that the student writes."""
        return self.facts["functions"]

    @property
    def label(self) -> str:
        """Name of the lab's folder, such as "05-paged-kv"."""
        return f"{self.number:02}-{self.name}"

    @property
    def file_name(self) -> str:
        """Name of the student's file."""
        return f"{self.name.replace('-', '_')}.py"

    def blank(self) -> str:
        """Content of the student's file: the functions to write have no body."""
        return _joined(self._blank_parts())

    def solution(self) -> str:
        """Content of the student's file with the solution."""
        return _joined(_text(self.source, node) for node in self._nodes() if not _is_mistake(node))

    def mistakes(self) -> list[tuple[str, str, str]]:
        """Known mistakes: (function, name of the mistake in this file, sentence for the student)."""
        return [(node.name.partition("__")[0], node.name, " ".join((ast.get_docstring(node) or "").split()))
                for node in ast.parse(self.source).body if isinstance(node, ast.FunctionDef) and _is_mistake(node)]

    def loaded(self) -> dict[str, Any]:
        """Run the lab's file and return its global names."""
        found: dict[str, Any] = {"__name__": f"lab_{self.name.replace('-', '_')}", "__file__": str(self.path)}
        exec(compile(self.source, str(self.path), "exec"), found)
        return found

    def _nodes(self) -> list[ast.stmt]:
        """Statements of the file without LAB and the checks; mistakes are included."""
        return [node for node in ast.parse(self.source).body
                if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAB")
                and getattr(node, "name", "") not in _CHECKS]

    def _blank_parts(self) -> Iterator[str]:
        """Statements of the blank file. With LAB["start"] ("fault" in `scan__fault`) the student's functions begin with
        the body of that mistake instead of a blank, without the mistake's docstring."""
        start, nodes = self.facts.get("start"), list(self._nodes())
        solved: dict[str, Any] = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            name = getattr(node, "name", "")
            if start and name.endswith(f"__{start}"):
                yield _with_mistake(self.source, node, solved[name.partition("__")[0]])
            elif _is_mistake(node) or name.startswith("_") or (start and name in self.functions):
                continue
            else:
                yield _without_body(self.source, node) if name in self.functions else _text(self.source, node)


def labs(folder: Path | None = None) -> list[LabFile]:
    """The labs of a folder, sorted by number; None: the labs of the course."""
    place = OWN if folder is None else folder
    if not place.is_dir():
        raise RequestError(f"no folder {str(place)!r} of labs")
    found = [lab for path in sorted(place.glob("*.py")) if not path.name.startswith("_")
             if (lab := _read(path)) is not None]
    if not found:
        raise RequestError(f"no file in {str(place)!r} is a lab: a lab defines LAB")
    return sorted(found, key=lambda lab: (lab.number, lab.name))


def lab_of(wanted: str, folder: Path | None = None) -> LabFile:
    """Find a lab by its number ("5", "05"), name or label."""
    known, word = labs(folder), wanted.strip().lower().replace("_", "-").replace(" ", "-")
    for lab in known:
        if word in (lab.name, lab.label) or (word.isdecimal() and int(word) == lab.number):
            return lab
    raise RequestError(f"no lab {wanted!r}{did_you_mean(word, [lab.name for lab in known])}")


def _read(path: Path) -> LabFile | None:
    """Read the lab of a file; None if the file defines no LAB."""
    try:
        source = path.read_text(encoding="utf-8")
        body = ast.parse(source).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} should be a lab in Python: {error}") from None
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAB":
            try:
                facts = ast.literal_eval(node.value)
            except (ValueError, TypeError):
                raise RequestError(f"{path}: LAB should be a dict of plain values") from None
            return LabFile(path.stem.replace("_", "-"), path, source, _checked(path, facts, body))
    return None


def _checked(path: Path, facts: Any, body: list[ast.stmt]) -> dict[str, Any]:
    if not isinstance(facts, dict):
        raise RequestError(f"{path}: LAB should be a dict, is {type(facts).__name__}")
    for key, kind in KEYS.items():
        if type(facts.get(key)) is not kind:
            raise RequestError(f"{path}: LAB[{key!r}] should be given, of type {kind.__name__}")
    for key, value in facts.items():
        if key not in KEYS and not isinstance(value, _MORE.get(key, ())):
            raise RequestError(f"{path}: LAB has no {key!r} of type {type(value).__name__}"
                               f"{did_you_mean(key, [*KEYS, *_MORE])}")
    if not re.fullmatch(r"\w+", facts["grader"]):
        raise RequestError(f"{path}: LAB['grader'] should be a name, is {facts['grader']!r}")
    defined = {node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
               for node in body if isinstance(node, ast.FunctionDef)}
    for name in facts["functions"]:
        if name not in defined:
            raise RequestError(f"{path}: LAB['functions'] names {name!r}, which the file does not define")
    return facts | {"parameters": {name: defined[name] for name in facts["functions"]}}


def _is_mistake(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and "__" in node.name.strip("_")


def _text(source: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1:node.end_lineno])


def _without_body(source: str, node: Any) -> str:
    """A function with its docstring only, which raises NotImplementedError."""
    keeps = node.body[0] if ast.get_docstring(node) is not None else None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    last = keeps.end_lineno if keeps else node.body[0].lineno - 1
    return "\n".join([*source.splitlines()[first - 1:last], f'    raise NotImplementedError("{BLANK}")'])


def _with_mistake(source: str, mistake: Any, solved: Any) -> str:
    """A function with its name and docstring from the solution and its body from a mistake."""
    head = _without_body(source, solved).splitlines()[:-1]
    return "\n".join([*head, *source.splitlines()[mistake.body[1].lineno - 1:mistake.end_lineno]])


def _joined(parts: Any) -> str:
    """Statements joined with the usual empty lines: two around functions, none between imports."""
    text, before = "", ""
    for part in parts:
        plain = re.match(r"(?:import|from) ", part) is not None
        if text:
            lines = 1 if plain and before == "import" else 3 if _defines(part) or before == "def" else 2
            text += "\n" * lines
        text += part
        before = "import" if plain else "def" if _defines(part) else "other"
    return text.rstrip() + "\n"


def _defines(part: str) -> bool:
    return re.match(r"(?:def|class|@)", part) is not None


def untouched(source: str, lab: LabFile) -> bool:
    """Whether all functions to write are still as in the blank file."""
    def bodies(text: str) -> dict[str, str]:
        return {node.name: ast.unparse(node) for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef) and node.name in lab.functions}

    return bodies(source) == bodies(lab.blank())
