import dataclasses

import numpy as np
import pytest

from numflow import network
from numflow.errors import NetworkError, SpecError
from numflow.network.describe import cache_bytes_per_token, group_steps, tensor_types
from numflow.ops import Step, View
from numflow.spec import load_spec
from tests.network.toy import CONFIG, checkpoint, shapes


def build(**changes):
    ck = checkpoint(**changes)
    return network.build(network.choose_spec(ck), ck), ck


def test_a_plain_decoder_is_ten_steps_a_layer_and_four_around():
    net, ck = build()
    ops = [step.op for step in net.entries["main"]]
    assert ops[:2] == ["embed", "rms_norm"]
    assert ops[-3:] == ["copy", "rms_norm", "linear"]
    fused = [step for step in net.entries["main"] if step.label == "blk.1.attn_q+attn_k+attn_v"]
    assert len(fused) == 1
    assert net.weights[fused[0].weights["weight"]].shape == (32 + 16 + 16, 32)
    assert net.facts == {"type": "decoder", "vocabulary": 40, "layers": 2, "width": 32, "context": 64}
    groups = group_steps(net, ck)
    assert sum(g.stored_bytes for g in groups) == ck.nbytes
    assert next(g for g in groups if g.label == "blk.*.attn_q+attn_k+attn_v").layers == "0-1"
    assert [g.layers for g in groups if g.label == "blk.*.ffn_down"] == ["0", "1"]  # the last one on wanted rows
    assert tensor_types(net, ck)["F32"][2] == ck.nbytes
    assert cache_bytes_per_token(net) == 2 * 2 * (8 + 8) * 2


def test_fused_and_unfused_networks_hold_the_same_weights():
    ck = checkpoint()
    spec = network.choose_spec(ck)
    fused, plain = network.build(spec, ck), network.build(spec, ck, fuse=False)
    source, parts = network.WeightSource(fused, ck), network.WeightSource(plain, ck)
    whole = source.f32("blk.0.attn_q.weight + blk.0.attn_k.weight + blk.0.attn_v.weight")
    pieces = [parts.f32(f"blk.0.attn_{x}.weight") for x in "qkv"]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))
    raw = source.raw("blk.0.attn_q.weight + blk.0.attn_k.weight + blk.0.attn_v.weight")
    np.testing.assert_array_equal(raw.rows.view(np.float32), whole)


def test_grouped_rows_of_a_fused_projection_are_told_apart():
    """Labelled rows must come out as all queries, all keys, all values."""
    from numflow.network.blocks.projections import Heads, _grouped_rows

    q, k, v = _grouped_rows(Heads(heads=4, kv_heads=2, head_dim=3, value_dim=3))
    stored = [f"{kind}{g}" for g in range(2) for kind in ("q0", "q1", "k", "v") for _ in range(3)]
    assert [stored[i] for i in q] == [n for g in range(2) for h in ("q0", "q1") for n in [f"{h}{g}"] * 3]
    assert {stored[i][0] for i in k} == {"k"} and {stored[i][0] for i in v} == {"v"}


