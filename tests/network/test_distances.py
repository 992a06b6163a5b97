"""Relative-position embeddings (disentangled attention): buckets, projected keys and queries, unsupported combinations.
"""

from collections import Counter
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from numflow import network
from numflow.errors import NetworkError, RequestError, SpecError
from numflow.formats.adapter import Adapter
from numflow.network import WeightSource
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.steps import adaptable, parts_of
from numflow.network.quantise.quantise import matrices, plan_of, quantised
from numflow.network.steps.checks import check_step
from numflow.ops import Batch
from numflow.partition.cut.slices import experts_of
from numflow.quant.recipe import Recipe
from numflow.spec import load_spec
from tests.network.test_adapters import low_rank
from tests.specs.case import load_case, memory_checkpoint

KEYS, TABLE = "deberta.encoder.layer.1.attention.self.key_proj", "deberta.encoder.rel_embeddings.weight"


def checkpoint_of(name="deberta_v2", **changed):
    case = load_case(name)
    return memory_checkpoint({**case.configs[0], **changed}, case.tensors)


def build(checkpoint, spec=None):
    return network.build(spec or network.choose_spec(checkpoint), checkpoint, fuse=False)


def numbers(*given, **changed):
    """The bucket of each relative position, from the farthest key before the query on."""
    weights = build(checkpoint_of(*given, **changed)).weights
    return next(weight.constant.astype(int) for name, weight in weights.items() if name.startswith("position_buckets"))


def test_every_distance_has_a_vector_up_to_the_last_one():
    assert numbers("deberta_v2_exact").tolist() == [23, *range(23, -1, -1)]


def test_far_distances_share_vectors():
    """Of 8 buckets on each side 4 are exact; the others cover distances 5 .. 16 logarithmically."""
    near, later = [12, 11, 10, 9, 8, 7, 6, 5, 4], [3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0]
    table = numbers(max_relative_positions=17)
    middle = len(table) // 2
    assert table[middle - 4:middle + 5].tolist() == near
    assert table[middle + 5:middle + 18].tolist() == later and set(table[middle + 18:]) == {0}
    assert table[middle - 5::-1][:13].tolist() == [13, 13, 14, 14, 14, 14, 15, 15, 15, 15, 15, 15, 15]
    assert set(table[:middle - 17]) <= {15}


def norm(x, weight, bias, eps):
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(axis=1, keepdims=True) + eps) * weight + bias


def made(checkpoint, module=KEYS):
    """Projected keys of all embeddings, [heads, vectors, head dim], in float64."""
    x, weight, bias, matrix, shift = (checkpoint.tensors[name].f32().astype(np.float64) for name in (
        TABLE, "deberta.encoder.LayerNorm.weight", "deberta.encoder.LayerNorm.bias", f"{module}.weight",
        f"{module}.bias"))
    return (norm(x, weight, bias, 1e-7) @ matrix.T + shift).reshape(16, 4, -1).swapaxes(0, 1)


def test_the_layer_makes_keys_of_the_vectors_and_devices_have_those_of_their_heads():
    checkpoint = checkpoint_of()
    built = build(checkpoint)
    weight, expected = built.weights["blk.1.of_queries.weight"], made(checkpoint)
    np.testing.assert_allclose(WeightSource(built, checkpoint).f32(weight.name), expected.reshape(64, 8), atol=1e-5)
    part = experts_of(weight, 1, 3)
    cut = replace(built, weights={part.name: part})
    np.testing.assert_allclose(WeightSource(cut, checkpoint).f32(part.name), expected[1:3].reshape(32, 8), atol=1e-5)


def test_a_product_that_the_model_lacks_is_zero():
    checkpoint = checkpoint_of("deberta_v2_narrow")
    built = build(checkpoint)
    used = Counter(step.weights["weight"] for step in built.entries["main"] if step.op == "head_linear")
    (zeros, times), = ((name, count) for name, count in used.items() if count > 1)
    assert times == 2 and not WeightSource(built, checkpoint).f32(zeros).any()


@pytest.mark.merge
def test_quantised_matrices_make_them_and_vectors_are_not_quantised():
    case = load_case("deberta_v2")
    config = case.configs[0] | {"hidden_size": 64, "intermediate_size": 64}
    tensors = {name: tuple({32: 64, 40: 64}.get(size, size) for size in shape) for name, shape in case.tensors.items()}
    checkpoint = memory_checkpoint(config, tensors)
    built = build(checkpoint)
    assert TABLE not in matrices(built) and matrices(built)[f"{KEYS}.weight"] == ("blk.1.attn_k",)
    plan = plan_of(built, checkpoint, Recipe("test", "q4"))
    few = quantised(checkpoint, plan)
    assert plan.schemes[f"{KEYS}.weight"] == "q4" and few.tensors[TABLE].type.name == "F16"
    exact, rounded = (WeightSource(build(some), some).f32("blk.1.of_queries.weight") for some in (checkpoint, few))
    np.testing.assert_allclose(rounded, made(few).reshape(64, 16), atol=1e-5)
    assert 0.01 < np.abs(rounded - exact).max() < 1


