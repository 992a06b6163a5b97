"""Layers with several residual streams: unsupported options are refused."""

import re

import pytest

from numflow import network
from numflow.errors import SpecError
from numflow.spec import load_spec
from tests.specs.case import load_case, memory_checkpoint


def _build(tmp_path, name, text):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "{name}"\n{text}', encoding="utf-8")
    case = load_case(name)
    network.build(load_spec(path), memory_checkpoint(case.configs[0], case.tensors))


@pytest.mark.parametrize(("section", "text", "expected"), [
    ("block", "parallel = true", "expected False"), ("block", "pre_norm = false", "expected True"),
    ("block", 'residual = "normed"', "expected 'plain'"), ("block", "residual_scale = 0.5", "expected 1.0"),
    ("ffn", "enabled = false", "expected True"), ("mixer", 'kind = "none"', "expected 'attention'")])
@pytest.mark.parametrize(("name", "streams"), [("hy_v4", "hyper"), ("gemma3n", "altup")])
def test_options_that_layers_of_several_streams_do_not_have(tmp_path, name, streams, section, text, expected):
    key = text.split()[0]
    with pytest.raises(SpecError, match=rf"{section}\.{key}: {expected} with {streams}\.streams, found"):
        _build(tmp_path, name, f"[{section}]\n{text}\n")


@pytest.mark.parametrize(("name", "text", "message"), [
    ("hy_v4", '[block]\npost_norm = "branch"\n', "block.post_norm: expected 'none' with hyper.streams, found 'branch'"),
    ("qwen4_exp", "[hyper]\nbalance = 3\n", "hyper.balance: expected 0 with hyper.rank"),
    ("gemma3n", "[ngrams]\nsize = 2\n", "ngrams.size: expected 0 with altup.streams"),
    ("inkling", "[indexer]\nheads = 2\nhead_dim = 8\n", "indexer.heads: expected 0 with relative position scores"),
    ("laguna", "[attention]\ngate_in_query = true\n",
     "attention.gate_by_head: expected false with attention.gate_in_query")])
def test_options_that_exclude_each_other(tmp_path, name, text, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        _build(tmp_path, name, text)
