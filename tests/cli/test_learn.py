"""`numflow learn`, from the list of labs to the solution."""

import json

import pytest

from numflow.learn import progress
from numflow.learn.catalogue import labs


@pytest.fixture
def quick(monkeypatch):
    """A fake check that passes if the file holds the solution: tests/learn/test_check.py tests the real process."""
    def check(lab, folder, seconds, model):
        passed = (folder / lab.file_name).read_text(encoding="utf-8") == lab.solution()
        return {"lab": lab.number, "name": lab.name, "title": lab.title, "passed": passed, "message": "a line",
                "cause": "" if passed else "a known mistake", "printed": "said\x1b[2J"}

    monkeypatch.setattr("numflow.learn.check.check", check)


def test_a_lab_from_start_to_end(run, quick, tmp_path):
    folder = tmp_path / "mine"
    first = json.loads(run("learn", "list", "--json").out)
    assert [row["number"] for row in first] == [lab.number for lab in labs()]
    assert {row["state"] for row in first} == {"new"}
    started = run("learn", "start", "01", "--dir", folder)
    assert started.code == 0 and "numflow learn check 1 --dir" in started.out
    assert json.loads(run("learn", "list", "--json").out)[0]["state"] == "started"
    failed = run("learn", "check", "rms-norm", "--dir", folder)
    assert failed.code == 1 and "not yet" in failed.out and "a known mistake" in failed.out
    assert "\x1b" not in failed.out
    (folder / "rms_norm.py").write_text("mine", encoding="utf-8")
    solved = run("learn", "solution", "1", "--dir", folder)
    assert solved.code == 0 and "your file is now rms_norm.yours-1.py" in solved.out
    assert (folder / "rms_norm.yours-1.py").read_text(encoding="utf-8") == "mine"
    passed = run("learn", "check", "1", "--dir", folder, "--json")
    assert passed.code == 0 and json.loads(passed.out)["passed"] is True
    assert json.loads(passed.out)["attempts"] == 2
    assert "passed" in run("learn", "list").out
    (folder / "rms_norm.py").write_text("no more", encoding="utf-8")
    assert run("learn", "check", "1", "--dir", folder).code == 1
    assert progress.state("rms-norm")["state"] == "passed"


def test_a_file_that_is_there_is_not_overwritten(run, tmp_path):
    run("learn", "start", "rope", "--dir", tmp_path)
    (tmp_path / "rope.py").write_text("mine", encoding="utf-8")
    again = run("learn", "start", "rope", "--dir", tmp_path)
    assert again.code == 1 and "exists already: --again starts again" in again.err
    assert run("learn", "start", "rope", "--dir", tmp_path, "--again").code == 0
    assert (tmp_path / "rope.yours-1.py").read_text(encoding="utf-8") == "mine"


def test_without_a_file_the_solution_is_measured(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("learn", "bench", "5")
    assert done.code == 0 and done.out.startswith("lab 5, Paged keys and values, solved: blocks of ")
    assert "250 blocks" in done.out and "50 blocks" in done.out
    assert run("learn", "bench", "5", "--dir", tmp_path).err.startswith("error: no paged_kv.py in ")


def test_hints_come_one_by_one(run):
    said = [run("learn", "hint", "3").out for _ in range(4)]
    assert [line[:12] for line in said] == ["hint 1 of 3:", "hint 2 of 3:", "hint 3 of 3:", "hint 3 of 3:"]
    assert run("learn", "hint", "3", "1").out == said[0]
    assert "hints 1 to 3, not 9" in run("learn", "hint", "3", "9").err


@pytest.mark.parametrize(("arguments", "message"), [
    (("start", "ropes"), "no lab 'ropes'; did you mean 'rope'?"), (("check", "99"), "no lab '99'; known: "),
    (("list", "--labs", "nowhere"), "no folder 'nowhere' of labs")])
def test_what_is_not_there(run, arguments, message):
    outcome = run("learn", *arguments)
    assert outcome.code == 1 and message in outcome.err


LECTURER = '''"""Lab 1: doubling.

    numflow learn check 1 --labs FOLDER
"""

LAB = {"number": 1, "title": "Doubling", "minutes": 1, "functions": ["double"], "grader": "own", "hints": ["Add."]}


def double(x):
    """x -> 2 x."""
    return x + x


def double__square(x):
    """a square"""
    return x * x


def grade(functions):
    from numflow.learn.cases.verdict import right, wrong

    for number, x in enumerate((0, 2, 3), 1):
        if (found := functions["double"](x)) != 2 * x:
            return wrong(f"double-{x}", number, 3, f"got {found}, expected {2 * x}", found)
    return right(3)
'''


def test_a_lecturer_s_own_lab(run, tmp_path):
    own, mine = tmp_path / "own", tmp_path / "mine"
    own.mkdir()
    (own / "doubling.py").write_text(LECTURER, encoding="utf-8")
    assert "Doubling" in run("learn", "list", "--labs", own).out
    run("learn", "start", "1", "--labs", own, "--dir", mine)
    text = (mine / "doubling.py").read_text(encoding="utf-8")
    assert "still blank" in text and "x + x" not in text and "grade" not in text
    (mine / "doubling.py").write_text("def double(x):\n    return x * x\n", encoding="utf-8")
    facts = json.loads(run("learn", "check", "1", "--labs", own, "--dir", mine, "--json").out)
    assert facts["message"] == "case double-3 (3 of 3): got 9, expected 6" and facts["cause"] == "a square"


@pytest.mark.parametrize(("old", "new", "message"), [
    ('"number": 1', '"number": "one"', "LAB['number'] should be given, of type int"),
    ('["double"]', '["triple"]', "LAB['functions'] names 'triple', which the file does not define"),
    ('"hints"', '"hint"', "LAB['hints'] should be given, of type list"),
    ('["Add."]', '["Add."], "minuts": 3', "LAB has no 'minuts' of type int; did you mean 'minutes'?"),
    ('"own"', 'str(1)', "LAB should be a dict of plain values")])
def test_a_lab_that_is_wrong(run, tmp_path, old, new, message):
    (tmp_path / "doubling.py").write_text(LECTURER.replace(old, new), encoding="utf-8")
    outcome = run("learn", "list", "--labs", tmp_path)
    assert outcome.code == 1 and message in outcome.err and "doubling.py" in outcome.err
