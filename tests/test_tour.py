"""docs/tour.md: every file and function that it names exists, and a request passes its eight steps in their order."""

import ast
import re
import sys

import numflow
from tests.conftest import REPO
from tests.server.tiny import write_chat_model

TOUR = (REPO / "docs/tour.md").read_text(encoding="utf-8")
FUNCTION = r"`(numflow/[\w/]+\.py): ([\w.]+)`"


def defined(path: str) -> set[str]:
    """Functions and classes of a file, methods as Class.method, and names that it imports for others."""
    found = set()
    for node in ast.parse((REPO / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_files_and_functions_exist():
    named = re.findall(FUNCTION, TOUR)
    assert len(named) > 12
    assert [f"{path}: {name}" for path, name in named if name not in defined(path)] == []
    files = re.findall(r"`((?:numflow|tests|docs)/[\w/.]+|[A-Z]+\.md)", TOUR)
    assert [name for name in files if "NAME" not in name and not (REPO / name).exists()] == []
    assert len(TOUR.splitlines()) <= 90


def test_every_package_has_a_line():
    packages = {path.parent.name for path in (REPO / "numflow").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `numflow/(\w+)/` \| .+ \|$", TOUR, re.M)) == packages


def test_a_request_passes_the_steps_in_order(tmp_path):
    steps = [step for row in re.findall(r"^\| \d \|.*$", TOUR, re.M) for step in re.findall(FUNCTION, row)]
    write_chat_model(tmp_path)
    seen: list[tuple[str, str]] = []

    def ended(frame, event, _):
        if event == "return":
            one = frame.f_code.co_filename.removeprefix(f"{REPO}/"), frame.f_code.co_qualname
            if one not in seen:
                seen.append(one)

    with numflow.load(tmp_path, backend="reference") as model:
        sys.setprofile(ended)
        try:
            model.generate("hi", max_tokens=2, ignore_eos=True)
        finally:
            sys.setprofile(None)
    assert len(steps) == 8
    assert [one for one in seen if one in steps] == steps
    inside = [("numflow/decoding/sampler.py", "Sampler.pick"),
              ("numflow/engine/run/generation.py", "TextStream.push"),
              ("numflow/engine/run/core.py", "Core.step"), ("numflow/engine/model.py", "Model.generate")]
    assert [one for one in seen if one in inside] == inside
