"""How the suite itself behaves: where nothing can be written, and when a test hangs."""

import os
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import hypothesis
from pytest import Config, mark

from tests import conftest
from tests.conftest import REPO


def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of its own, by this repository's settings."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", conftest.WHOLE)}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", str(REPO / "pyproject.toml"), *arguments],
                          env=own, cwd=REPO, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@mark.merge
def test_a_cache_that_cannot_be_written_fails_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "test_fine.py").write_text("def test_fine():\n    pass\n")
    done = pytest("-o", f"cache_dir={file}/cache", str(tmp_path / "test_fine.py"))
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert not file.read_text()


def test_the_source_distribution_has_what_the_tests_read():
    """Names at the top of the tree, as tests write them: REPO / "docs", "specs/*.toml", `docs/engine.md`."""
    include = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"][
        "sdist"]["include"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((REPO / "tests").rglob("*.py")))
    made = {".git", ".venv", "build", "dist", "__pycache__"}
    tops = {path.name for path in REPO.iterdir()} - made - {"pyproject.toml", "README.md", "CHANGELOG.md",
                                                            "CONTRIBUTING.md"}
    read = {name for name in re.findall(r"""(?:(?:REPO|ROOT) ?/ ?|[ (])["'](\.?\w+)""", text) if name in tops}
    assert {"numflow", "specs", "docs", "experiments", ".ci"} <= read
    assert {f"/{name}" for name in read} <= set(include) and "/*.md" in include


def test_no_example_is_kept():
    found = hypothesis.settings()
    assert found.database is None and found.derandomize


@mark.merge
def test_a_test_that_hangs_ends_the_run_with_its_stack(tmp_path):
    done = pytest("-p", "no:cacheprovider", "-o", "faulthandler_timeout=0.5", hanging(tmp_path))
    assert done.returncode == 1 and "Timeout" in done.stderr and "test_hanging.py" in done.stderr


@mark.merge
def test_a_test_that_hangs_in_a_shared_run_fails_with_its_stack(tmp_path):
    """Its process ends, and another one goes on with the rest."""
    done = pytest("-p", "no:cacheprovider", "-n", "1", "-o", "faulthandler_timeout=0.5", hanging(tmp_path))
    assert done.returncode == 1 and "Timeout" in done.stderr and "test_hanging.py" in done.stderr
    assert "crashed while running" in done.stdout and "1 failed, 1 passed" in done.stdout


def hanging(folder) -> str:
    """A file of two tests, of which the first never ends."""
    path = folder / "test_hanging.py"
    path.write_text("import threading\n\ndef test_hanging():\n    threading.Event().wait()\n\n"
                    "def test_fine():\n    pass\n")
    return str(path)


def test_the_whole_default_suite_is_shared_out_and_nothing_else(monkeypatch):
    """Not files or marks that a command line names, nor where somebody debugs or says how many processes there are."""
    named, found = Config.ArgsSource.ARGS, Config.ArgsSource.TESTPATHS
    usual = {"numprocesses": None, "dist": "no", "usepdb": False, "collectonly": False, "markexpr": "not slow and more"}
    for source, given, shared in ((found, {}, True), (named, {}, False), (found, {"markexpr": "slow"}, False),
                                  (found, {"usepdb": True}, False), (found, {"numprocesses": 0}, False)):
        for worker in (False, True):  # of those processes, none shares anything out once more
            for name in ("PYTEST_XDIST_WORKER", conftest.WHOLE, conftest.MATRIX_THREADS):
                monkeypatch.delenv(name, raising=False)
            if worker:
                monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
            option = SimpleNamespace(**usual | given)
            conftest.pytest_cmdline_main(SimpleNamespace(option=option, args_source=source))
            assert (option.dist == "worksteal") is bool(option.numprocesses) is (shared and not worker)
            assert (conftest.MATRIX_THREADS in os.environ) is (shared and not worker)


THINNED = """
import pytest

@pytest.mark.parametrize("number", range(40))
@pytest.mark.thin(4)
def test_thin(number):
    pass

@pytest.mark.thin(9)
def test_a_single_case():
    pass

@pytest.mark.merge
def test_long():
    pass

def test_short():
    pass
"""


@mark.merge
def test_a_run_of_the_whole_suite_and_the_rest_are_all_tests(tmp_path):
    """A file that is named runs whole."""
    (tmp_path / "test_thin.py").write_text(THINNED)

    def counted(*arguments):
        done = pytest("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.conftest", "-o",
                      f"testpaths={tmp_path}", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.search(r"(\d+) passed", done.stdout)[1])

    whole, rest, shares = counted(), counted("--rest"), [counted("--rest", "--share", f"{k}/2") for k in range(2)]
    assert whole + rest == counted(str(tmp_path / "test_thin.py")) == 43
    assert 2 + 4 < whole < 2 + 20 and sum(shares) == rest and all(shares)
