"""Kernels that can be read: few parameters, and in long ones a comment at each phase."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import REPO

MOST_PARAMETERS = 12  # fields that belong together are written as one (cuda/lang/parameters.py)
LONG = 40             # lines, above which a kernel tells its phases
PHASE = 24            # lines of a long kernel without a comment, at most


def kernels(source: str) -> list[ast.FunctionDef]:
    """Functions that the decorator `kernel` makes entry points."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(mark).split("(")[0] == "kernel" for mark in node.decorator_list)]


def untold(source: str, function: ast.FunctionDef) -> list[int]:
    """Of a long kernel, the lines from which on more than PHASE come without a comment of their own line."""
    if function.end_lineno - function.lineno < LONG:
        return []
    lines, begin = source.split("\n"), function.body[0].lineno
    told = [at for at in range(begin, function.end_lineno + 1) if lines[at - 1].lstrip().startswith("#")]
    return [a + 1 for a, b in pairwise([begin - 1, *told, function.end_lineno + 1]) if b - a - 1 > PHASE]


def every_kernel() -> list[tuple[Path, str, ast.FunctionDef]]:
    """All of the package, with the sources they are in."""
    files = sorted(path for folder in ("numflow/cuda", "numflow/cpu") for path in (REPO / folder).rglob("*.py"))
    sources = {path: path.read_text(encoding="utf-8") for path in files}
    return [(path, source, function) for path, source in sources.items() for function in kernels(source)]


def test_kernels_have_few_parameters():
    counts = {f"{path.relative_to(REPO)}: {function.name}": len(function.args.args)
              for path, _, function in every_kernel()}
    assert len(counts) > 60
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_long_kernels_tell_their_phases():
    found = [f"{path.relative_to(REPO)}:{line}: {function.name}" for path, source, function in every_kernel()
             for line in untold(source, function)]
    assert found == []


@pytest.mark.parametrize("before, after, lines", [
    (20, 20, []), (24, 24, []), (25, 20, [3]), (13, 30, [17]), (20, 5, [])])
def test_the_search_for_phases(before, after, lines):
    body = ["x = 1"] * before + ["# barrier"] + ["x = 2"] * after
    source = "@kernel()\ndef _probe():\n" + "\n".join(f"    {line}" for line in body)
    assert untold(source, *kernels(source)) == lines
