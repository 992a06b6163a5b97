"""Pages that are made from code say what the code says now."""

import pytest

from numflow.cli import reference
from numflow.spec import families
from tests.conftest import REPO


@pytest.mark.parametrize("page, module", [("docs/commands.md", reference), ("docs/models.md", families)])
def test_pages_are_up_to_date(page, module):
    assert (REPO / page).read_text(encoding="utf-8") == module.markdown(), \
        f"python -m {module.__name__} > {page}"


def test_every_command_and_option_has_a_row():
    page = reference.markdown()
    assert "## numflow generate\n" in page and "## numflow spec check\n" in page
    assert "| `--top-p P` |" in page and page.count("| **Sampling** | |") >= 2


def test_every_family_has_a_row():
    page = families.markdown()
    assert "| [llama](../specs/llama.toml) |" in page and "LlamaForCausalLM" in page
    assert page.index("## Decoders") < page.index("[llama]") < page.index("## Encoders") < page.index("[bert]")
