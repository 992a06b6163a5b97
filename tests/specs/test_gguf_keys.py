"""Rare and missing keys of GGUF files have the same effect as in llama.cpp.

Found by changing every key of every case and comparing logits with llama.cpp's (b11434).
"""

from dataclasses import replace

import numpy as np
import pytest

from numflow import network
from numflow.errors import NumflowError
from numflow.network import WeightSource
from numflow.reference.program import Program
from tests.specs.case import gguf_checkpoint, load_case, run

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def built(name, changes):
    """The network and its checkpoint; keys with value None are removed from the file."""
    checkpoint = gguf_checkpoint(load_case(name))
    architecture = checkpoint.config["general.architecture"]
    config = dict(checkpoint.config) | {f"{architecture}.{key}": value for key, value in changes.items()}
    checkpoint = replace(checkpoint, config={key: value for key, value in config.items() if value is not None})
    return network.build(network.choose_spec(checkpoint), checkpoint), checkpoint


def logits(name, changes):
    net, checkpoint = built(name, changes)
    return run(Program(net, WeightSource(net, checkpoint)), [n * 7 % 64 for n in range(12)])


@pytest.mark.parametrize(("name", "changes", "like"), [
    ("arcee", {"attention.sliding_window": 5}, {}),
    ("ernie4_5", {"attention.sliding_window": 5}, {}),
    ("bloom", {"attention.layer_norm_rms_epsilon": 0.1}, {}),
    ("qwen2", {"attention.head_count": [4, 4, 4], "feed_forward_length": [88, 88, 88]}, {}),
    ("qwen2", {"rope.scaling.yarn_attn_factor": 1.4}, {}),
    ("qwen2", {"rope.scaling.type": "longrope", "rope.scaling.factor": 3.0},
     {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
    ("pythia", {"rope.scaling.type": "longrope", "rope.scaling.factor": 3.0},
     {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
    ("cohere", {"logit_scale": None}, {"logit_scale": 1.0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None},
     {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("gemma3_one_in_six", {"rope.scaling.type": "none", "rope.scaling.factor": 3.0}, {"rope.scaling.factor": 1.0}),
    ("gemma3_one_in_six", {"rope.scaling.factor": None, "rope.scale_linear": 3.0}, {"rope.scaling.factor": 3.0}),
    ("granite", {"embedding_scale": 0.0, "residual_scale": 0.0}, {"embedding_scale": 1.0, "residual_scale": 1.0}),
    ("granite", {"attention.scale": 0.0}, {"attention.scale": None}),
    ("deepseek_v3", {"expert_weights_scale": 0.0}, {"expert_weights_scale": 1.0}),
    ("deepseek_v3", {"rope.scaling.type": "none"}, {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}),
    ("glm4_moe", {"expert_weights_norm": None}, {"expert_weights_norm": False}),
    ("nemotron_h_moe", {"expert_weights_norm": None}, {"expert_weights_norm": False}),
    ("olmo3", {"attention.sliding_window_pattern": None},
     {"attention.sliding_window_pattern": [True, True, True, False]}),
    ("minimax_m2", {"attention.clamp_kqv": 0.05}, {}),
    ("granitemoehybrid", {"rope.scaling.finetuned": None}, {"rope.scaling.finetuned": True})])
def test_what_changes_nothing_or_is_said_otherwise_too(name, changes, like):
    np.testing.assert_array_equal(logits(name, changes), logits(name, like))


@pytest.mark.parametrize(("name", "changes"), [
    ("gemma3_one_in_six", {"final_logit_softcapping": 1.5}), ("gemma2", {"rope.freq_base_swa": 333.0}),
    ("cohere2", {"rope.dimension_count_swa": 8}), ("gemma4", {"rope.dimension_count": 16}),
    ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}), ("glm4_moe", {"expert_gating_func": 1}),
    ("minimax_m2", {"expert_gating_func": 1}), ("lfm2", {"attention.sliding_window": 5}),
    ("falcon_7b", {"rope.scaling.attn_factor": 1.3}), ("phi4_mini", {"rope.scaling.factor": 2.0}),
    ("deepseek_v3", {"rope.scaling.attn_factor": 1.3})])
def test_what_is_heeded(name, changes):
    found, base = logits(name, changes), logits(name, {})
    assert np.abs(found - base).max() > 0.01 * base.std()


@pytest.mark.parametrize(("changes", "factor"), [
    ({}, 1 + 0.1 * np.log(4)), ({"rope.scaling.attn_factor": 1.3}, 1.3 * (1 + 0.1 * np.log(4))),
    ({"rope.scaling.yarn_attn_factor": 1.4}, 1.4), ({"rope.scaling.type": "none"}, 1),
    ({"rope.scaling.type": "linear", "rope.scaling.attn_factor": 1.3}, 1.3)])
def test_the_factor_of_cosines(changes, factor):
    """attn_factor multiplies YaRN's attention factor; yarn_attn_factor replaces it."""
    net, _ = built("qwen2", YARN | changes)
    steps = [step for step in net.entries["main"] if step.op == "rope_angles"]
    assert {round(step.params["scale"], 5) for step in steps} == {round(float(factor), 5)}


def test_heads_that_differ_by_layer_are_refused():
    with pytest.raises(NumflowError, match="attention.head_count"):
        built("qwen2", {"attention.head_count": [4, 2, 4]})


def test_a_file_whose_slopes_are_flat_is_refused():
    """With a maximum of 0 llama.cpp would compute without positions; without the key, the published slopes are used."""
    with pytest.raises(NumflowError, match="alibi_max: expected a finite number above 0"):
        built("mpt", {"attention.max_alibi_bias": 0.0})
    assert built("mpt", {"attention.max_alibi_bias": None}) is not None
