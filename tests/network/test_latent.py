"""Latent attention: what the cache holds per token, absorbed matrices, and results that depend on a row alone."""

from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from numflow import network
from numflow.cpu.program import Program
from numflow.network import WeightSource
from numflow.network.cost import weight_bytes
from numflow.network.describe import cache_bytes_per_token, group_steps
from numflow.network.quantise.quantise import plan_of, quantised
from numflow.ops import Batch
from numflow.partition.cut.cut import partition
from numflow.partition.cut.slices import experts_of
from numflow.quant.recipe import read_recipe
from numflow.reference.program import Program as Reference
from numflow.spec import load_spec
from tests.specs import toy
from tests.specs.case import gguf_checkpoint, load_case, memory_checkpoint, relative_error, run

MODELS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "moonlight")


def model_of(name, gguf=False):
    case = load_case(name)
    checkpoint = gguf_checkpoint(case) if gguf else memory_checkpoint(case.configs[0], case.tensors)
    return network.build(network.choose_spec(checkpoint), checkpoint), checkpoint, case.configs[0]


@pytest.fixture
def wide(monkeypatch):
    """A toy with matrices wide enough for blocks of 32 weights, without experts, whose choice may depend on rounding.
    """
    for name, size in {"latent.rank": 64, "rope_dim": 32, "nope_dim": 32, "key_dim": 64, "value_dim": 32,
                       "first_dense": 2}.items():
        monkeypatch.setitem(toy.SIZES, name, size)

    def make(naming="hf", scheme=None):
        spec = load_spec("deepseek_v2")
        checkpoint = toy.toy_checkpoint(spec, naming, full=naming == "gguf")
        if scheme is not None:
            built = network.build(spec, checkpoint, fuse=False)
            checkpoint = quantised(checkpoint, plan_of(built, checkpoint, read_recipe(scheme)))
        return network.build(spec, checkpoint), checkpoint
    return make


