"""Families without a class in transformers, whose arithmetic is another family's with rearranged tensors."""

import json
import re
from collections import defaultdict

import numpy as np
import pytest

from numflow import network
from numflow.formats import open_checkpoint
from numflow.formats.checkpoint import Checkpoint
from numflow.network import WeightSource
from numflow.reference.program import Program
from tests.formats.quantised_files import save
from tests.specs.case import Case, load_case, memory_checkpoint, relative_error, run
from tests.specs.weights import values


def _internlm2(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """q, k and v in one matrix, [q .. q k v] per key/value head; other names."""
    names = {"embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm",
             "post_attention_layernorm": "ffn_norm",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
             "mlp.down_proj": "feed_forward.w2", "lm_head": "output"}
    config, stored = case.configs[0], {}
    for name, shape in case.tensors.items():
        parts = name.split(".q_proj")
        if len(parts) == 2:
            groups = [values(f"{parts[0]}.{x}_proj.weight", case.tensors[f"{parts[0]}.{x}_proj.weight"]).reshape(
                config["num_key_value_heads"], -1, config["hidden_size"]) for x in "qkv"]
            stored[parts[0].replace("self_attn", "attention.wqkv.weight")] = np.concatenate(groups, 1).reshape(
                -1, config["hidden_size"])
        elif "k_proj" not in name and "v_proj" not in name:
            renamed = name
            for old, new in names.items():
                renamed = renamed.replace(old, new)
            stored[renamed] = values(name, shape)
    return config | {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}, stored


def _minicpm(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """Multipliers under other keys; attention uses the default scale, so the queries' weights include the difference.
    """
    config = case.configs[0]
    ours = {"scale_emb": config["embedding_multiplier"],
            "dim_model_base": config["hidden_size"] / config["logits_scaling"],
            "scale_depth": config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5,
            "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    plain = (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    stored = {name: values(name, shape).astype(np.float32) for name, shape in case.tensors.items()}
    for name in stored:
        if "q_proj" in name:
            stored[name] *= np.float32(config["attention_multiplier"] / plain)
    return {key: v for key, v in config.items() if "multiplier" not in key and key != "logits_scaling"} | ours, stored


def _orion(case: Case) -> tuple[dict, dict[str, np.ndarray]]:
    """Layer norms whose epsilon is called rms_norm_eps, and rotary embedding of all query and key columns."""
    config = dict(case.configs[0])
    config |= {"rms_norm_eps": config.pop("layer_norm_eps"), "architectures": ["OrionForCausalLM"],
               "model_type": "orion"}
    return config, {name: values(name, shape) for name, shape in case.tensors.items()}


@pytest.mark.parametrize(("name", "rearrange"), [("mistral_nemo", _internlm2), ("granite", _minicpm),
                                                 ("stablelm_whole", _orion)])
def test_the_same_numbers_come_out(name, rearrange):
    case = load_case(name)
    config, stored = rearrange(case)
    shapes = {name: array.shape for name, array in stored.items()}
    checkpoint = memory_checkpoint(config, shapes, make=lambda name, shape: stored[name].astype(np.float32))
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    program = Program(built, WeightSource(built, checkpoint))
    for i, (given, kept) in enumerate(zip(case.inputs, case.rows, strict=True)):
        assert relative_error(run(program, given["ids"])[kept["rows"]], case.expected[f"logits_{i}"]) < 1e-4


def _mlx(case: Case, folder) -> Checkpoint:
    """As mlx-lm stores it: transposed convolutions, stacked experts, and its own names."""
    names = {"lfm2_moe": {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."},
             "nemotron_h_moe": {"up_proj": "fc1", "down_proj": "fc2"}}.get(case.name, {})
    stored, stacks = {}, defaultdict(list)
    for name, shape in sorted(case.tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        value = values(name, shape).astype(np.float32)
        if ".experts." in name or case.name == "lfm2_moe":
            for old, new in names.items():
                name = name.replace(old, new)
        if len(shape) == 3 and "conv" in name:
            value = value.swapaxes(1, 2)
        if ".experts." in name:
            stacks[re.sub(r"experts\.\d+", "switch_mlp", name)].append(value)
        else:
            stored[name] = value
    stored |= {name: np.stack(parts) for name, parts in stacks.items()}
    save(folder / "model.safetensors", {name: ("F32", value) for name, value in stored.items()})
    (folder / "config.json").write_text(json.dumps(case.configs[0]))
    return open_checkpoint(folder)


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe", "nemotron_h_moe", "jamba", "olmo_hybrid", "recurrent_gemma"])
def test_models_of_mlx(tmp_path, name):
    case = load_case(name)
    checkpoint = _mlx(case, tmp_path)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    program = Program(built, WeightSource(built, checkpoint))
    y = run(program, case.inputs[0]["ids"])[case.rows[0]["rows"]]
    assert relative_error(y, case.expected["logits_0"]) < 1e-4
