"""Checkpoints converted as mlx-lm does, from published ones, and the inverse for the values of the codes.

    stored = converted(config, tensors)           # names and values of mlx-lm
    files, meant = quantised(stored, bits, group)  # tensors of a safetensors file, and their decoded values
    tensors = published(config, meant)            # the published names and values for these
"""

import re
from collections import defaultdict

import numpy as np

from tests.formats.quantised_parts import bf16, words

_KIMI = {r"block_sparse_moe": "mlp", r"gate\.e_score": "e_score", r"_conv1d": "_conv.conv", r"\.w1\.": ".gate_proj.",
         r"\.w2\.": ".down_proj.", r"\.w3\.": ".up_proj."}
_NORMS = re.compile(r"\.(input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight$|model\.norm\.weight$")


def factors_of(config: dict, name: str, rows: int) -> np.ndarray | float:
    """mlx-lm's factor of a weight, of a model with multipliers."""
    if name.endswith("in_proj.weight"):
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = [inner, inner, states, states, rows - 2 * inner - 2 * states]
        return config["ssm_in_multiplier"] * np.repeat(np.array(config["ssm_multipliers"]), sizes)[:, None]
    ends = {"embed_tokens": config["embedding_multiplier"], "lm_head": config["lm_head_multiplier"],
            "q_proj": config["attention_in_multiplier"], "k_proj": config["attention_in_multiplier"],
            ".o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
            "gate_proj": config["mlp_multipliers"][0], "down_proj": config["mlp_multipliers"][1]}
    return next((factor for end, factor in ends.items() if name.endswith(f"{end}.weight")), 1.0)