@pytest.mark.parametrize("gguf", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_token_takes_the_latent_and_the_rotated_part(name, gguf):
    built, checkpoint, config = model_of(name, gguf)
    numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert len(built.caches) == config["num_hidden_layers"]
    for cache in built.caches.values():
        assert cache.kv_heads * (cache.k_dim + cache.v_dim) == numbers
        assert (cache.prefix, cache.value_dim) == (config["kv_lora_rank"],) * 2
    assert cache_bytes_per_token(built) == 2 * numbers * len(built.caches)
    program = Reference(built, WeightSource(built, checkpoint), block_size=4)
    program.reserve(3)
    assert program.block_bytes == 4 * 4 * numbers * len(built.caches)


def test_matrices_of_queries_are_turned_in_their_type(wide):
    built, checkpoint = wide()
    source, name = WeightSource(built, checkpoint), "blk.0.attn_kv_b.k.weight"
    stored = next(tensor for key, tensor in checkpoint.tensors.items() if "layers.0" in key and "kv_b_proj" in key)
    heads = stored.f32().reshape(4, 64, 64)  # of each: 32 rows for the keys, then 32 for the values
    raw = source.raw(name)
    assert (raw.type, raw.shape, raw.groups) == ("F16", (4 * 64, 32), 4)
    np.testing.assert_array_equal(raw.f32().reshape(4, 64, 32), heads[:, :32].swapaxes(1, 2))
    np.testing.assert_array_equal(source.f32(name), raw.f32())
    np.testing.assert_array_equal(source.f32("blk.0.attn_kv_b.v.weight").reshape(4, 32, 64), heads[:, 32:])
    assert weight_bytes(built.weights[name]) == raw.rows.nbytes
    part = experts_of(built.weights[name], 1, 3)
    assert part.shape == (2 * 64, 32) and [rows.rows.start for rows in part.parts] == [64, 128]


def test_of_quantised_ones_only_those_of_queries_become_numbers(wide):
    built, checkpoint = wide(scheme="q8")
    source = WeightSource(built, checkpoint)
    keys, values = (source.raw(f"blk.0.attn_kv_b.{half}.weight") for half in "kv")
    assert (keys.type, values.type) == ("F32", "q8")
    assert weight_bytes(built.weights[keys.name]) == keys.rows.nbytes == 4 * 64 * 32 * 4
    shown = {group.label: group.shapes for group in group_steps(built, checkpoint)}
    assert shown["blk.*.attn_k_b"] == "[T, 128] -> [T, 256]  q8 as F32"
    assert shown["blk.*.attn_v_b"] == "[T, 256] -> [T, 128]  q8"
    split, halves = wide("gguf", "q4")
    assert {split.weights[f"blk.0.attn_{half}_b.weight"].types for half in "kv"} == {("q4",)}
    assert WeightSource(split, halves).raw("blk.0.attn_k_b.weight").type == "q4"


@pytest.mark.parametrize(("naming", "scheme"), [("hf", "q8"), ("hf", "q4+1%"), ("gguf", "q4"), ("gguf", "q4+1%")])
@pytest.mark.merge
def test_quantised_matrices_give_the_same_everywhere(wide, naming, scheme):
    built, checkpoint = wide(naming, scheme)
    source, ids = WeightSource(built, checkpoint), toy.ids(20)
    expected = run(Reference(built, source), ids)
    assert relative_error(run(Program(built, source, activations="f32", threads=2), ids), expected) < 1e-4
    program = Program(built, source, activations="int8", threads=2, kv_k="f32")
    assert relative_error(run(program, ids), expected) < 0.2
    whole = network.build(load_spec("deepseek_v2"), checkpoint, fuse=False)
    for part in partition(whole, "0&1", "cpu").devices:
        assert [cache.kv_heads for cache in part.network.caches.values()] == [1, 1]
        heads = {step.params["heads"] for step in part.network.entries["main"] if step.op == "head_linear"}
        assert heads == {2}


@pytest.mark.parametrize(("activations", "kv"), [("f32", "f32"), ("int8", "f16"), ("int8", "q8"), ("f32", "q3h")])
@pytest.mark.merge
def test_bits_depend_neither_on_cuts_nor_on_threads_nor_on_others(wide, activations, kv):
    built, checkpoint = wide(scheme="q8")
    found = []
    for threads, cuts in ((1, (0, 150)), (3, (0, 64, 65, 150)), (2, (0, 1, 149, 150))):
        program = Program(built, WeightSource(built, checkpoint), activations=activations, kv_k=kv, threads=threads)
        program.reserve(8)
        found.append(np.concatenate([program.run(_beside(begin, end))[:end - begin]
                                     for begin, end in pairwise(cuts)]))
        program.close()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def _beside(begin, end):
    """Rows of a sequence of 150 tokens, batched with a token of another sequence."""
    rows = np.arange(begin, end, dtype=np.int32)
    ids, positions = np.append(rows * 7, begin) % toy.VOCABULARY, np.append(rows, 0)
    return Batch(tokens=ids.astype(np.int32), positions=positions.astype(np.int32),
                 starts=np.array([0, len(rows), len(ids)], np.int32),
                 blocks=np.array([[3, 0, 5], [6, 6, 6]], np.int32), logit_rows=np.arange(len(ids), dtype=np.int32))


@pytest.mark.parametrize("executor", ["reference", "cpu"])
@pytest.mark.thin(2)
def test_blocks_are_copied_and_swapped(executor, wide):
    built, checkpoint = wide()
    program = import_module(f"numflow.{executor}.program").Program(
        built, WeightSource(built, checkpoint), block_size=64, kv_k="q8")
    program.reserve(8)
    program.run(_beside(0, 149))
    expected = program.run(_beside(149, 150))
    saved = program.save_blocks([3, 0, 5])
    assert saved.shape == (3, program.block_bytes)
    program.load_blocks([1, 2, 4], saved)
    program.copy_blocks([1, 2, 4], [3, 0, 5])
    np.testing.assert_array_equal(program.run(_beside(149, 150)), expected)
