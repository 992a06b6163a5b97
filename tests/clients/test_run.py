"""The run of client programs: what cannot be installed or fails is told and is no success."""

import sys

import pytest

from tests.clients import run
from tests.clients.checks import KINDS

GOOD = {"version": "1", "found": dict.fromkeys(KINDS, "yes")}


def test_a_program_that_cannot_be_installed_is_told_as_such(tmp_path, monkeypatch):
    (tmp_path / "llm_tool" / "bin").mkdir(parents=True)
    (tmp_path / "llm_tool" / "bin" / "python").write_text("#!/bin/sh\necho 'ERROR: no such package' >&2\nexit 1\n")
    (tmp_path / "llm_tool" / "bin" / "python").chmod(0o700)
    monkeypatch.setattr(run.sys, "executable", "true")  # no environment is made
    with pytest.raises(run.NotInstalledError, match="no such package"):
        run.environment(tmp_path, "llm_tool", ("llm",))
    assert not (tmp_path / "llm_tool" / "made").exists()
    told = run.failed("cannot be installed: no such package")
    assert run.exit_code([GOOD]) == 0 and run.exit_code([GOOD, told]) == 1
    assert "| llm | ? | toy | no: cannot be installed: no such package |" in run.table({("llm_tool", "toy"): told})


@pytest.mark.parametrize("program", ["import sys; sys.exit('wrong')", "", "import time; time.sleep(60)"])
@pytest.mark.merge
def test_a_program_that_ends_without_an_outcome_has_failed(program, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    monkeypatch.setattr(run, "RUN_S", 5)
    (tmp_path / "odd.py").write_text(program)
    assert run.exit_code([run.outcome(sys.executable, "odd", "http://127.0.0.1:9", "toy")]) == 1
