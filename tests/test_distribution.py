"""The name that numflow is installed by: it is said once, and nothing tells people to install another's package."""

import re
import runpy
import sys
import tomllib
from types import SimpleNamespace

import pytest

import numflow
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


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py, whose build tool tests do without."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    return runpy.run_path(str(REPO / "hatch_build.py"))


def _filled(hook):
    made, metadata = hook["CustomMetadataHook"](), {}
    made.root = str(REPO)
    made.update(metadata)
    return metadata


def test_the_page_of_the_package_leads_to_the_repository(hook, monkeypatch):
    monkeypatch.setenv("NUMFLOW_URL", "https://example.org/a/b/")
    metadata = _filled(hook)
    text, version = metadata["readme"]["text"], numflow.__version__
    assert f"](https://example.org/a/b/raw/v{version}/docs/chat-page.png)" in text
    assert f"](https://example.org/a/b/blob/v{version}/docs/models.md)" in text
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", prose) == []
    assert metadata["urls"]["Source"] == "https://example.org/a/b"


def test_without_an_address_the_page_is_the_readme(hook, monkeypatch):
    monkeypatch.delenv("NUMFLOW_URL", raising=False)
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert _filled(hook) == {"readme": {"content-type": "text/markdown", "text": readme}, "urls": {}}


def test_links_in_code_and_to_elsewhere_stay(hook):
    text = "[a](https://x.org) [b](#c) ![d](e.png)\n```\n[f](g)\n```\n"
    assert hook["absolute"](text, "https://y.org", "1.0") == text.replace("e.png", "https://y.org/raw/v1.0/e.png")
