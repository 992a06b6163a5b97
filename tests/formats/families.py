"""Committed cases with columns widened to whole groups, and logits of files in any layout."""

import json
from pathlib import Path

import numpy as np

from numflow import network
from numflow.formats import open_checkpoint
from numflow.network import WeightSource
from numflow.reference.program import Program
from tests.formats.quantised_files import save
from tests.specs.case import load_case, run
from tests.specs.weights import values

_GRANITE = {48: 64, 36: 32, 72: 64, 24: 32, 96: 128, 176: 208, 276: 340}
# Sizes in place of those of the committed cases; more of them for some tensors; others of the configuration.
_WIDER: dict[str, dict[int, int]] = {
    "qwen3_next": {48: 64, 20: 32, 28: 32}, "qwen3_5": {48: 64, 88: 96}, "qwen3_5_moe": {48: 64, 20: 32, 28: 32},
    "falcon_h1": {48: 64, 88: 96}, "granitemoehybrid": {**_GRANITE, 20: 32, 40: 64}, "granitemoehybrid_dense": _GRANITE,
    "qwen3_moe": {40: 64}, "qwen3": {88: 96}, "gemma3_multimodal": {88: 96}, "mixtral": {88: 96},
    "afmoe": {88: 96, 20: 32}, "gemma4_moe": {40: 64}, "gpt_oss": {88: 96, 176: 192}, "llama4": {88: 96, 24: 32},
    "deepseek_v3": {88: 96, 24: 32, 20: 32, 12: 32, 80: 160, 104: 184}}
_OF_SOME = {"llama4": {"gate_up_proj": {48: 64}}, "deepseek_v3": {"kv_a_proj_with_mqa.weight": {28: 40}}}
_MORE = {"granitemoehybrid": {"mamba_d_head": 32}, "granitemoehybrid_dense": {"mamba_d_head": 32}}
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
          "shared_intermediate_size", "kv_lora_rank", "qk_nope_head_dim")


def wider(name: str) -> tuple[dict, dict[str, np.ndarray], list[int]]:
    """A case with wider columns: configuration, weights as published, a prompt."""
    case, sizes, tensors = load_case(name), _WIDER[name], {}
    config = json.loads(json.dumps(case.configs[0])) | _MORE.get(name, {})
    for part in (config, config.get("text_config", {})):
        part |= {key: sizes.get(part[key], part[key]) for key in _SIZES if key in part}
    for tensor, shape in case.tensors.items():
        own = sizes | next((more for end, more in _OF_SOME.get(name, {}).items() if tensor.endswith(end)), {})
        keep = name.startswith(("qwen3_5", "qwen3_next")) and tensor.endswith(("k_proj.weight", "v_proj.weight"))
        new = tuple(size if keep and axis == 0 else own.get(size, size) for axis, size in enumerate(shape))
        tensors[tensor] = values(tensor, new).astype(np.float32)
    return config, tensors, case.inputs[0]["ids"]


def floats(tensors: dict[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
    """Tensors for a file in float32."""
    return {name: ("F32", np.asarray(x, np.float32)) for name, x in tensors.items()}


def logits_of(folder: Path, tensors: dict[str, tuple[str, np.ndarray]], config: dict, ids: list[int]) -> np.ndarray:
    """Logits float32 [n, V] of a checkpoint of these tensors, which is written to `folder` first."""
    folder.mkdir()
    save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    return run(Program(built, WeightSource(built, checkpoint)), ids)
