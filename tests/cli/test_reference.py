"""Pages that are generated from the code are up to date."""

import runpy

import pytest

from numflow.cli import python_reference, reference
from numflow.spec import families
from tests.conftest import REPO


@pytest.mark.parametrize("page, module", [("docs/commands.md", reference), ("docs/models.md", families),
                                          ("docs/python.md", python_reference)])
def test_pages_are_up_to_date(page, module):
    assert (REPO / page).read_text(encoding="utf-8") == module.markdown(), \
        f"python -m {module.__name__} > {page}"


def read(page: str) -> str:
    """A page of docs/, which is what its module writes, as the test above shows."""
    return (REPO / f"docs/{page}.md").read_text(encoding="utf-8")


def test_every_command_and_option_has_a_row():
    page = read("commands")
    assert "## numflow generate\n" in page and "## numflow spec check\n" in page
    assert "| `--top-p P` |" in page and page.count("| **Sampling** | |") >= 2


def test_every_family_has_a_row():
    page = read("models")
    assert "| [llama](../specs/llama.toml) |" in page and "LlamaForCausalLM" in page
    assert page.index("## Decoders") < page.index("[llama]") < page.index("## Encoders") < page.index("[bert]")


def test_what_python_promises_has_an_entry():
    page = read("python")
    assert "## numflow.load\n" in page and "### Model.generate\n" in page and "| `SpecError` |" in page
    assert "Raises:" in page and "### Model.program" not in page


def test_the_readme_shows_what_runs():
    table = runpy.run_path(str(REPO / "docs/what_runs.py"))["markdown"]()
    assert table in (REPO / "README.md").read_text(encoding="utf-8"), "python docs/what_runs.py"
