"""Every lab: the solution passes, the blank file does not, and each known mistake gets the sentence that names it."""

import ast
import re
import subprocess
import sys

import pytest

from numflow.learn.cases.verdict import cause_of
from numflow.learn.catalogue import BLANK, lab_of, labs
from numflow.learn.child import grader
from tests.conftest import REPO

LABS = {lab.name: lab for lab in labs()}
MISTAKES = [(lab.name, name) for lab in LABS.values() for _, name, _ in lab.mistakes()]


@pytest.fixture(scope="module")
def loaded():
    """A function: the name of a lab -> the names defined in its file, and its grader."""
    found = {}

    def load(name):
        if name not in found:
            own = LABS[name].loaded()
            found[name] = own, grader(LABS[name], own)
        return found[name]

    return load


def solved(lab, own):
    return {name: own[name] for name in lab.functions}


@pytest.mark.parametrize("name", LABS)
@pytest.mark.thin(6)
def test_the_solution_passes(name, loaded):
    own, grade = loaded(name)
    verdict = grade(solved(LABS[name], own))
    assert verdict.passed, verdict.message
    assert verdict.number > 0


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
@pytest.mark.thin(16)
def test_a_mistake_is_called_by_its_name(name, mistake, loaded):
    lab, (own, grade) = LABS[name], loaded(name)
    verdict = grade({**solved(lab, own), mistake.partition("__")[0]: own[mistake]})
    assert not verdict.passed
    known = [(function, sentence, own[each]) for function, each, sentence in lab.mistakes()]
    sentence = next(sentence for _, each, sentence in lab.mistakes() if each == mistake)
    assert cause_of(verdict, known, solved(lab, own), grade) == sentence


@pytest.mark.parametrize("name", LABS)
def test_the_blank_is_a_file_without_the_solution(name):
    lab = LABS[name]
    blank, solution = lab.blank(), lab.solution()
    for source in (blank, solution):
        tree = ast.parse(source)
        assert ast.get_docstring(tree)
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert set(lab.functions) <= set(names) and not [each for each in names if "__" in each]
        assert "LAB" not in [ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)]
    assert lab.facts.get("start") or blank.count(f'raise NotImplementedError("{BLANK}")') == len(lab.functions)
    assert blank != solution


@pytest.mark.parametrize("name", LABS)
def test_the_page_names_its_commands_and_functions(name):
    lab = LABS[name]
    page = ast.get_docstring(ast.parse(lab.source))
    assert page.startswith(f"Lab {lab.number}: ") and f"numflow learn check {lab.number} " in page
    assert len(lab.facts["hints"]) == 3
    for function in lab.functions:
        assert ast.get_docstring(next(node for node in ast.parse(lab.source).body
                                      if getattr(node, "name", "") == function)), function


def test_labs_are_numbered_and_there_are_mistakes_to_be_found():
    assert [lab.number for lab in LABS.values()] == sorted({lab.number for lab in LABS.values()})
    assert {lab.name for lab in LABS.values()} == {name for name, _ in MISTAKES}
    assert all(set(lab.facts.get("needs", [])) <= set(range(1, lab.number)) for lab in LABS.values())


def test_a_lab_is_found_by_number_name_and_label():
    assert {lab_of(word).number for word in ("2", "02", "rope", "02-rope", " RoPE ")} == {2}
    assert lab_of("rms_norm").number == 1


def test_the_list_of_labs_needs_no_numpy():
    code = "import sys; from numflow.learn import catalogue; catalogue.labs(); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO)
    assert done.stdout.strip() == "False"


def test_the_package_needs_nothing_of_its_tests():
    """Labs check with the op cases of numflow/learn/cases, so the package must not import from `tests`."""
    found = [str(path.relative_to(REPO)) for path in (REPO / "numflow").rglob("*.py")
             if re.search(r"^\s*(?:from|import) tests\b", path.read_text(encoding="utf-8"), re.M)]
    assert found == []
