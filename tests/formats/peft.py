"""Adapters as PEFT writes them, with random values."""

import json

import numpy as np
from safetensors.numpy import save_file

PREFIX = "base_model.model."


def pair(module: str, shape: tuple[int, int], rank: int = 4, seed: int = 0, kind: str = "lora_{}.weight",
         dtype=np.float32) -> dict[str, np.ndarray]:
    """The matrices A and B of a module with a weight [N, K] = shape."""
    rng, (n, k) = np.random.default_rng(seed + len(module) + 7 * n_of(module)), shape
    sizes = {"A": (rank, k), "B": (n, rank)}
    return {f"{PREFIX}{module}.{kind.format(letter)}": (0.3 * rng.standard_normal(size)).astype(dtype)
            for letter, size in sizes.items()}


def n_of(text: str) -> int:
    """An integer derived from a text, the same in every run."""
    return sum(i * ord(letter) for i, letter in enumerate(text))


def write_adapter(folder, tensors: dict[str, np.ndarray], **config):
    """Write an adapter's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "use_dora": False,
                "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "modules_to_save": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder
