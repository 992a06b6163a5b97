"""Programs that tests and experiments hand to another Python as text import what is there."""

import ast
import importlib
from pathlib import Path

from tests.conftest import REPO

MADE_UP = {"tests/cpu/test_kernel.py", "tests/test_layers.py", "tests/cpu/test_kernel_modules.py"}  # packages


def _programs(path: Path):
    """(line, module, name) of each import of numflow or tests within a text of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value):
            continue
        try:
            program = ast.parse(node.value.strip())
        except SyntaxError:
            continue  # prose
        for part in ast.walk(program):
            if isinstance(part, ast.ImportFrom) and part.module:
                yield from ((node.lineno, part.module, alias.name) for alias in part.names)
            elif isinstance(part, ast.Import):
                yield from ((node.lineno, alias.name, "") for alias in part.names)


def _is_there(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith(("numflow", "tests"))
    return True


def test_imports():
    found = [(path.relative_to(REPO).as_posix(), *program) for folder in ("tests", "experiments")
             for path in sorted((REPO / folder).rglob("*.py")) for program in _programs(path)
             if program[1].split(".")[0] in ("numflow", "tests")]
    assert len({file for file, *_ in found}) > 5
    assert [f"{file}:{line}: {module} {name}" for file, line, module, name in found
            if file not in MADE_UP and not _is_there(module, name)] == []
