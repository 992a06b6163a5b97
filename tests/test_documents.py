"""The documents: their Python runs, their commands have the options they show, their links lead somewhere.

docs/new-model.md has tests of its own in tests/network/test_tutorial.py.
"""

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import numflow
from numflow.quant.recipe import recipe_of
from tests.conftest import REPO

PAGES = sorted(path for pattern in ("*.md", "docs/*.md", "docs/*/*.md", "specs/*.md", "reports/*.md", "reports/*/*.md")
               for path in REPO.glob(pattern))
TEXTS = {str(path.relative_to(REPO)): path.read_text(encoding="utf-8") for path in PAGES}
MANUALS = [name for name in TEXTS if not name.startswith(("reports/", "CHANGELOG"))]


def blocks(page: str, language: str = r"\w*") -> list[str]:
    """Code of a page; `language` is a pattern."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXTS[page], re.S | re.M)
    return [code for name, code in found if re.fullmatch(language, name)]


def prose(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.S | re.M)


def anchors(path: Path) -> set[str]:
    """What headings of a page are called in links, as GitHub does it."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    wrong = []
    for link in re.findall(r"\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (REPO / page).parent / name if name else REPO / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", MANUALS)
def test_files_of_the_repository_that_are_named_exist(page):
    named = re.findall(r"`((?:numflow|tests|experiments|docs|specs|reports|\.ci)/[^`\s:]*)", prose(page))
    assert [name for name in named if not list(REPO.glob(name.rstrip("/,."))) and "NAME" not in name] == []


def test_how_headings_become_anchors(tmp_path):
    (tmp_path / "page.md").write_text("# A page\n\n## What `numflow serve` does, and why\n```\n# no heading\n```\n")
    assert anchors(tmp_path / "page.md") == {"a-page", "what-numflow-serve-does-and-why"}


# Python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that has a tokenizer and a chat template."""
    from tests.server.tiny import write_chat_model

    return write_chat_model(tmp_path_factory.mktemp("documents") / "model")


@pytest.fixture
def model(folder):
    with numflow.load(folder, backend="reference") as loaded:
        yield loaded


@pytest.mark.parametrize("page", [name for name in MANUALS if "```python" in TEXTS[name]])
def test_python_compiles(page):
    for number, code in enumerate(blocks(page, "python")):
        compile(code, f"{page}, block {number}", "exec")


def test_the_readme_s_python_runs(folder, monkeypatch, capsys):
    load = numflow.load
    monkeypatch.setattr(numflow, "load", lambda name, **options: load({"smollm2": folder}[name], **options))
    (code,) = blocks("README.md", "python")
    found = {}
    exec(compile(code, "README.md", "exec"), found)
    assert found["logits"].shape[0] == 3 and len(capsys.readouterr().out) > 8


@pytest.mark.parametrize("page", ["docs/decoding.md", "docs/engine.md"])
def test_python_of_the_manuals_runs(page, model, capsys):
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page}, block {number}", "exec"), {"numflow": numflow, "model": model})


# Configuration


def test_toml_of_the_manuals():
    (recipe,) = blocks("docs/quantisation.md", "toml")
    found = recipe_of(tomllib.loads(recipe), "docs/quantisation.md")
    assert found.scheme("token_embd") == "q6" and found.scheme("blk.2.ffn_down") == "q5"
    from numflow.server.config.config import make_config

    (service,) = blocks("docs/server.md", "toml")
    config = make_config(tomllib.loads(service), "docs/server.md")
    assert config.port == 8080


# Commands


def command_lines() -> list[tuple[str, str]]:
    """(page, command) of all that is shown, in blocks and in lines."""
    found = []
    for page in MANUALS:
        shown = [line.partition("  #")[0] for block in blocks(page, "sh|console|text|") for line in block.splitlines()]
        shown = [part.strip() for line in shown for part in re.split(r"&&|   ", line)]
        shown += [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(page))]
        found += [(page, line.removesuffix(" &")) for line in shown
                  if re.match(r"(?:\.venv/bin/)?numflow [a-z-]", line)]
    return sorted(set(found))


@cache
def commands() -> Any:
    """The command line's commands."""
    import typer

    from numflow.cli.app import app

    return typer.main.get_command(app)


def parse(line: str) -> None:
    """What typer says of a command's name and options; nothing is run."""
    command, arguments = commands(), shlex.split(line)[1:]
    while hasattr(command, "resolve_command") and arguments and re.match(r"[a-z]", arguments[0]):
        _, command, arguments = command.resolve_command(command.context_class(command), arguments)
    command.make_parser(command.context_class(command)).parse_args(arguments)


@pytest.mark.parametrize(("page", "line"), command_lines())
@pytest.mark.thin(4)
def test_commands_have_the_options_that_are_shown(page, line):
    parse(line)


@pytest.mark.parametrize("line", ["numflow generat", "numflow generate --no-such-option", "numflow spec chek"])
def test_wrong_commands_are_noticed(line):
    with pytest.raises(Exception, match="[Nn]o such"):
        parse(line)


def test_enough_commands_are_found():
    assert len(command_lines()) > 40


# A service


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """Of a service that serves the tiny model by the name that the manual uses."""
    pytest.importorskip("uvicorn")
    from tests.server.processes import ServerProcess

    path = tmp_path_factory.mktemp("service") / "service.toml"
    path.write_text(f'[engine]\nbackend = "reference"\n[models.smollm2]\npath = "{folder}"\n')
    with ServerProcess("-c", str(path)) as server:
        yield server.url


@pytest.mark.merge
def test_requests_of_the_manual_are_answered(url):
    """As curl sends them: a form, unless a header says something else."""
    httpx = pytest.importorskip("httpx")
    asked = re.findall(r"^curl (\S+) -d '(.+)'$", "\n".join(blocks("docs/server.md", "sh")), re.M)
    assert len(asked) == 2
    for address, body in asked:
        reply = httpx.post(re.sub(r"^(http://)?localhost:8080", url, address), content=body, timeout=60,
                           headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert reply.status_code == 200, reply.text
        json.loads(reply.text)


def test_openai_s_client_as_the_manual_shows_it(url):
    pytest.importorskip("openai")
    (code,) = blocks("docs/server.md", "python")
    found = {}
    exec(compile(code.replace("http://localhost:8080", url), "docs/server.md", "exec"), found)
    assert found["reply"].choices[0].message.content is not None
    found["client"].close()
