"""GGUF models of real shapes with random weights, named as llama.cpp's converter names them."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from numflow.formats.checkpoint import Checkpoint
from numflow.formats.types import TYPES
from numflow.lab.shapes import random_tensor

# Tensors that stay float32.
PLAIN = ("norm.weight", "rope_freqs.weight", "output_scale.weight", "conv1d.weight", "conv.weight", ".bias", "ssm_a",
         "ssm_d", "gate_inp.weight")

RATE = -0.01  # decay rate of the states per token, times softplus(1)


@dataclass(frozen=True)
class Made:
    """A model: its metadata, and the shapes of its tensors."""

    name: str
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    def checkpoint(self, kind: str = "Q4_0") -> Checkpoint:
        """Its weights, made when they are read: matrices in a type, or in Q5_0 if their rows are too short for the
        type, as llama.cpp does with Q4_K; vectors of ones; rates are negative."""
        def type_of(name: str, shape: tuple[int, ...]) -> str:
            return "F32" if name.endswith(PLAIN) else kind if shape[-1] % TYPES[kind].block == 0 else "Q5_0"

        tensors = {name: random_tensor(name, shape, type_of(name, shape), value=RATE if name.endswith("ssm_a") else 1.0)
                   for name, shape in self.shapes.items()}
        return Checkpoint(Path(self.name), "gguf", "gguf", tensors, self.metadata)

    def read_bytes(self, kind: str = "Q4_0") -> int:
        """Bytes in the file of all tensors that decoding a token reads whole; of a table, it reads a row."""
        tensors = self.checkpoint(kind).tensors.items()
        return sum(tensor.nbytes for name, tensor in tensors if not name.startswith("per_layer_tok"))

    def operations(self) -> int:
        """Operations of a token of a prompt in the matrices of the layers."""
        return sum(2 * prod(shape) for name, shape in self.shapes.items()
                   if not name.endswith(PLAIN) and not name.startswith(("token_embd", "per_layer_tok")))

    def write(self, path: Path, kind: str = "Q4_0") -> Path:
        """The file, which llama.cpp reads too; it has no vocabulary."""
        from numflow.formats import gguf_writer
        from numflow.formats.writer import TensorEntry

        entries = [TensorEntry(t.name, t.type.name, t.shape, t.nbytes, t.read)
                   for t in self.checkpoint(kind).tensors.values()]
        gguf_writer.write(path, *gguf_writer.made_pairs(self.metadata), entries)
        return path


def _made(name: str, family: str, layers: int, width: int, ffn: int, vocabulary: int, about: dict[str, Any],
          shapes: dict[str, tuple[int, ...]], last: str = "output_norm") -> Made:
    metadata = {"general.architecture": family, "general.name": name, "tokenizer.ggml.model": "no_vocab",
                f"{family}.vocab_size": vocabulary, f"{family}.block_count": layers,
                f"{family}.context_length": 131072, f"{family}.embedding_length": width,
                f"{family}.feed_forward_length": ffn, f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
                **{f"{family}.{key}": value for key, value in about.items()}}
    return Made(name, metadata, {"token_embd.weight": (vocabulary, width), f"{last}.weight": (width,)} | shapes)


def _ffn(at: str, width: int, ffn: int, norm: str = "ffn_norm") -> dict[str, tuple[int, ...]]:
    return {f"{at}{norm}.weight": (width,), f"{at}ffn_gate.weight": (ffn, width), f"{at}ffn_up.weight": (ffn, width),
            f"{at}ffn_down.weight": (width, ffn)}


def _attention(at: str, width: int, q: int, kv: int, inner: int, norms: int = 0) -> dict[str, tuple[int, ...]]:
    found = {f"{at}attn_q.weight": (q, width), f"{at}attn_k.weight": (kv, width), f"{at}attn_v.weight": (kv, width),
             f"{at}attn_output.weight": (width, inner)}
    return found | {f"{at}{name}.weight": (norms,) for name in ("attn_q_norm", "attn_k_norm") if norms}


def qwen35(quick: bool, pure: bool = False) -> Made:
    """A gated delta rule in three layers of four (of all, if pure), attention in the others."""
    layers, width, ffn, vocabulary, heads, dim = (4, 128, 256, 320, 2, 64) if quick else (24, 1024, 3584, 248320, 16,
                                                                                          128)
    (queries, head_dim), inner = (2, dim) if quick else (8, 256), heads * dim
    recurrent = [pure or layer % 4 != 3 for layer in range(layers)]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, state in enumerate(recurrent):
        at = f"blk.{layer}."
        shapes |= {f"{at}attn_norm.weight": (width,)} | _ffn(at, width, ffn, "post_attention_norm")
        if not state:
            shapes |= _attention(at, width, 2 * queries * head_dim, 2 * head_dim, queries * head_dim, head_dim)
            continue
        shapes |= {f"{at}attn_qkv.weight": (3 * inner, width), f"{at}attn_gate.weight": (inner, width),
                   f"{at}ssm_conv1d.weight": (3 * inner, 4), f"{at}ssm_dt.bias": (heads,), f"{at}ssm_a": (heads,),
                   f"{at}ssm_alpha.weight": (heads, width), f"{at}ssm_beta.weight": (heads, width),
                   f"{at}ssm_norm.weight": (dim,), f"{at}ssm_out.weight": (width, inner)}
    return _made("Qwen3.5-0.8B-like" + pure * " without attention", "qwen35", layers, width, ffn, vocabulary, {
        "attention.head_count": queries, "attention.head_count_kv": 2, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "rope.freq_base": 1e7, "rope.dimension_count": head_dim // 4,
        "rope.dimension_sections": [head_dim // 8 - 2 * (head_dim // 24), head_dim // 24, head_dim // 24, 0],
        "ssm.conv_kernel": 4, "ssm.state_size": dim, "ssm.group_count": heads, "ssm.time_step_rank": heads,
        "ssm.inner_size": inner, "attention.recurrent_layers": recurrent, "full_attention_interval": 4}, shapes)


def lfm2(quick: bool) -> Made:
    """Short convolutions, with attention in six layers of sixteen."""
    layers, width, ffn, vocabulary, heads, kv = (4, 128, 256, 320, 4, 2) if quick else (16, 1024, 4608, 65536, 16, 8)
    with_attention = {2} if quick else {2, 5, 8, 10, 12, 14}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        at = f"blk.{layer}."
        shapes |= {f"{at}attn_norm.weight": (width,)} | _ffn(at, width, ffn)
        if layer in with_attention:
            shapes |= _attention(at, width, width, width // heads * kv, width, width // heads)
        else:
            shapes |= {f"{at}shortconv.conv.weight": (width, 3), f"{at}shortconv.in_proj.weight": (3 * width, width),
                       f"{at}shortconv.out_proj.weight": (width, width)}
    return _made("LFM2-350M-like", "lfm2", layers, width, ffn, vocabulary, {
        "attention.head_count": heads, "rope.freq_base": 1e6, "shortconv.l_cache": 3,
        "attention.head_count_kv": [kv if layer in with_attention else 0 for layer in range(layers)]}, shapes,
        "token_embd_norm")


def granite(quick: bool) -> Made:
    """A state space (Mamba 2) in 28 layers of 32, attention without positions in the others."""
    layers, width, ffn, vocabulary, heads, kv, size = (4, 128, 256, 320, 4, 2, 32) if quick else (
        32, 768, 2048, 100352, 12, 4, 128)
    with_attention, inner, states = {2} if quick else {10, 13, 17, 27}, 2 * width, width // 16
    mixed = inner + 2 * size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        at = f"blk.{layer}."
        shapes |= {f"{at}attn_norm.weight": (width,)} | _ffn(at, width, ffn)
        if layer in with_attention:
            shapes |= _attention(at, width, width, width // heads * kv, width)
        else:
            shapes |= {f"{at}ssm_in.weight": (inner + mixed + states, width), f"{at}ssm_conv1d.weight": (mixed, 4),
                       f"{at}ssm_conv1d.bias": (mixed,), f"{at}ssm_dt.bias": (states,), f"{at}ssm_a": (states, 1),
                       f"{at}ssm_d": (states, 1), f"{at}ssm_norm.weight": (1, inner),
                       f"{at}ssm_out.weight": (width, inner)}
    return _made("Granite-4-H-350M-like", "granitehybrid", layers, width, ffn, vocabulary, {
        "attention.head_count": heads, "rope.freq_base": 1e4, "rope.dimension_count": width // heads,
        "attention.head_count_kv": [kv if layer in with_attention else 0 for layer in range(layers)],
        "attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.246, "logit_scale": 3.0,
        "rope.scaling.finetuned": False, "ssm.conv_kernel": 4, "ssm.state_size": size, "ssm.group_count": 1,
        "ssm.inner_size": inner, "ssm.time_step_rank": states}, shapes)


def gemma4(quick: bool) -> Made:
    """A window of 512 tokens in four layers of five, a further embedding for each layer, keys and values of the last
    half of the layers shared. As E2B, but for layers and the width of that embedding: 1.8 billion weights."""
    layers, width, ffn, vocabulary, heads, dim, each = (5, 128, 256, 320, 2, 32, 32) if quick else (
        20, 1536, 6144, 262144, 8, 256, 128)
    windows, shared = [layer % 5 != 4 for layer in range(layers)], 0 if quick else layers // 2
    shapes: dict[str, tuple[int, ...]] = {
        "rope_freqs.weight": (dim,), "per_layer_token_embd.weight": (vocabulary, layers * each),
        "per_layer_model_proj.weight": (layers * each, width), "per_layer_proj_norm.weight": (each,)}
    for layer, window in enumerate(windows):
        at, head = f"blk.{layer}.", dim if window else 2 * dim
        found = _attention(at, width, heads * head, head, heads * head, head) | _ffn(at, width, ffn)
        if layer >= layers - shared:
            for name in ("attn_k", "attn_v", "attn_k_norm"):
                del found[f"{at}{name}.weight"]
        shapes |= found | {f"{at}{name}.weight": (width,) for name in (
            "attn_norm", "post_attention_norm", "post_ffw_norm", "post_norm")}
        shapes |= {f"{at}inp_gate.weight": (each, width), f"{at}proj.weight": (width, each),
                   f"{at}layer_output_scale.weight": (1,)}
    return _made("Gemma-4-like", "gemma4", layers, width, ffn, vocabulary, {
        "attention.head_count": heads, "attention.head_count_kv": 1, "attention.key_length": 2 * dim,
        "attention.value_length": 2 * dim, "attention.key_length_swa": dim, "attention.value_length_swa": dim,
        "attention.sliding_window": 512, "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": shared, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 2 * dim, "rope.dimension_count_swa": dim, "embedding_length_per_layer_input": each,
        "final_logit_softcapping": 30.0}, shapes)


def gemma3() -> Made:
    """Attention through a window of 1024 tokens in five layers of six. Nothing of it is computed here."""
    layers, width, ffn, heads, kv, dim = 34, 2560, 10240, 8, 4, 256
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        at = f"blk.{layer}."
        shapes |= _ffn(at, width, ffn) | _attention(at, width, heads * dim, kv * dim, heads * dim, dim)
        shapes |= {f"{at}{name}.weight": (width,) for name in ("attn_norm", "post_attention_norm", "post_ffw_norm")}
    return _made("Gemma-3-4B-like", "gemma3", layers, width, ffn, 262144, {
        "attention.head_count": heads, "attention.head_count_kv": kv, "attention.key_length": dim,
        "attention.value_length": dim, "attention.sliding_window": 1024, "rope.freq_base": 1e6}, shapes)


def deepseek() -> Made:
    """Latent attention in 61 layers. Nothing of it is computed here."""
    layers, width, ffn, heads, rank, rope = 61, 7168, 18432, 128, 512, 64
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        at = f"blk.{layer}."
        shapes |= {f"{at}{name}.weight": shape for name, shape in {
            "attn_norm": (width,), "attn_q_a": (1536, width), "attn_q_a_norm": (1536,), "attn_q_b": (heads * 192, 1536),
            "attn_kv_a_mqa": (rank + rope, width), "attn_kv_a_norm": (rank,), "attn_k_b": (heads, rank, 128),
            "attn_v_b": (heads, 128, rank), "attn_output": (width, heads * 128)}.items()} | _ffn(at, width, ffn)
    return _made("DeepSeek-V3-like", "deepseek2", layers, width, ffn, 129280, {
        "attention.head_count": heads, "attention.head_count_kv": 1, "attention.key_length": rank + rope,
        "attention.value_length": rank, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "attention.kv_lora_rank": rank, "attention.q_lora_rank": 1536, "rope.dimension_count": rope,
        "rope.freq_base": 1e4, "leading_dense_block_count": layers}, shapes | {"output.weight": (129280, width)})