@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({"num_attention_heads": None}, {}, ["config.json has no 'num_attention_heads'", "parameters.heads"]),
        ({}, {"model.norm.weight": None}, ["missing tensor output_norm.weight", "'model.norm.weight'"]),
        (
            {},
            {"model.layers.1.mlp.up_proj.weight": (48, 31)},
            ["'model.layers.1.mlp.up_proj.weight' is [48, 31]", "[48, 32]"],
        ),
        ({}, {"model.norm.weight": (33,)}, ["model.norm.weight", "33"]),
        ({}, {"model.extra.weight": (3,)}, ["no place for tensor 'model.extra.weight'"]),
        ({"num_key_value_heads": 3}, {}, ["attention.heads: expected a multiple of attention.kv_heads 3, found 4"]),
        ({"num_hidden_layers": 3}, {}, ["missing tensor", "model.layers.2."]),
        ({"num_hidden_layers": 1}, {}, ["no place for tensor", "model.layers.1."]),
        ({"rope_scaling": {"rope_type": "spiral"}}, {}, ["spiral", "rope.scaling"]),
        ({"hidden_act": "swash"}, {}, ["ffn.activation", "swash"]),
    ],
)
def test_what_does_not_fit_is_one_clear_error(config, tensors, words):
    stored = {n: s for n, s in (shapes() | tensors).items() if s is not None}
    with pytest.raises((SpecError, NetworkError)) as error:
        ck = checkpoint({**CONFIG, **config}, stored)
        network.build(network.choose_spec(ck), ck)
    message = str(error.value)
    assert any(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.input_layernorm"])
def test_a_norm_of_another_width_is_refused_with_file_and_tensor(name):
    ck = checkpoint(tensors=shapes() | {f"{name}.weight": (33,)})
    with pytest.raises(SpecError) as error:
        network.build(network.choose_spec(ck), ck)
    assert str(error.value) == f"{ck.path}: tensor '{name}.weight' is [33], but spec 'llama' expects [32]"


def test_another_familys_checkpoint_is_refused():
    ck = checkpoint({**CONFIG, "architectures": ["MarsForCausalLM"]})
    with pytest.raises(SpecError, match="no spec for model 'MarsForCausalLM'.*spec new"):
        network.choose_spec(ck)
    with pytest.raises(SpecError, match="missing tensor"):
        network.build(load_spec("bloom"), checkpoint({**CONFIG, "n_embed": 32}))


def test_ignore_may_name_the_layer_after_the_last(tmp_path):
    extra = "model.layers.2.eh_proj.weight"
    one, two = (checkpoint(tensors=shapes() | dict.fromkeys(names, (3, 3)))
                for names in ((extra,), (extra, extra.replace("2", "4"))))
    path = tmp_path / "next.toml"
    for ck, pattern, fits in ((one, "model.layers.{layers}.*", True), (one, "model.layers.3.*", False),
                              (two, "model.layers.{beyond}.*", True)):
        path.write_text(f'extends = "llama"\n[hf]\nignore = ["{pattern}"]\n', encoding="utf-8")
        if fits:
            network.build(load_spec(path), ck)
        else:
            with pytest.raises(SpecError, match=f"no place for tensor '{extra}'"):
                network.build(load_spec(path), ck)


def test_blocks_far_behind_the_last_layer_are_not_the_layer_after_it(tmp_path):
    ck = checkpoint(tensors=shapes() | {"model.layers.4.eh_proj.weight": (3, 3)})
    path = tmp_path / "next.toml"
    path.write_text('extends = "llama"\n[hf]\nignore = ["model.layers.{layers}.*"]\n', encoding="utf-8")
    with pytest.raises(SpecError, match="no place for tensor 'model.layers.4.eh_proj.weight'"):
        network.build(load_spec(path), ck)


def change(net, index, **fields):
    steps = list(net.entries["main"])
    steps[index] = dataclasses.replace(steps[index], **fields)
    return dataclasses.replace(net, entries={"main": tuple(steps)})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"op": "rms_nrom"}, ["rms_nrom", "did you mean 'rms_norm'"]),
        ({"inputs": ()}, ["takes inputs"]),
        ({"inputs": (View("nowhere", 0, 32),)}, ["no buffer named 'nowhere'"]),
        ({"inputs": (View("x", 8, 32),)}, ["outside buffer 'x'"]),
        ({"inputs": (View("ffn", 0, 32),)}, ["before it is written"]),
        ({"outputs": (View("normed", 0, 16),)}, ["width of x", "16"]),
        ({"weights": {"weight": "token_embd.weight"}}, ["token_embd.weight"]),
        ({"weights": {"wieght": "output_norm.weight"}}, ["wieght"]),
        ({"weights": {"weight": "nothing"}}, ["'nothing' is no weight"]),
        ({"params": {}}, ["needs parameter 'eps'"]),
        ({"params": {"eps": 1e-6, "groups": 5}}, ["5 groups do not divide"]),
        ({"params": {"eps": 1e-6, "epsilon": 1}}, ["no parameter 'epsilon'"]),
    ],
)
def test_the_verifier_names_the_wrong_step(fields, words):
    net, _ = build()
    with pytest.raises(NetworkError) as error:
        network.verify(change(net, 1, **fields))
    assert "blk.0.attn_norm" in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_steps_print_as_one_line():
    net, _ = build()
    step = net.entries["main"][1]
    assert str(step) == "blk.0.attn_norm: normed[0:32] = rms_norm(x[0:32], weight=blk.0.attn_norm.weight)"
    assert isinstance(step, Step)
