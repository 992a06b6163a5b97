"""Layers that share or repeat blocks, and tensor names with expressions: refusals and their messages."""

import pytest

from numflow import network
from numflow.errors import SpecError
from numflow.network.steps.names import TensorNames
from numflow.spec import load_spec
from tests.specs.case import load_case, memory_checkpoint


def build(tmp_path, name, text):
    case, path = load_case(name), tmp_path / "own.toml"
    path.write_text(text)
    return network.build(load_spec(str(path)), memory_checkpoint(case.configs[0], case.tensors))


@pytest.mark.parametrize(("name", "text", "words"), [
    ("hrm_text", 'extends = "hrm_text"\n[passes]\nlayers = 3\n', "passes that make up 16 layers"),
    ("hrm_text", 'extends = "hrm_text"\n[passes]\nfirst = false\n', "the last of them of the first stream"),
    ("longcat_flash", 'extends = "longcat_flash"\n[moe]\nenabled = "layer % 2 == 1"\n', "missing tensor|moe.late"),
    ("inkling_text", 'extends = "inkling"\n[moe]\nscore = "softmax_topk"\n', "moe.always: expected scores of softmax"),
    ("zaya", 'extends = "zaya"\n[attention]\nvalue_dim = 4\n', "attention.convolved: expected separate matrices"),
    ("inkling2_text", 'extends = "inkling2"\n[attention]\nrelative = 0\n', "attention.token_sinks: expected"),
    ("inkling2_text", 'extends = "inkling2"\n[block]\nparallel = true\n', "expected False with depth.layers"),
    ("inkling2_loop_text", 'extends = "inkling2_loop"\n[depth]\nloop_layers = 1\n', "whole blocks of 2 layers"),
    ("dory", 'extends = "dory"\n[hf.tensors]\nattn_mix = "lm_head.logit_scale"\n', r"is \[203\], but spec 'own'"),
    ("longcat_flash", 'extends = "longcat_flash"\n[hf.tensors]\nattn_q_a = "layers.{layer // nobody}"\n',
     "names 'nobody', which is no parameter"),
])
def test_what_does_not_go_together(tmp_path, name, text, words):
    with pytest.raises(SpecError, match=words):
        build(tmp_path, name, text)


def test_names_hold_expressions_of_the_layer():
    case = load_case("longcat_flash")
    names = TensorNames(load_spec("longcat_flash"), memory_checkpoint(case.configs[0], case.tensors))
    assert names.find("attn_q_a", "weight", 3).name == "model.layers.1.self_attn.1.q_a_proj.weight"
    assert not list(names.candidates("attn_q_a", "weight", None, ""))


def test_layers_that_run_again_share_their_weights():
    case = load_case("hrm_text")
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    linears = [step for step in built.entries["main"] if step.op == "linear" and "ffn_down" in step.label]
    assert (len(linears), len({step.weights["weight"] for step in linears})) == (16, 4)
