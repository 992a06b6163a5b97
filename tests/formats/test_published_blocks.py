"""DeepSeek V4 in its published layout: matrices in FP8 blocks, experts in FP4, scales that are powers of two."""

import json
import re

import numpy as np
import pytest

from tests.formats.families import floats, logits_of
from tests.formats.quantised_parts import E2M1, bf16, e4m3, two_in_a_byte
from tests.specs.case import load_case, relative_error
from tests.specs.weights import values

BLOCK = 24  # a size with partial blocks; 128 as published
METHOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
          "weight_block_size": [BLOCK, BLOCK]}
CODED = re.compile(r"attn\.w(q_a|q_b|kv|o_a|o_b)\.|indexer\.wq_b\.|shared_experts\.")
EXPERT = re.compile(r"\.experts\.\d+\.")
PUBLISHED = {"model.embed_tokens": "embed", "model.hc_head.hc_": "hc_head_", "model.norm": "norm",
             "model.layers.": "layers."}


def published() -> tuple[dict, dict[str, np.ndarray], list[int]]:
    """The case with columns widened to whole groups, under published names."""
    case, tensors = load_case("deepseek_v4"), {}
    config = case.configs[0] | {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32}
    sizes = {48: 64, 20: 32}
    for name, (*rows, k) in case.tensors.items():
        old = next((old for old in PUBLISHED if name.startswith(old)), "")
        shape = (*(sizes.get(n, n) for n in rows), 192 if "hc_" in name and k == 144 else sizes.get(k, k))
        tensors[name.replace(old, PUBLISHED.get(old, ""), 1) if old else name] = values(name, shape)
    return config, tensors, case.inputs[1]["ids"]


def fp8(rng, n: int, k: int, powers: str) -> tuple[dict, np.ndarray]:
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8) & 0xBF
    exponents = rng.integers(116, 120, (-(-n // BLOCK), -(-k // BLOCK))).astype(np.uint8)
    scales = 2.0**(exponents.astype(int) - 127)
    stored = ("F8_E8M0", exponents) if powers == "F8_E8M0" else ("F32", scales.astype(np.float32))
    return ({"weight": ("F8_E4M3", codes), "scale": stored},
            e4m3(codes) * np.repeat(np.repeat(scales, BLOCK, 0)[:n], BLOCK, 1)[:, :k])


def fp4(rng, n: int, k: int) -> tuple[dict, np.ndarray]:
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(122, 126, (n, k // 32)).astype(np.uint8)
    return ({"weight": ("I8", two_in_a_byte(codes).view(np.int8)), "scale": ("F8_E8M0", exponents)},
            E2M1[codes] * np.repeat(2.0**(exponents.astype(int) - 127), 32, 1))


@pytest.mark.parametrize("form", ["experts in FP4", "all in FP8"])
def test_deepseek_v4(tmp_path, form):
    config, tensors, ids = published()
    rng, files, plain = np.random.default_rng(0), {}, {}
    for name, x in tensors.items():
        if name.endswith("tid2eid"):
            files[name], plain[name] = ("I64", x.astype(np.int64)), x
        elif EXPERT.search(name) or CODED.search(name):
            four = form == "experts in FP4" and EXPERT.search(name)
            parts, plain[name] = fp4(rng, *x.shape) if four else fp8(
                rng, *x.shape, "F8_E8M0" if form == "experts in FP4" else "F32")
            files |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        elif x.ndim == 2 and "hc_" not in name and not name.endswith("ape"):
            bits = bf16(x.astype(np.float32))
            files[name], plain[name] = ("BF16", bits), (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            files[name], plain[name] = ("F32", x.astype(np.float32)), x
    files["mtp.0.e_proj.weight"] = "F32", np.ones((64, 64), np.float32)
    assert sum(kind == "I8" for kind, _ in files.values()) == (72 if form == "experts in FP4" else 0)
    expected = logits_of(tmp_path / "plain", floats(plain), config, ids)
    said = config | {"quantization_config": METHOD} | ({"expert_dtype": "fp4"} if form == "experts in FP4" else {})
    found = logits_of(tmp_path / "published", files, json.loads(json.dumps(said)), ids)
    assert np.isfinite(expected).all() and expected.std() > 0.1
    assert relative_error(found, expected) < 1e-4
