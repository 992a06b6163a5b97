"""Inputs permuted to the stored column order: one step before linears, shared by linears with equal input and order."""

import json
from dataclasses import replace

import numpy as np
import pytest

import numflow
from numflow import formats, network
from numflow.formats import open_checkpoint
from tests.formats.quantised_files import made, save
from tests.quant.small import CONFIG, write_model

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A plain model, and its GPTQ version with act-order: query, key and value share an order, gate and up do not."""
    plain, coded = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("coded")
    stored, weights = {}, {}

    def change(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stem, (n, k) = name.removesuffix(".weight"), tensors[name].shape
            seed = 7 if "self_attn" in name else 8 + ("gate" in name) + 2 * ("up" in name)
            parts, dense, weights["config"] = made("gptq-act", n, k, seed)
            tensors[name] = np.ascontiguousarray(dense)
            stored.update({f"{stem}.{part}": value for part, value in parts.items()})
        stored.update({name: ("F32", value) for name, value in tensors.items() if not name.endswith("_proj.weight")})

    write_model(plain, ffn=96, change=change)
    write_model(coded, ffn=96)
    save(coded / "model.safetensors", stored)
    (coded / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": weights["config"]}))
    return plain, coded


def built(folder, fuse=True):
    checkpoint = open_checkpoint(folder)
    return checkpoint, network.build(network.choose_spec(checkpoint), checkpoint, fuse=fuse)


def test_linears_of_one_order_share_a_step_and_a_matrix(models):
    checkpoint, found = built(models[1])
    steps = found.entries["main"]
    labels = [step.label for step in steps if step.op == "permute" and step.label.startswith("blk.0.")]
    assert labels == ["blk.0.attn_q.order", "blk.0.attn_output.order", "blk.0.ffn_gate.order", "blk.0.ffn_up.order",
                      "blk.0.ffn_down.order"]
    kinds = {step.label: {kind for name in step.weights.values() for kind in found.weights[name].types}
             for step in steps if step.op == "linear"}
    assert kinds["blk.0.attn_q+attn_k+attn_v"] == kinds["blk.0.ffn_down"] == {"U4_F16_32"}
    assert "U4_F16_32" in network.describe.tensor_types(found, checkpoint)
    assert not any(step.op == "permute" for step in built(models[1], fuse=False)[1].entries["main"])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.thin(2)
def test_results_are_those_of_the_plain_model(models, backend):
    logits = []
    for folder in models:
        with numflow.load(folder, backend=backend, activations="f32") as model:
            logits.append(model.logits([1, 2, 3, 40, 5]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * logits[0].std()


def test_an_adapter_is_merged_into_the_numbers_that_run(models, tmp_path):
    rng, logits = np.random.default_rng(0), []
    names = [f"base_model.model.model.layers.1.{linear}" for linear in LINEARS]
    shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
    tensors = {}
    for name in names:
        n, k = shapes.get(name.rpartition(".")[2], (64, 64))
        tensors[f"{name}.lora_A.weight"] = "F32", rng.standard_normal((2, k)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = "F32", rng.standard_normal((n, 2)).astype(np.float32)
    save(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": [name.rpartition(".")[2] for name in LINEARS]}))
    for folder in models:
        with numflow.load(folder, backend="reference", adapters={"a": tmp_path}, merge="a") as model:
            logits.append(model.logits([1, 2, 3, 40, 5]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * logits[0].std()


def test_a_weight_that_two_steps_read_stays_in_its_order(models):
    checkpoint, found = built(models[1], fuse=False)
    steps = found.entries["main"]
    first = next(step for step in steps if step.label == "blk.0.attn_q")
    twice = replace(found, entries={"main": (*steps, first)})
    changed = network.order_columns(twice, checkpoint)
    assert first in changed.entries["main"] and not changed.weights[first.weights["weight"]].parts[0].ordered
    assert sum(part.ordered for weight in changed.weights.values() for part in weight.parts) == 2 * len(LINEARS) - 1
    assert not formats.open_checkpoint(models[0]).tensors["lm_head.weight"].ordered
