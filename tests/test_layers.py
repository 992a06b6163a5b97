"""Imports point downwards: the code against the table of levels in docs/architecture.md."""

import ast
import re
from pathlib import Path

from tests.conftest import REPO

PACKAGE = REPO / "numflow"


def levels() -> dict[str, int]:
    """Level of each module or package below numflow, from the table of the architecture page."""
    text = (REPO / "docs/architecture.md").read_text(encoding="utf-8")
    table = {}
    for level, modules in re.findall(r"^\| (\d) \| (.+) \|$", text, re.M):
        table |= {name: int(level) for name in re.findall(r"`(\w+)`", modules)}
    return table


def part(path: Path) -> str:
    """The module or package directly below numflow that a file belongs to; "" for numflow's own two files."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first in ("__init__.py", "__main__.py") else first.removesuffix(".py")


def imported(source: str) -> list[str]:
    """Parts of numflow that a source imports anywhere, also inside functions; "" is numflow itself."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "numflow":
            names = [["numflow", alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names = [node.module.split(".")]
        else:
            continue
        parts += [name[1] if len(name) > 1 else "" for name in names if name[0] == "numflow"]
    return parts


def faults(sources: dict[str, list[str]], table: dict[str, int]) -> list[str]:
    """Imports (file part -> imported parts) that do not point downwards."""
    return [f"{owner} imports {other}" for owner, others in sources.items() for other in others
            if other != owner and not table[other] < table[owner]]


def test_every_module_has_a_level():
    found = {part(path) for path in PACKAGE.rglob("*.py")} - {""}
    assert found - set(levels()) == set()


def test_imports_point_downwards():
    table = levels()
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if owner := part(path):  # numflow/__init__.py hands names on, and only when they are asked for
            others = [other for other in imported(path.read_text(encoding="utf-8")) if other in table]
            found += [f"{path.relative_to(REPO)}: {fault}" for fault in faults({owner: others}, table)]
    assert found == []


def test_the_check_finds_what_it_should():
    table = {"cli": 2, "cpu": 1, "cuda": 1, "errors": 0}
    source = "def f():\n    from numflow.cuda.x import y\n    import numflow.errors\n    from numflow import cpu"
    assert imported(source) == ["cuda", "errors", "cpu"]
    assert faults({"cli": ["cpu", "errors"], "cpu": ["errors", "cpu"]}, table) == []
    assert faults({"cpu": ["cuda"], "errors": ["cli"]}, table) == ["cpu imports cuda", "errors imports cli"]


def test_numflow_itself_imports_only_errors_at_once():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module.startswith("numflow")]
    assert [node.module for node in at_once] == ["numflow.errors"]
