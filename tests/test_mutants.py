"""The list of changes that tests must notice fits the sources, and the command that makes them tells what it should."""

import pytest

from tests import mutants
from tests.conftest import REPO

SOURCE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from toy_source import larger\n\n\ndef test_larger():\n    assert larger(1, 2) == larger(2, 1) == 2\n"


@pytest.mark.parametrize("mutant", mutants.read(), ids=lambda mutant: mutant.what)
def test_every_change_can_be_made(mutant):
    assert mutant.changed((REPO / mutant.file).read_text(encoding="utf-8")) is not None
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in (REPO / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("text, becomes, fate", [
    ("a > b", "a < b", "killed"), ("a > b", "a >= b", "SURVIVED"), ("a == b", "a", "its text is there 0 times"),
    ("return a", "retrun a", "its tests end with 2")])
@pytest.mark.merge
def test_what_becomes_of_a_change(tmp_path, text, becomes, fate):
    (tmp_path / "toy_source.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = [\".\"]\n")
    (tmp_path / "test_toy.py").write_text(TEST)
    mutant = mutants.Mutant("toy", "toy_source.py", text, becomes, ("test_toy.py",))
    assert mutants.judge(mutant, tmp_path).startswith(fate)
    assert (tmp_path / "toy_source.py").read_text() == SOURCE


@pytest.mark.merge
def test_a_change_that_never_ends_is_noticed(tmp_path):
    (tmp_path / "test_toy.py").write_text("def test_for_ever():\n    while True:\n        pass\n")
    assert mutants.passes(tmp_path, ["test_toy.py"], hangs=2) == (mutants.FAILED, "no end after 2 s")
