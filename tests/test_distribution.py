"""The name that numflow is installed by: it is said once, and nothing tells people to install another's package."""

import re
import tomllib

import pytest

from numflow import distribution
from tests.conftest import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# An installer that is told "numflow", or that with extras anywhere; the distribution's own name goes on with "-".
OTHERS = re.compile(r"\b(?:install|pipx|uv)\b[^`\n]*?[\s'\"]numflow(?![-\w./])|\bnumflow\[[a-z]", re.I)


def texts():
    patterns = ("numflow/**/*.py", "numflow/**/*.html", "numflow/**/*.js", "docs/*.md", "*.md", "specs/*.md",
                "Makefile", ".ci/*")
    return [path for pattern in patterns for path in REPO.glob(pattern)]


def test_the_name_is_that_of_pyproject():
    assert distribution.NAME == PROJECT["name"] != "numflow"
    assert PROJECT["scripts"] == {"numflow": "numflow.cli:main"}
    assert all(distribution.install(extra) == f"pip install '{PROJECT['name']}[{extra}]'"
               for extra in PROJECT["optional-dependencies"])


def test_no_text_installs_somebody_elses_package():
    found = [f"{path.relative_to(REPO)}: {line.strip()}" for path in texts()
             for line in path.read_text(encoding="utf-8").splitlines() if OTHERS.search(line)]
    assert found == []


@pytest.mark.parametrize("text, found", [
    ("pip install numflow", True), ("pip install -U 'numflow[server]'", True), ("numflow[ray]", True),
    ("uv add numflow", True), ("pip install 'numflow-llm[server]'", False), ("pip install .", False),
    (".venv/bin/pip install . && .venv/bin/numflow generate", False), ("the package numflow", False)])
def test_the_pattern(text, found):
    assert bool(OTHERS.search(text)) is found


def test_hints_name_extras_that_there_are():
    named = {extra for path in texts() for extra in re.findall(r"install\(['\"]([\w-]+)['\"]\)|-llm\[([\w-]+)\]",
                                                               path.read_text(encoding="utf-8")) for extra in extra}
    assert named - {""} <= set(PROJECT["optional-dependencies"]) and "server" in named
