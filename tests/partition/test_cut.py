"""Results of the partition passes: exchanges, slices, and the owners of outputs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from numflow import network
from numflow.errors import DeviceError, NetworkError
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import tensor_type
from numflow.network.steps.checks import verify
from numflow.ops import EXCHANGES
from numflow.partition.cut.cut import partition
from numflow.partition.cut.plan import layer_of, single_device
from tests.partition.plans import TOLERANCE, error, model_of, one_device, several_devices
from tests.specs.case import load_case, memory_checkpoint


def _ops(part, entry="main"):
    return Counter(step.op for step in part.network.entries[entry])


def _step(part, label):
    return next(s for steps in part.network.entries.values() for s in steps if label in s.label)


def test_by_layer_every_step_is_somewhere_once():
    built, *_ = model_of("qwen3")
    plan = partition(built, "0*2;1", fuse=False)
    first, second = (part.network.entries["main"] for part in plan.devices)
    ours = [s for s in (*first, *second) if s.op not in EXCHANGES and s.op != "rope_angles"]
    assert [s.label for s in ours] == [s.label for s in built.entries["main"] if s.op != "rope_angles"]
    assert (first[-1].op, first[-1].params["peer"]) == ("send", 1)
    assert (second[0].op, second[0].params["peer"]) == ("receive", 0)
    assert plan.owners("logits") == plan.owners("hidden") == (1,)
    weights = [set(part.network.weights) for part in plan.devices]
    assert {name for names in weights for name in names} == set(built.weights)
    assert weights[0] & weights[1] == {"rope.0", "token_embd.weight"}  # the embedding is the head too
    assert [dict(part.layers) for part in plan.devices] == [{"": range(2)}, {"": range(2, 3)}]


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4_moe", "step3p7", "zamba2", "flint"])
def test_values_that_nobody_reads_are_not_sent(name):
    """Layers whose views of a buffer differ in width overwrite each other's values in part."""
    case = load_case(name)
    checkpoint = memory_checkpoint(case.configs[0], case.tensors)
    plan = partition(network.build(network.choose_spec(checkpoint), checkpoint), "0;1")
    sent = {step.inputs[0].buffer for step in plan.devices[0].network.entries["main"] if step.op == "send"}
    assert sent <= {"x", "x.wanted", "embeddings"} and "x" in sent


def test_layers_by_hand():
    built, *_ = model_of("gemma3")
    layers = len(single_device(built, "cpu").devices[0].layers[""])
    plan = partition(built, "0;1", layers={"": (1, layers - 1)})
    assert [len(part.layers[""]) for part in plan.devices] == [1, layers - 1]
    for wrong in ((0, layers), (1, layers), (layers,)):
        with pytest.raises(DeviceError, match="should be at least 1 each"):
            partition(built, "0;1", layers={"": wrong})