def _changed(config: dict, name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
    """Values of a tensor under mlx-lm's name, converted, or converted back."""
    kind, sign = config["model_type"], -1 if back else 1
    if name.endswith(("conv1d.weight", "_conv.conv.weight")):
        return x.swapaxes(1, 2)
    if kind.startswith(("qwen3_next", "qwen3_5")) and _NORMS.search(name):
        return x + np.float32(sign)
    if kind == "falcon_h1" and name.endswith(".weight") and x.ndim == 2:
        return (x * factors_of(config, name, len(x)) ** sign).astype(np.float32)
    return x


def _halves(config: dict, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gate and up columns, interleaved or one after the other."""
    alternate, half = config["model_type"] == "gpt_oss", x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if alternate else (x[..., :half], x[..., half:])


def converted(config: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names and values of mlx-lm, float32."""
    found, stacks, kind = {}, defaultdict(list), config["model_type"]
    for name, x in sorted(tensors.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]):
        for pattern, new in _KIMI.items() if kind == "kimi_linear" else ():
            name = re.sub(pattern, new, name)
        stem, _, part = name.rpartition("_linear.weight")[0].rpartition(".")
        if name.endswith("kv_b_proj.weight"):
            heads = x.reshape(config["num_attention_heads"], -1, x.shape[1])
            stem, nope = name.removesuffix("kv_b_proj.weight"), config["qk_nope_head_dim"]
            found |= {f"{stem}embed_q.weight": heads[:, :nope].swapaxes(1, 2),
                      f"{stem}unembed_out.weight": heads[:, nope:]}
        elif kind.startswith("gemma4") and ".experts." in name:
            stem, _, part = name.partition(".experts.")
            halves = {part: x}
            if part == "gate_up_proj":
                halves = dict(zip(("gate_proj", "up_proj"), np.split(x, 2, axis=1), strict=True))
            found |= {f"{stem}.experts.switch_glu.{part}.weight": piece for part, piece in halves.items()}
        elif ".experts.gate_up_proj" in name:
            stem, end = name.split("gate_up_proj")
            for part, piece in zip(("gate_proj", "up_proj"), _halves(config, x), strict=True):
                found[f"{stem}{part}.{'bias' if end else 'weight'}"] = piece if end else piece.swapaxes(1, 2)
        elif name.endswith((".experts.down_proj", ".experts.down_proj_bias")):
            found[name.replace("_bias", ".bias") if "_bias" in name else f"{name}.weight"] = (
                x if "_bias" in name else x.swapaxes(1, 2))
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(x, 2, axis=1)
            found |= {f"{stem}.switch_mlp.gate_proj.weight": gate, f"{stem}.switch_mlp.up_proj.weight": up}
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            found[f"{stem}.switch_mlp.down_proj.weight"] = x
        elif stem.endswith("shared_mlp") and not config.get("num_local_experts"):
            mlp = f"{stem.removesuffix('shared_mlp')}mlp"
            parts = zip(("gate", "up"), np.split(x, 2), strict=True) if part == "input" else [("down", x)]
            found |= {f"{mlp}.{end}_proj.weight": piece for end, piece in parts}
        elif ".experts." in name:
            stacks[re.sub(r"experts\.\d+", "experts" if kind == "afmoe" else "switch_mlp", name)].append(x)
        else:
            found[name] = _changed(config, name, x)
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def published(config: dict, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The published names and values, from those of mlx-lm."""
    found, kind = {}, config["model_type"]
    for name, x in stored.items():
        if kind == "afmoe" and ".experts." in name:
            stem, _, end = name.rpartition("experts.")
            found |= {f"{stem}experts.{i}.{end}": part for i, part in enumerate(x)}
            continue
        if ".switch_glu." in name:
            plain = name.replace("switch_glu.", "").removesuffix(".weight")
            if plain.endswith("gate_proj"):
                both = x, stored[name.replace("gate_proj", "up_proj")]
                found[plain.replace("gate_proj", "gate_up_proj")] = np.concatenate(both, axis=1)
            elif plain.endswith("down_proj"):
                found[plain] = x
            continue
        if ".experts." in name and "_proj." in name:
            stem, end, last = name.rpartition(".experts.")[0] + ".experts.", *name.split(".")[-2:]
            this = x if last == "bias" else x.swapaxes(1, 2)
            if end == "down_proj":
                found[f"{stem}down_proj{'_bias' if last == 'bias' else ''}"] = this
            elif end == "gate_proj":
                other = stored[name.replace("gate_proj", "up_proj")]
                both = (this, other if last == "bias" else other.swapaxes(1, 2))
                found[f"{stem}gate_up_proj{'_bias' if last == 'bias' else ''}"] = (
                    np.stack(both, -1).reshape(*this.shape[:-1], -1) if kind == "gpt_oss" else np.concatenate(both, -1))
            continue
        if name.endswith("embed_q.weight"):
            other = stored[name.replace("embed_q", "unembed_out")]
            found[name.replace("embed_q", "kv_b_proj")] = np.concatenate([x.swapaxes(1, 2), other], 1).reshape(
                -1, other.shape[-1])
            continue
        if name.endswith("unembed_out.weight"):
            continue
        stem, _, end = name.partition(".switch_mlp." if ".switch_mlp." in name else ".mlp.")
        if kind == "granitemoehybrid" and end:
            whole = stem if ".switch_mlp." in name else f"{stem}.shared_mlp"
            if end == "gate_proj.weight":
                up = stored[name.replace("gate_proj", "up_proj")]
                found[f"{whole}.input_linear.weight"] = np.concatenate([x, up], axis=-2)
            elif end == "down_proj.weight":
                found[f"{whole}.output_linear.weight"] = x
        elif ".switch_mlp." in name:
            found |= {f"{stem}.experts.{i}.{end}": part for i, part in enumerate(x)}
        else:
            found[name] = _changed(config, name, x, back=True)
    return found


def quantised(stored: dict[str, np.ndarray], bits: int, group: int) -> tuple[dict, dict[str, np.ndarray]]:
    """Tensors of a file in MLX's affine mode, others in BF16, and the decoded values of all."""
    files, meant = {}, {}
    for name, x in stored.items():
        if not name.endswith(".weight") or x.ndim < 2 or "conv1d" in name or x.shape[-1] % group:
            files[name] = "BF16", bf16(x)
            meant[name] = _wide(files[name][1])
            continue
        parts = x.reshape(*x.shape[:-1], -1, group)
        low, high = parts.min(axis=-1), parts.max(axis=-1)
        stem, scales, biases = name.removesuffix("weight"), bf16((high - low) / ((1 << bits) - 1)), bf16(low)
        s, b = _wide(scales)[..., None], _wide(biases)[..., None]
        codes = np.clip(np.rint((parts - b) / np.maximum(s, 1e-9)), 0, (1 << bits) - 1).astype(np.int64)
        meant[name] = (codes * s + b).astype(np.float32).reshape(x.shape)
        flat = words(codes.reshape(-1, x.shape[-1]), bits, True).view("<u4")
        files[name] = "U32", flat.reshape(*x.shape[:-1], -1)
        files |= {f"{stem}scales": ("BF16", scales), f"{stem}biases": ("BF16", biases)}
    return files, meant


def _wide(bits: np.ndarray) -> np.ndarray:
    """BF16 as float32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)
