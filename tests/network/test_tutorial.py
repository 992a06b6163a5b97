"""docs/new-model.md works: its blocks are read from the page and run."""

import re

import pytest

import numflow
from numflow import network
from numflow.errors import SpecError
from numflow.formats import open_checkpoint
from numflow.network.drafts.new_spec import draft
from tests.conftest import REPO


def blocks(language: str) -> list[str]:
    page = (REPO / "docs" / "new-model.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


@pytest.fixture(scope="module")
def mars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(blocks("python")[0], "new-model.md", "exec"), {})
        (folder / "mars.toml").write_text(blocks("toml")[0], encoding="utf-8")
    return folder


def test_before_the_spec_the_model_is_unknown_and_the_draft_says_what_it_can(mars):
    checkpoint = open_checkpoint(mars / "mars")
    with pytest.raises(SpecError, match="no spec for model 'MarsForCausalLM'"):
        network.choose_spec(checkpoint)
    drafted = draft(checkpoint)
    assert drafted.problem
    assert 'architectures = ["MarsForCausalLM"]' in drafted.text
    assert "#   blocks.{layer}.mix.q" in drafted.text or '"attn_q" = "blocks.{layer}.mix.q"' in drafted.text


def test_with_the_spec_it_runs(mars, monkeypatch, capsys):
    monkeypatch.chdir(mars)
    exec(compile(blocks("python")[1], "new-model.md", "exec"), {})
    shape, ids = capsys.readouterr().out.splitlines()
    assert shape == "(3, 100)"
    assert len(eval(ids)) == 5


def test_cpu_and_reference_agree_on_it(mars):
    ids = list(range(20))
    with numflow.load(mars / "mars", spec=mars / "mars.toml", backend="reference") as model:
        expected = model.logits(ids)
    with numflow.load(mars / "mars", spec=mars / "mars.toml", backend="cpu", activations="f32") as model:
        assert abs(model.logits(ids) - expected).max() < 1e-4 * expected.std()