def test_one_sum_per_half_of_a_layer():
    built, *_ = model_of("qwen3")
    plan = partition(built, "0&1")
    layers = len(plan.devices[0].layers[""])
    for part in plan.devices:
        assert _ops(part)["all_reduce"] == 2 * layers + 1  # and one for the embedding
        assert _ops(part)["all_gather"] == 1  # the head
        assert _ops(part)["linear"] == 4 * layers + 1  # q, k and v as one, gate and up as one
    whole = sum(built.weights[f"blk.0.attn_{name}.weight"].shape[0] for name in "qkv")
    for part in plan.devices:
        qkv = part.network.weights[_step(part, "attn_q+attn_k+attn_v").weights["weight"]]
        assert qkv.shape == (whole // 2, 64)
    assert [part.network.caches["blk.0.self"].kv_heads for part in plan.devices] == [1, 1]


def test_the_sum_of_experts_meets_that_of_the_shared_expert():
    built, *_ = model_of("qwen2_moe")
    plan = partition(built, "0&1")
    layers = len(plan.devices[0].layers[""])
    assert _ops(plan.devices[0])["all_reduce"] == 2 * layers + 1
    down = [_step(part, "ffn_down_exps") for part in plan.devices]
    assert [s.params["first"] for s in down] == [0, 3]
    assert [part.network.weights[s.weights["weight"]].groups for part, s in zip(plan.devices, down, strict=True)] == \
        [3, 3]


def test_a_gate_of_each_head_stays_with_the_head():
    built, *_ = model_of("step3p7_plain")
    for part in partition(built, "0&1").devices:
        gated = _step(part, "attn_gated")
        assert [view.width for view in gated.inputs] == [2 * 16, 2]
        assert not [s.label for s in part.network.entries["main"] if s.op == "all_gather" and ".attn_" in s.label]


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen3_moe_mixed"])
def test_more_devices_than_experts_or_heads(name):
    built, checkpoint, given = model_of(name)
    expected = one_device(built, checkpoint, "reference", **given)
    devices = "&".join(map(str, range(11)))
    assert error(several_devices(built, checkpoint, "reference", devices, **given), expected) < 2 * TOLERANCE


@pytest.mark.parametrize("place", [{"embedding": "placed"}, {"head": "placed"}, {"embedding": "placed",
                                                                                 "head": "placed"}])
@pytest.mark.parametrize("name", ["gemma2", "bert", "m2m100"])
def test_embedding_and_head_on_one_device(name, place):
    built, checkpoint, given = model_of(name)
    plan = partition(built, "0&1", **place)
    if "head" in place and "logits" in built.outputs:
        assert plan.owners("logits") == (0,) and plan.owners("hidden") == (0, 1)
        assert not {"output", "dec.output"} & {s.label for s in plan.devices[1].network.entries["main"]}
    if "embedding" in place:
        assert not any(s.op == "embed" for s in plan.devices[1].network.entries["main"])
    expected = one_device(built, checkpoint, "reference", **given)
    assert error(several_devices(built, checkpoint, "reference", "0&1", place, **given), expected) < TOLERANCE


def test_a_place_that_does_not_exist():
    with pytest.raises(DeviceError, match="head should be one of split, placed, is 'last'"):
        partition(model_of("bert")[0], "0;1", head="last")


def _quantised(type_name):
    """A model with matrices of a type with wide blocks: random bytes that decode to small finite values."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
             "num_hidden_layers": 1, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **sizes}
    shapes = {"model.embed_tokens.weight": (64, 512), "model.norm.weight": (512,), "lm_head.weight": (64, 512)}
    at = "model.layers.0."
    matrices = {at + "self_attn.q_proj.weight": (512, 512), at + "self_attn.k_proj.weight": (256, 512),
                at + "self_attn.v_proj.weight": (256, 512), at + "self_attn.o_proj.weight": (512, 512),
                at + "mlp.gate_proj.weight": (1536, 512), at + "mlp.up_proj.weight": (1536, 512),
                at + "mlp.down_proj.weight": (512, 1536)}
    shapes |= {at + "input_layernorm.weight": (512,), at + "post_attention_layernorm.weight": (512,)}
    checkpoint = memory_checkpoint(config, shapes)
    from numflow.quant import encode, find

    for i, (name, shape) in enumerate(matrices.items()):
        values = np.random.default_rng(i).standard_normal(shape).astype(np.float32) / 16
        if type_name.startswith("q"):
            raw, kind = encode(values, find(type_name)), type_name
        else:
            import gguf

            raw, kind = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]), type_name
        checkpoint.tensors[name] = Tensor(name, shape, tensor_type(kind), lambda raw=raw: raw)
    return network.build(network.choose_spec(checkpoint), checkpoint, fuse=False), checkpoint


@pytest.mark.parametrize(("type_name", "devices"), [
    ("Q8_0", "0&1"), ("Q4_0", "0&1&2"), ("q3h", "0*2&1"),
])
def test_quantised_weights_are_cut_between_blocks(type_name, devices):
    built, checkpoint = _quantised(type_name)
    given = {"ids": [3, 60, 17, 25]}
    plan = partition(built, devices)
    for part in plan.devices:
        for name in ("attn_output", "ffn_down"):
            weight = part.network.weights[_step(part, f"blk.0.{name}").weights["weight"]]
            begin, end = weight.parts[0].columns
            assert begin % 32 == 0 and end % 32 == 0 and weight.types == (type_name,)
    expected = one_device(built, checkpoint, "reference", **given)
    assert error(several_devices(built, checkpoint, "reference", devices, **given), expected) < TOLERANCE


def test_blocks_wider_than_heads_allow():
    """Blocks of 256 columns and heads of 64: cut in units of four heads, or the input is gathered and rows are cut."""
    built, _ = _quantised("Q8_0")
    wide = {name: weight if name != "blk.0.attn_output.weight" else
            type(weight)(**{**weight.__dict__, "types": ("Q4_K",)}) for name, weight in built.weights.items()}
    cut = type(built)(**{**built.__dict__, "weights": wide})
    two = partition(cut, "0&1").devices[0]
    assert _step(two, "attn_output").weights["weight"] == "blk.0.attn_output.weight[:, 0:256]"
    four = partition(cut, "0&1&2&3").devices[1]
    assert _step(four, "blk.0.attention.gather").op == "all_gather"
    assert _step(four, "attn_output").weights["weight"] == "blk.0.attn_output.weight[128:256]"
    assert four.network.caches["blk.0.self"].kv_heads == 1


def test_a_norm_over_all_heads_gets_them_gathered():
    built, *_ = model_of("olmo2")
    part = partition(built, "0&1").devices[1]
    labels = [step.label for step in part.network.entries["main"]]
    assert "blk.0.attn_q.gather" in labels and "blk.0.attn_k.gather" in labels


def test_an_encoder_reaches_every_stage_with_decoder_layers_once():
    built, *_ = model_of("m2m100")
    plan = partition(built, "0;1")
    first, second = plan.devices
    assert (_ops(first, "encode")["send"], _ops(first, "encode")["receive"]) == (1, 1)
    assert (_ops(second, "encode")["send"], _ops(second, "encode")["receive"]) == (1, 1)
    assert plan.owners("encoder_hidden") == (1,)
    assert set(first.layers) == {"enc.", "dec."} and all(map(len, first.layers.values()))


def sharing(cache, layers):
    """A network of three layers, of which `layers` read one cache."""
    built, *_ = model_of("qwen3")
    steps = tuple(replace(s, params={**s.params, "cache": cache})
                  if s.op == "attention" and s.label.startswith(tuple(f"blk.{layer}." for layer in layers)) else s
                  for s in built.entries["main"])
    return replace(built, entries={"main": steps})


def test_layers_that_share_a_cache_stay_together():
    plain, *_ = model_of("qwen3")
    assert [part.layers[""] for part in partition(plain, "0;1").devices] == [range(2), range(2, 3)]
    plan = partition(sharing("blk.1.self", [1, 2]), "0;1")
    assert [part.layers[""] for part in plan.devices] == [range(1), range(1, 3)]


def test_a_cache_of_two_stages_cannot_be_cut():
    shared = sharing("blk.0.self", [0, 1, 2])
    with pytest.raises(NetworkError, match="cache 'blk.0.self' belongs to a layer of another group"):
        partition(shared, "0;1")


def test_steps_between_devices_are_checked():
    built, *_ = model_of("qwen3")
    part = partition(built, "0&1").devices[0].network
    steps = list(part.entries["main"])
    at = next(i for i, s in enumerate(steps) if s.op == "all_gather")
    steps[at] = type(steps[at])(**{**steps[at].__dict__, "params": {"group": (0, 1), "spans": ((0, 96), (97, 203))}})
    with pytest.raises(NetworkError, match=r"spans \(\(0, 96\), \(97, 203\)\) do not make 203 columns"):
        verify(type(part)(**{**part.__dict__, "entries": {"main": tuple(steps)}}))
    at = next(i for i, s in enumerate(steps) if s.op == "all_reduce")
    steps = list(part.entries["main"])
    steps[at] = type(steps[at])(**{**steps[at].__dict__, "params": {"group": (0, 1), "adds": (0, 2)}})
    with pytest.raises(NetworkError, match="should be some of the group"):
        verify(type(part)(**{**part.__dict__, "entries": {"main": tuple(steps)}}))
    at, steps = next(i for i, s in enumerate(steps) if s.op == "embed"), list(part.entries["main"])
    for params, wrong in (({"first": 120, "vocabulary": 203}, "rows 120 .. 215 are not all of a table of 203 rows"),
                          ({"first": 3}, "first row of a whole table should be 0, is 3")):
        steps[at] = type(steps[at])(**{**steps[at].__dict__, "params": params})
        with pytest.raises(NetworkError, match=wrong):
            verify(type(part)(**{**part.__dict__, "entries": {"main": tuple(steps)}}))


def test_labels():
    assert layer_of("dec.blk.11.attn_q+attn_k") == ("dec.", 11)
    assert layer_of("blk.0.ffn") == ("", 0)
    assert layer_of("output_norm") is None
