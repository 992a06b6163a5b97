"""Whole models in the layouts of quantisers, against the same models with decoded weights."""

import re
from itertools import count

import numpy as np
import pytest

from tests.formats.families import floats, logits_of, wider
from tests.formats.quantised_files import VARIANTS
from tests.specs.case import relative_error

EXPERTS, MIXED = r"experts\.|self_attn.*_proj", r"experts\.|shared_expert\.|self_attn.*_proj|in_proj_(qkvz|z|qkv)\."
GRANITE = re.compile(r"(.*block_sparse_moe\.)(input|output)_linear\.weight")


class Quantiser:
    """One matrix after another as a program stores it: tensors by name suffix, and decoded weights.

    config: the configuration of the last matrix.
    """

    def __init__(self, variant: str, **more):
        self._make, given = VARIANTS[variant]
        self._given, self._seeds, self.config = given | more, count(), {}

    def __call__(self, n: int, k: int) -> tuple[dict, np.ndarray]:
        parts, weights, self.config = self._make(np.random.default_rng(next(self._seeds)), n, k, **self._given)
        return {end: value for end, value in parts.items() if end != "bias"}, weights.astype(np.float32)

    def stack(self, e: int, n: int, k: int) -> tuple[list[dict], np.ndarray]:
        parts, weights = zip(*(self(n, k) for _ in range(e)), strict=True)
        return list(parts), np.stack(weights)


def check(tmp_path, files, plain, config, method, ids):
    expected = logits_of(tmp_path / "plain", floats(plain), config, ids)
    found = logits_of(tmp_path / "quantised", files, config | {"quantization_config": method}, ids)
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize(("name", "variant", "modules"), [
    ("qwen3_moe", "int8", EXPERTS), ("qwen3_moe", "awq", EXPERTS), ("qwen3_moe", "nvfp4", EXPERTS),
    ("qwen3_next", "gptq-4", MIXED), ("qwen3_next", "fp8-block", MIXED), ("qwen3_5_moe", "packed-4", MIXED),
    ("gemma3_multimodal", "nf4-double", "language_model.*_proj"),
    ("gemma3_multimodal", "bnb-int8", "language_model.*_proj"), ("qwen3", "torchao-int4", "_proj"),
    ("mixtral", "awq", EXPERTS), ("falcon_h1", "gptq-4", r"mamba\..*_proj|feed_forward"),
    ("granitemoehybrid", "gptq-4", r"mamba\..*_proj|shared_mlp|self_attn"),
    ("granitemoehybrid_dense", "nf4-double", r"mamba\..*_proj|shared_mlp|self_attn"),
])
@pytest.mark.thin(3)
def test_models_with_quantised_modules(tmp_path, name, variant, modules):
    config, tensors, ids = wider(name)
    quantise, files, plain = Quantiser(variant), {}, dict(tensors)
    for tensor, x in tensors.items():
        if re.search(modules, tensor) and tensor.endswith(".weight") and x.ndim == 2:
            parts, plain[tensor] = quantise(*x.shape)
            files |= {f"{tensor.removesuffix('weight')}{end}": value for end, value in parts.items()}
        else:
            files[tensor] = "F32", x
    assert len(files) > len(tensors)
    check(tmp_path, files, plain, config, quantise.config, ids)


@pytest.mark.parametrize(("variant", "more"), [("fp8-channel", {}), ("fp8-block", {"block": (32, 32)}), ("int8", {}),
                                               ("packed-4", {})])
@pytest.mark.parametrize("way", ["one stack", "numbered", "apart"])
@pytest.mark.thin(3)
def test_granites_experts(tmp_path, way, variant, more):
    """One stack with scales; numbered matrices under the stack's name; separate gate, up and down of each expert."""
    config, tensors, ids = wider("granitemoehybrid")
    quantise, files, plain = Quantiser(variant, **more), {}, dict(tensors)
    for tensor, x in tensors.items():
        name = GRANITE.fullmatch(tensor)
        if not name:
            renamed = tensor.replace("router.layer", "router") if way == "apart" else tensor
            files[renamed] = "F32", x
            continue
        stem = tensor.removesuffix("weight")
        if way == "apart":
            halves = ("gate", "up") if name[2] == "input" else ("down",)
            made = [quantise.stack(len(x), x.shape[1] // len(halves), x.shape[2]) for _ in halves]
            plain[tensor] = np.concatenate([weights for _, weights in made], axis=1)
            for half, (parts, _) in zip(halves, made, strict=True):
                files |= {f"{name[1]}experts.{i}.{half}_proj.{end}": value for i, own in enumerate(parts)
                          for end, value in own.items()}
            continue
        parts, plain[tensor] = quantise.stack(*x.shape)
        if way == "numbered":
            files |= {f"{stem}experts.{i}.{end}": value for i, own in enumerate(parts) for end, value in own.items()}
        else:
            files |= {f"{stem}{end}": (kind, np.stack([own[end][1] for own in parts])) if end != "weight_shape" else
                      (kind, np.array(x.shape)) for end, (kind, _) in parts[0].items() if end != "input_scale"}
    check(tmp_path, files, plain, config, quantise.config, ids)


@pytest.mark.parametrize("variant", ["packed-4", "awq", "gptq-4", "fp8-channel"])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
@pytest.mark.thin(3)
def test_experts_that_were_the_other_way_round(tmp_path, name, variant):
    """Programs that only quantise linear layers split the transposed stacks into experts."""
    config, tensors, ids = wider(name)
    quantise, files, plain = Quantiser(variant), {}, dict(tensors)
    for tensor, x in tensors.items():
        stem, experts, end = tensor.partition(".experts.")
        columns = [slice(0, None, 2), slice(1, None, 2)] if name == "gpt_oss" else [slice(x.shape[-1] // 2),
                                                                                    slice(x.shape[-1] // 2, None)]
        modules = dict(zip(("gate_proj", "up_proj"), columns, strict=True)) if "gate_up" in end else {
            "down_proj": slice(None)}
        if not experts:
            files[tensor] = "F32", x
            continue
        plain[tensor] = x.copy()
        for (module, own), i in ((item, i) for item in modules.items() for i in range(len(x))):
            at = f"{stem}.experts.{i}.{module}"
            if end.endswith("bias"):
                files[f"{at}.bias"] = "F32", np.ascontiguousarray(x[i, own])
                continue
            parts, weights = quantise(x[i, :, own].shape[1], x.shape[1])
            plain[tensor][i, :, own] = weights.T
            files |= {f"{at}.{last}": value for last, value in parts.items()}
    check(tmp_path, files, plain, config, quantise.config, ids)
