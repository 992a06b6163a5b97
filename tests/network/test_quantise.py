"""Quantised views of checkpoints: which tensors get which types, and their values."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from numflow import formats, network
from numflow.engine.requantise import _Progress
from numflow.errors import FormatError, RequestError
from numflow.network.quantise.calibration import Calibration, is_calibration, read_calibration
from numflow.network.quantise.quantise import matrices, plan_of, quantised
from numflow.quant import decode, encode, find
from numflow.quant.recipe import Recipe
from numflow.registry.progress import Silent
from tests.quant.small import LAYERS, write_model
from tests.specs.case import load_case, memory_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return formats.open_checkpoint(write_model(tmp_path_factory.mktemp("model")))


def build(checkpoint, fuse=False):
    return network.build(network.choose_spec(checkpoint), checkpoint, fuse=fuse)


def planned(checkpoint, scheme="q3h", *rules):
    return plan_of(build(checkpoint), checkpoint, Recipe("test", scheme, rules))


def test_matrices_are_found_under_both_names(checkpoint):
    found = matrices(build(checkpoint))
    assert len(found) == 2 + 7 * LAYERS
    assert found["model.embed_tokens.weight"] == ("token_embd",)
    assert found["model.layers.1.mlp.down_proj.weight"] == ("blk.1.ffn_down",)
    assert not [name for name in found if "norm" in name]


@pytest.mark.parametrize(("name", "some", "others"), [
    ("hy_v4", {"attn_kv_a", "ffn_down_exps", "index_q", "attn_gate"}, ("hyper", "ffn_gate_inp")),
    ("qwen4_exp", {"ngram_embd", "ngram_k", "hyper_attn_up", "hyper_head_down", "index_qk.q"},
     ("hyper_attn_write", "hyper_ffn_write", "ngram_conv", "ngram_sums"))])
def test_what_routes_tokens_and_makes_gates_of_streams_is_no_such_matrix(name, some, others):
    case = load_case(name)
    found = matrices(build(memory_checkpoint(case.configs[0], case.tensors)))
    modules = {module.partition(".")[2].partition(".")[2] if module.startswith("blk") else module
               for names in found.values() for module in names}
    assert some <= modules
    assert not [module for module in modules if module.startswith(others)]


def test_types_reach_the_network_and_numbers_the_weights(checkpoint):
    plan = planned(checkpoint, "q3h", ("blk.0.attn_v", "q6"), ("lm_head.weight", "keep"))
    assert plan.kept == {"lm_head.weight": ""} and plan.says() == ""
    other = quantised(checkpoint, plan)
    built = build(other, fuse=True)
    types = {kind for weight in built.weights.values() for kind in weight.types}
    assert types == {"q3h", "q6", "F32"}
    assert any(weight.types == ("q3h",) * 3 for weight in built.weights.values())  # q, k and v of layer 1 in one
    source, name = network.WeightSource(built, other), "blk.1.ffn_down.weight"
    raw, x = source.raw(name), checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].f32()
    assert (raw.type, raw.shape) == ("q3h", x.shape)
    np.testing.assert_array_equal(raw.rows, encode(x, find("q3h")))
    np.testing.assert_array_equal(source.f32(name), decode(raw.rows, find("q3h"), x.shape[1]))
    expected = 8 * sum(t.nbytes for t in other.tensors.values() if t.type.block > 1) / sum(
        t.rows * t.columns for t in other.tensors.values() if t.type.block > 1)
    assert network.bits_per_weight(built, other) == pytest.approx(expected)
    assert network.bits_per_weight(build(checkpoint), checkpoint) == 32


@pytest.mark.merge
def test_calibration_is_used(checkpoint):
    name = "model.layers.0.mlp.up_proj.weight"
    x, rng = checkpoint.tensors[name].f32(), np.random.default_rng(0)
    importance = rng.random(64).astype(np.float32)
    inputs = rng.standard_normal((500, 64)).astype(np.float32)
    moment = inputs.T @ inputs
    for calibration, expected in (
            (Calibration({name: importance}), encode(x, find("q4"), importance)),
            (Calibration({name: importance}, {"other": moment}, {name: "other"}), encode(x, find("q4"), moment=moment)),
            (Calibration({name: np.stack([importance, importance[::-1]])}),  # two experts
             encode(x, find("q4"), np.repeat([importance, importance[::-1]], 48, axis=0)))):
        found = quantised(checkpoint, planned(checkpoint, "q4"), calibration).tensors[name].raw()
        np.testing.assert_array_equal(found, expected)
    plain = quantised(checkpoint, planned(checkpoint, "q4_b32t1a"), Calibration({name: importance})).tensors[name].raw()
    np.testing.assert_array_equal(plain, encode(x, find("q4_b32t1a")))  # which knows no calibration
    with pytest.raises(RequestError, match="up_proj.weight: 96 rows, but importances of 7 experts"):
        seven = Calibration({name: np.ones((7, 64), np.float32)})
        quantised(checkpoint, planned(checkpoint), seven).tensors[name].raw()


def test_columns_that_no_block_divides_stay(tmp_path):
    odd = formats.open_checkpoint(write_model(tmp_path, ffn=80))
    plan = planned(odd, "q3h")
    assert len(plan.kept) == LAYERS and set(plan.kept.values()) == {
        "q3h has blocks of 32 weights, which do not divide 80 columns"}
    assert plan.says().startswith(f"{LAYERS} of 16 matrices stay as they are, such as model.layers.0.mlp.down_proj")
    assert quantised(odd, plan).tensors["model.layers.0.mlp.down_proj.weight"].type.name == "F32"


def test_bad_weights_are_named(tmp_path):
    def spoil(tensors):
        tensors["lm_head.weight"][3, 5] = np.nan

    bad = formats.open_checkpoint(write_model(tmp_path, change=spoil))
    with pytest.raises(FormatError, match="lm_head.weight cannot be quantised: row 3, column 5 is nan"):
        quantised(bad, planned(bad)).tensors["lm_head.weight"].raw()


def test_calibration_files(tmp_path):
    rng = np.random.default_rng(0)
    made = Calibration({"a": rng.random(8).astype(np.float32), "b": rng.random((3, 8)).astype(np.float32)},
                       {"a": rng.random((8, 8)).astype(np.float32)}, {"c": "a"}, {"tokens": 12})
    path = tmp_path / "x.safetensors"
    made.write(path)
    read = read_calibration(path)
    for name in ("a", "b"):
        np.testing.assert_array_equal(read.importance(name), made.importance(name))
    np.testing.assert_array_equal(read.moment("c"), made.moments["a"])
    assert read.importance("z") is None and read.moment("b") is None
    assert read.facts == {"tokens": 12}
    assert is_calibration(path)
    text = tmp_path / "text"
    text.write_text("some words to read")
    assert not is_calibration(text)
    with pytest.raises(FormatError, match="is not|not a calibration"):
        read_calibration(write_model(tmp_path / "m") / "model.safetensors")


@pytest.fixture
def hasty():
    """Threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_of_devices_read_at_once(checkpoint, hasty):
    """Each thread gets the rows that it read."""
    plan = planned(checkpoint, "q4")
    names, other = list(plan.schemes), quantised(checkpoint, plan)
    expected = {name: quantised(checkpoint, plan).tensors[name].raw() for name in names}
    with ThreadPoolExecutor(8) as pool:
        for name, rows in zip(names * 4, pool.map(lambda name: other.tensors[name].raw(), names * 4), strict=True):
            np.testing.assert_array_equal(rows, expected[name])


def test_threads_of_devices_are_told_of_at_once(checkpoint, hasty):
    reporter, done = Silent(), []
    reporter.done = done.append
    tensor = next(iter(checkpoint.tensors.values()))
    tensors = [replace(tensor, name=str(number)) for number in range(800)]
    report = _Progress(reporter, "quantising", {one.name: 1 for one in tensors}, None)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: report(one, True), tensors))
    assert done == list(range(1, 801))
