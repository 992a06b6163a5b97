"""Checkpoints with random weights for a given shape, to plan and time models without downloading them."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from numflow.errors import FormatError, RequestError, did_you_mean
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES, tensor_type
from numflow.lab.random_rows import random_rows

# Types that are quantised with the package gguf, which is fast for them.
_OF_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
_DRAWN = 32  # random rows; the other rows repeat them


@dataclass(frozen=True)
class Shape:
    """Sizes of a generic decoder (RMSNorm, RoPE, grouped-query attention, gated feed-forward layers)."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int

    @property
    def weights(self) -> int:
        """Number of weights of all matrices, including embedding and output head."""
        return sum(int(np.prod(size)) for size in self.tensors().values() if len(size) == 2)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors by their names in hub files."""
        d, kv = self.width, self.width // self.heads * self.kv_heads
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, d)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            rows = {"self_attn.q_proj": d, "self_attn.k_proj": kv, "self_attn.v_proj": kv, "self_attn.o_proj": d,
                    "mlp.gate_proj": self.ffn, "mlp.up_proj": self.ffn}
            found |= {f"{prefix}{name}.weight": (n, d) for name, n in rows.items()}
            found[f"{prefix}mlp.down_proj.weight"] = (d, self.ffn)
            found |= {f"{prefix}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        return found | {"model.norm.weight": (d,), "lm_head.weight": (self.vocabulary, d)}

    def config(self) -> dict:
        """The content of config.json."""
        return {"hidden_size": self.width, "intermediate_size": self.ffn, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "num_hidden_layers": self.layers, "rms_norm_eps": 1e-5,
                "max_position_embeddings": self.context, "rope_theta": 10000.0, "tie_word_embeddings": False}


@cache
def _table() -> dict:
    return tomllib.loads((Path(__file__).parent / "shapes.toml").read_text(encoding="utf-8"))


def shape_names() -> list[str]:
    """Names of the predefined shapes, smallest first."""
    return [name for name, value in _table().items() if isinstance(value, dict)]


def find_shape(name: str, **changes: int) -> Shape:
    """A predefined shape by name ("7b"), with some sizes changed.

    Raises:
        RequestError: there is no such shape.
    """
    if name not in shape_names():
        raise RequestError(f"no shape {name!r}{did_you_mean(name, shape_names())}")
    return replace(Shape(**_table()[name]), **changes)


def random_checkpoint(shape: Shape, weights: str = "F16", seed: int = 0) -> Checkpoint:
    """A checkpoint of normal random weights with matrices of tensor type `weights`, generated when they are read.

    Rows repeat after the first _DRAWN: this makes no difference for timing, and large models are generated quickly.

    Raises:
        FormatError: there is no such tensor type.
    """
    tensors = {name: random_tensor(name, size, weights, seed) for name, size in shape.tensors().items()}
    return Checkpoint(Path("random"), "safetensors", "hf", tensors, shape.config())


def random_tensor(name: str, size: tuple[int, ...], weights: str, seed: int = 0, value: float = 1.0) -> Tensor:
    """A matrix of normal random weights of a tensor type, generated when it is read. A vector is filled with `value`.

    Raises:
        FormatError: there is no such tensor type.
    """
    if len(size) == 1 or 1 in size:
        shape = (int(np.prod(size[:-1])), size[-1])
        return Tensor(name, size, TYPES["F32"], lambda: np.full(shape, value, np.float32).view(np.uint8))
    return Tensor(name, size, tensor_type(weights), _drawn((int(np.prod(size[:-1])), size[-1]), weights, seed))


def random_network(shape: Shape, weights: str = "F16", fuse: bool = True):
    """(network, checkpoint) with random weights."""
    from numflow import network
    from numflow.spec.reader import load_spec

    checkpoint = random_checkpoint(shape, weights)
    return network.build(load_spec(_table()["spec"]), checkpoint, fuse=fuse), checkpoint


def _drawn(size: tuple[int, int], weights: str, seed: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        rows, columns = size
        values = np.random.default_rng(seed + columns).standard_normal((min(rows, _DRAWN), columns), np.float32)
        raw = encoded(values / np.float32(columns) ** 0.5, weights)
        return np.ascontiguousarray(raw[np.arange(rows) % len(raw)])

    return read


def encoded(values: np.ndarray, weights: str) -> np.ndarray:
    """Encode float32 [N, K] to rows of a type, uint8 [N, row_bytes]. Types without an encoder here get random rows.

    Raises:
        FormatError: the type's blocks do not divide the columns.
    """
    if values.shape[1] % tensor_type(weights).block:
        raise FormatError(f"rows of {values.shape[1]} weights: {weights} has blocks of {tensor_type(weights).block}")
    from numflow.quant import SCHEMES, encode, find

    if weights in SCHEMES or weights.endswith("%"):
        return encode(values, find(weights))
    if weights in ("F32", "F16", "BF16"):  # does not need the package gguf
        bits = values.view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
        return {"F32": values, "F16": values.astype(np.float16), "BF16": nearest}[weights].view(np.uint8)
    if weights not in _OF_GGUF:
        return random_rows(weights, *values.shape)
    from gguf import GGMLQuantizationType, quants

    return quants.quantize(values, GGMLQuantizationType[weights]).view(np.uint8).reshape(len(values), -1)