def test_adapters_change_them_only_where_they_are_merged():
    checkpoint = checkpoint_of()
    spec, shape = network.choose_spec(checkpoint), checkpoint.tensors[f"{KEYS}.weight"].shape
    adapter = Adapter("adapter", "hf", {f"{KEYS}.weight": low_rank("a", shape)})
    sums = merged(checkpoint, spec, [(adapter, 0.5)])
    np.testing.assert_allclose(WeightSource(build(sums), sums).f32("blk.1.of_queries.weight"),
                               made(sums).reshape(64, 8), atol=1e-5)
    built = adaptable(network.build(spec, checkpoint), checkpoint)
    with pytest.raises(RequestError, match="key_proj.*the projections of relative positions use it.*; merge the"):
        parts_of(built, checkpoint, fitted(adapter, checkpoint, spec), 1.0)
    values = "deberta.encoder.layer.1.attention.self.value_proj.weight"
    other = Adapter("adapter", "hf", {values: low_rank("a", shape)})
    assert parts_of(built, checkpoint, fitted(other, checkpoint, spec), 1.0)


@pytest.mark.parametrize(("changed", "words"), [
    ({"position_buckets": 2}, r"attention.distances: expected .* 8 or more .*, found 4 with a reach of 48 \(from .*"),
    ({"max_relative_positions": 5}, "found 16 with a reach of 5"),
    ({"position_buckets": 9}, r"'deberta.encoder.rel_embeddings.weight' is \[16, 32\], but .* expects \[18, 32\]"),
    ({"pos_att_type": "p2p"}, "pos_att_type of config.json is 'p2p'; expected one of c2p"),
    ({"norm_rel_ebd": "batch"}, "norm_rel_ebd of config.json is 'batch'; expected one of none, layer_norm"),
    ({"conv_kernel_size": 3}, "missing tensor around.weight"),
    ({"share_att_key": False}, "missing tensor dist_k.weight"),
])
def test_what_a_file_may_not_say(changed, words):
    with pytest.raises(SpecError, match=words):
        build(checkpoint_of(**changed))


@pytest.mark.parametrize(("changed", "words"), [
    ({"conv_kernel_size": 4}, r"conv.around: expected an odd number.* \(from conv_kernel_size of"),
    ({"conv_groups": 3}, "conv.around: expected an odd number, of attention both ways, with columns that conv"),
    ({"conv_kernel_size": 5}, r"conv.conv.weight' is \[32, 32, 3\], expected \[32, 32, 5\]"),
])
def test_convolutions_that_do_not_fit(changed, words):
    with pytest.raises(SpecError, match=words):
        build(checkpoint_of("deberta_v2_convolved", **changed))


@pytest.mark.parametrize("executor", ["reference", "cpu"])
def test_tokens_around_each_with_nothing_beyond_the_ends(executor):
    """The convolution reads each token with the tokens before and after it in the same sequence, zeros at the ends."""
    checkpoint = checkpoint_of("deberta_v2_convolved")
    built = build(checkpoint)
    steps = built.entries["main"]
    last = next(i for i, step in enumerate(steps) if step.label.endswith("around_tokens"))
    entry = next(step for step in steps if step.label.endswith("layer_input")).outputs[0]
    cut = replace(built, entries={"main": steps[:last + 1]},
                  outputs={"hidden": steps[last].outputs[0], "logits": entry})
    program = import_module(f"numflow.{executor}.program").Program(
        cut, WeightSource(built, checkpoint), activations="f32", kv_k="f32", kv_v="f32")
    program.reserve(4)
    each = np.array([0, 1, 2, 3, 0, 1], np.int32)
    batch = Batch(tokens=np.arange(5, 11, dtype=np.int32), positions=each, starts=np.array([0, 4, 6], np.int32),
                  blocks=np.array([[0], [1]], np.int32), logit_rows=np.arange(6, dtype=np.int32))
    found, x = (program.run(batch, output=output) for output in ("hidden", "logits"))
    none = np.zeros_like(x[0])
    for row, (before, behind) in enumerate([(none, x[1]), (x[0], x[2]), (x[1], x[3]), (x[2], none), (none, x[5]),
                                            (x[4], none)]):
        np.testing.assert_allclose(found[row], np.concatenate([before, x[row], behind]), atol=1e-6)
    program.close()


@pytest.mark.parametrize("options", ["causal = true", "clip = 3", "key_scale = 2", 'q_norm = "head"'])
def test_what_does_not_go_with_them(tmp_path, options):
    (tmp_path / "own.toml").write_text(f'extends = "deberta_v2"\n[attention]\n{options}\n')
    with pytest.raises(SpecError, match="attention.distances: expected attention both ways, a key head for each"):
        build(checkpoint_of(), load_spec(str(tmp_path / "own.toml")))


def test_steps_are_checked():
    built = build(checkpoint_of())
    step = next(step for step in built.entries["main"] if step.op == "attention")
    check_step(step, built)
    wide = replace(step.inputs[1], width=32)
    for wrong, words in ((replace(step, params={**step.params, "causal": True}), "as many key heads as query heads"),
                         (replace(step, inputs=step.inputs[:1]), "number of inputs should be 2, is 1"),
                         (replace(step, inputs=(*step.inputs[:2], wide)), "should be 64, is 32"),
                         (replace(step, weights={}), "dtype of chosen should be i32, is f32")):
        with pytest.raises(NetworkError, match=words):
            check_step(wrong, built)
