"""A service whose model drafts with its own MTP block."""

import httpx
import pytest

import numflow
from tests.engine.published import write_letters
from tests.engine.test_mtp import table_of_next_words
from tests.server.processes import ServerProcess

pytest.importorskip("tokenizers")
BODY = {"prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.mark.merge
def test_drafts_by_the_block_of_the_model(tmp_path):
    table_of_next_words(tmp_path)
    write_letters(tmp_path, 203)
    config = tmp_path / "service.toml"
    config.write_text(f'[engine]\nbackend = "reference"\n[models.m]\npath = "{tmp_path}"\ndraft = "mtp"\n')
    with numflow.load(tmp_path, backend="reference") as model:
        expected = model.generate("hello", max_tokens=24, ignore_eos=True).text
    with ServerProcess("-c", str(config)) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()
        assert reply["choices"][0]["text"] == expected
        engine = server.wait_idle()
        assert engine["accepted_drafts"] == engine["drafts"] > 0
