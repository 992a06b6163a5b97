"""Adapters whose names, orientation or parts differ from the base's files."""

from dataclasses import replace

import numpy as np
import pytest

from numflow import network
from numflow.errors import FormatError, RequestError
from numflow.formats.adapter import Adapter, LowRank
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.steps import adaptable, parts_of
from numflow.network.adapters.tables import tied_table
from tests.network.test_adapters import (
    FACTOR,
    PATH,
    Q,
    by_hand,
    logits_of,
    low_rank,
    program_of,
    tensor,
    toy,
)
from tests.specs.case import load_case, memory_checkpoint


def opened(name: str):
    case = load_case(name)
    found = memory_checkpoint(case.configs[0], case.tensors)
    return found, network.choose_spec(found)


def turned_shape(shape):
    return (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.parametrize("family, given, stored", [
    ("pythia", "lm_head.weight", "embed_out.weight"),
    ("mixtral", "model.layers.1.mlp.gate.weight", "model.layers.1.block_sparse_moe.gate.weight"),
    ("granitemoe", "model.layers.1.block_sparse_moe.experts.gate_up_proj",
     "model.layers.1.block_sparse_moe.input_linear.weight"),
    ("deepseek_ocr2", "model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ("exaone", "model.layers.0.mlp.down_proj.weight", "transformer.h.0.mlp.c_proj.weight")])
def test_another_name_of_a_module(family, given, stored):
    found, spec = opened(family)
    fit = fitted(Adapter(PATH, "hf", {given: low_rank(given, found.tensors[stored].shape)}), found, spec)
    assert [*fit.adapter.added] == [stored]


def test_a_module_that_stands_in_for_another_is_not_that_other():
    found, spec = opened("gemma4_moe")  # some layers have keys that are their values
    name = next(f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(9)
                if f"model.layers.{layer}.self_attn.v_proj.weight" not in found.tensors)
    shape = found.tensors[name.replace("v_proj", "k_proj")].shape
    with pytest.raises(FormatError, match=f"has no tensor '{name}'"):
        fitted(Adapter(PATH, "hf", {name: low_rank(name, shape)}), found, spec)


def test_a_stack_of_experts_as_it_is_stored():
    found, spec = opened("llama4")
    name = next(name for name in found.tensors if name.endswith("experts.gate_up_proj"))
    shape = found.tensors[name].shape
    expected = found.tensors[name].f32()
    for given in (shape, turned_shape(shape)):
        change = low_rank(name, given)
        added = FACTOR * np.einsum("xnr,xrk->xnk", change.b.f32(), change.a.f32())
        some = merged(found, spec, [(Adapter(PATH, "hf", {name: change}), 1.0)]).tensors[name].f32()
        assert np.allclose(some, expected + (added if given == shape else added.swapaxes(1, 2)), atol=1e-5)


def test_parts_that_are_not_run_are_left_out_and_told():
    found, spec = opened("gemma3_multimodal")
    text = next(name for name in found.tensors if name.endswith("q_proj.weight"))
    seen = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
    both = {name: low_rank(name, found.tensors[text].shape) for name in (text, seen)}
    told = []
    some = merged(found, spec, [(Adapter(PATH, "hf", both), 1.0)], told.append)
    assert some.tensors.keys() == found.tensors.keys() and len(told) == 1
    assert "ignored 1 changes" in told[0] and seen in told[0]
    with pytest.raises(FormatError, match=f"changes nothing that is computed here: .*{seen}"):
        fitted(Adapter(PATH, "hf", {seen: both[seen]}), found, spec)
    with pytest.raises(FormatError, match="has no tensor 'model.layers.9.*"):
        fitted(Adapter(PATH, "hf", {"model.layers.99.self_attn.q_proj.weight": both[text]}), found, spec)


def test_stored_tensors_that_are_not_used_are_left_out():
    found, spec = opened("mllama")  # without images, layers of cross-attention do not run
    used, unused = (f"language_model.model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    adapter = Adapter(PATH, "hf", {name: low_rank(name, found.tensors[name].shape) for name in (used, unused)})
    fit = fitted(adapter, found, spec)
    assert [*fit.adapter.added] == [used] and fit.left_out == (unused,)


def test_a_head_of_scores_is_not_left_out():
    found, _ = opened("bert")
    width = found.config["hidden_size"]
    more = {"classifier.weight": tensor("c", np.ones((2, width))), "classifier.bias": tensor("c", np.ones(2)),
            "bert.pooler.dense.weight": tensor("p", np.ones((width, width))),
            "bert.pooler.dense.bias": tensor("p", np.ones(width))}
    found = replace(found, tensors={name: one for name, one in found.tensors.items() if "cls." not in name} | more,
                    config={**found.config, "architectures": ["BertForSequenceClassification"]})
    name = "bert.pooler.dense.weight"
    fit = fitted(Adapter(PATH, "hf", {name: low_rank(name, (width, width))}), found, network.choose_spec(found))
    assert [*fit.adapter.added] == [name] and not fit.left_out


def test_a_bias_under_another_name_than_its_matrix():
    found, spec = opened("bert")
    count = found.config["vocab_size"]
    matrix, bias = "cls.predictions.decoder.weight", "cls.predictions.bias"
    change, vector = low_rank(matrix, (count, found.config["hidden_size"])), tensor("v", np.ones(count))
    adapter = Adapter(PATH, "hf", {matrix: change}, offsets={matrix: (vector, 0.5)})
    some = merged(found, spec, [(adapter, 2.0)])
    assert np.allclose(some.tensors[bias].f32(), found.tensors[bias].f32() + 1)
    network.build(spec, some)  # without a second one that nothing has a place for
    other = "cls.predictions.decoder.bias"
    twice = Adapter(PATH, "hf", {}, replaced={bias: vector, other: vector})
    assert np.array_equal(merged(found, spec, [(twice, 1.0)]).tensors[bias].f32(), np.ones(count))
    with pytest.raises(FormatError, match="changed twice"):
        fitted(replace(twice, replaced={bias: vector, other: tensor("v", np.zeros(count))}), found, spec)


def test_a_new_bias_of_keys_is_not_one_of_values():
    found, spec = opened("gemma4")
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = found.tensors[name].shape[0]
    adapter = Adapter(PATH, "hf", {name: low_rank(name, found.tensors[name].shape)},
                      offsets={name: (tensor("v", np.ones(rows)), 1.0)})
    built = network.build(spec, merged(found, spec, [(adapter, 1.0)]), fuse=False)
    with_bias = {step.weights["weight"] for steps in built.entries.values() for step in steps if "bias" in step.weights}
    assert [weight for weight in with_bias if ".attn_" in weight] == ["blk.0.attn_k.weight"]


def test_rows_in_other_places_have_no_scale():
    (found, spec), name = toy(), "model.embed_tokens.weight"
    rows = np.random.default_rng(0).standard_normal((2, found.tensors[name].columns))
    adapter = Adapter(PATH, "hf", {Q: low_rank(Q, (32, 32))}, tokens={name: ((3, 1), tensor("rows", rows))})
    some = merged(found, spec, [(adapter, 0.5)])
    assert np.allclose(some.tensors[name].f32()[[3, 1]], rows, atol=1e-6)
    halved = by_hand(found, Adapter(PATH, "hf", adapter.added), 0.5, set())
    assert np.allclose(some.tensors[Q].f32(), halved.tensors[Q].f32(), atol=1e-5)


def test_rows_of_an_output_matrix_that_is_the_table():
    (found, spec), table, head = toy(tied=True), "model.embed_tokens.weight", "lm_head.weight"
    rows = np.ones((2, found.tensors[table].columns))
    tokens = {head: ((3, 1), tensor("rows", rows)), table: ((5,), tensor("row", 2 * rows[:1]))}
    some = merged(found, spec, [(Adapter(PATH, "hf", {}, tokens=tokens), 1.0)])
    assert tied_table(network.build(spec, some)) is None
    name = next(name for name in some.tensors if name.endswith(head))
    before, after = found.tensors[table].f32(), some.tensors[name].f32()
    assert np.allclose(after[[3, 1]], 1) and np.allclose(after[5], before[5])
    assert np.allclose(some.tensors[table].f32()[5], 2) and np.allclose(some.tensors[table].f32()[3], before[3])


def in_turns(found):
    """Changes of a shared block's matrices in two layers, and the checkpoint with the sums in separate tensors."""
    at, modules = "model.layers.{}.shared_transformer.", ("self_attn.q_proj", "feed_forward.gate_up_proj",
                                                          "self_attn.linear_q_adapter_list.{}.1")
    names = {(layer, module): f"{at.format(layer)}{module.format(use)}.weight" for layer, use in ((1, 0), (4, 2))
             for module in modules}
    shapes = {key: found.tensors[name.replace(".4.", ".1.")].shape for key, name in names.items()}
    adapter = Adapter(PATH, "hf", {name: low_rank(f"{name}{'x' * key[0]}", shapes[key]) for key, name in names.items()})
    apart = {name.replace(".1.", ".4.", 1): replace(one, name=name.replace(".1.", ".4.", 1))
             for name, one in found.tensors.items() if name.startswith(at.format(1))}
    return adapter, by_hand(replace(found, tensors={**found.tensors, **apart}), adapter, 0.2, set())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_block_that_layers_have_in_turns(backend):
    case, (found, spec) = load_case("zamba2_adapted"), opened("zamba2_adapted")
    adapter, sums = in_turns(found)
    built = adaptable(network.build(spec, found), found)
    some = [merged(found, spec, [(adapter, 0.2)]), sums]
    bias = "model.layers.4.shared_transformer.feed_forward.gate_up_proj.bias"
    assert some[0].tensors.keys() - found.tensors.keys() == {*[*adapter.added][3:], bias}
    programs = [program_of(backend, *pair) for pair in ((network.build(spec, one), one) for one in some)]
    programs.append(program_of(backend, built, found))
    programs[2].set_adapter(0, parts_of(built, found, fitted(adapter, found, spec), 0.2))
    by_merging, expected, by_request = (logits_of(program, case, built, number)
                                        for program, number in zip(programs, (-1, -1, 0), strict=True))
    base = logits_of(programs[2], case, built, -1)
    for program in programs:
        program.close()
    assert np.abs(by_merging - expected).max() < 1e-4 * expected.std()
    assert np.abs(by_request - expected).max() < 1e-4 * expected.std() < np.abs(base - expected).max()


def test_an_adapter_of_other_matrices_leaves_a_shared_block_shared():
    found, spec = opened("zamba2_adapted")
    own = next(name for name in found.tensors if name.endswith("mamba.out_proj.weight"))
    adapter = Adapter(PATH, "hf", {own: low_rank(own, found.tensors[own].shape)})
    assert merged(found, spec, [(adapter, 1.0)]).tensors.keys() == found.tensors.keys()
    unused = "model.layers.4.shared_transformer.self_attn.linear_q_adapter_list.0.1.weight"  # of layer 1
    both = Adapter(PATH, "hf", {**adapter.added, unused: low_rank(unused, (8, 8))})
    assert fitted(both, found, spec).left_out == (unused,)
    bias = "model.layers.4.shared_transformer.feed_forward.down_proj.bias"
    saved = Adapter(PATH, "hf", {}, replaced={bias: tensor("b", np.ones(found.tensors[bias.replace("4", "1")].shape))})
    built = adaptable(network.build(spec, found), found)
    with pytest.raises(RequestError, match="share the base's bias; merge"):
        parts_of(built, found, fitted(saved, found, spec), 1.0)
    name = bias.removesuffix(".bias")
    sums = merged(found, spec, [(saved, 1.0)])
    assert (sums.tensors[bias].f32() == 1).all() and f"{name}.weight" in sums.tensors


def test_a_bias_that_a_model_has_no_place_for():
    found, spec = opened("deepseek_v3")
    name = next(name for name in found.tensors if name.endswith("kv_b_proj.weight"))
    n = found.tensors[name].shape[0]
    adapter = Adapter(PATH, "hf", {name: low_rank(name, found.tensors[name].shape)},
                      offsets={name: (tensor("b", np.ones(n)), 1.0)})
    with pytest.raises(FormatError, match=r"adapter: gives the base '.*kv_b_proj.bias', which it has no place for"):
        merged(found, spec, [(adapter, 1.0)])


@pytest.mark.parametrize("family, end", [("mimo_v2_flash", "o_proj"), ("gemma4_moe", "router.proj")])
def test_a_new_bias_of_a_product_that_is_scaled(family, end):
    """The models scale the input of these matrices, but networks scale the product."""
    found, spec = opened(family)
    name = next(name for name in found.tensors if name.endswith(f"{end}.weight"))
    shape = found.tensors[name].shape
    change, bias = {name: low_rank(name, shape)}, {name: (tensor("b", np.ones(shape[0])), 1.0)}
    assert fitted(Adapter(PATH, "hf", change), found, spec).adapter.added
    with pytest.raises(FormatError, match="gets a bias, but the model scales this product"):
        fitted(Adapter(PATH, "hf", change, bias), found, spec)


def test_experts_of_two_kinds_in_one_list():
    found, spec = opened("ernie4_5_vl_moe")
    at = "model.language_model.layers.1.mlp"
    n, k = found.tensors["model.layers.1.mlp.experts.0.up_proj.weight"].shape
    text, seen = (f"{at}.{kind}_moe.experts.down_proj" for kind in ("text", "vision"))
    rng = np.random.default_rng(0)
    change = LowRank(tensor("a", rng.standard_normal((4, 2, n))), tensor("b", rng.standard_normal((4, k, 2))), 1.0)
    told = []
    some = merged(found, spec, [(Adapter(PATH, "hf", {text: change, seen: change}), 1.0)], told.append).tensors
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        moved = some[name].f32() - found.tensors[name].f32()
        expected = change.b.f32()[expert] @ change.a.f32()[expert] if expert < 4 else 0
        assert np.allclose(moved, expected, atol=1e-5)
    assert len(told) == 1 and seen in told[0]
