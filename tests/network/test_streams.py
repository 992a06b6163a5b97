"""Layers with several residual streams: unsupported options are refused."""

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


def test_norms_behind_a_block_of_hyper_connections(tmp_path):
    with pytest.raises(SpecError, match=r"block\.post_norm: expected 'none' with hyper\.streams, found 'branch'"):
        _build(tmp_path, "hy_v4", '[block]\npost_norm = "branch"\n')


def test_gates_of_columns_leave_the_streams_unmixed(tmp_path):
    with pytest.raises(SpecError, match=r"hyper\.balance: expected 0 with hyper\.rank"):
        _build(tmp_path, "qwen4_exp", "[hyper]\nbalance = 3\n")


def test_one_of_several_streams_has_no_ngrams(tmp_path):
    with pytest.raises(SpecError, match=r"ngrams\.size: expected 0 with altup\.streams"):
        _build(tmp_path, "gemma3n", "[ngrams]\nsize = 2\n")


def test_an_index_beside_scores_of_relative_positions(tmp_path):
    with pytest.raises(SpecError, match=r"indexer\.heads: expected 0 with relative position scores"):
        _build(tmp_path, "inkling", "[indexer]\nheads = 2\nhead_dim = 8\n")


def test_gates_by_head_are_in_no_query_matrix(tmp_path):
    with pytest.raises(SpecError, match=r"attention\.gate_by_head: expected false with attention\.gate_in_query"):
        _build(tmp_path, "laguna", "[attention]\ngate_in_query = true\n")
