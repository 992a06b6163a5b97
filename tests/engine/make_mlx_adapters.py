"""Writes expected/mlx_adapters.json: logits of mlx-lm with its adapters on a tiny model.

    python -m tests.engine.make_mlx_adapters

Run it from the repository root in an environment with mlx, mlx-lm, tokenizers, safetensors and NumPy.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.server.tiny import write_chat_model

IDS = [20, 31, 45, 60, 33, 9, 77, 120]
STEP = 33  # every column that is a multiple of it is stored
SHAPES = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (16, 32), "mlp.gate_proj": (48, 32),
          "mlp.down_proj": (32, 48)}
KINDS = ("lora", "dora")


def matrices(kind: str) -> dict[str, np.ndarray]:
    """The tensors of an adapter."""
    rng, found = np.random.default_rng(3), {}
    for layer in range(2):
        for module, (n, k) in SHAPES.items():
            name = f"model.layers.{layer}.{module}"
            found |= {f"{name}.lora_a": rng.standard_normal((k, 4)), f"{name}.lora_b": rng.standard_normal((4, n))}
            if kind == "dora":
                found[f"{name}.m"] = 1 + rng.random(n)
    if kind == "lora":  # the table and the output matrix, which are not tied
        found |= {"model.embed_tokens.lora_a": rng.standard_normal((264, 4)),
                  "model.embed_tokens.lora_b": rng.standard_normal((4, 32)),
                  "lm_head.lora_a": rng.standard_normal((32, 4)), "lm_head.lora_b": rng.standard_normal((4, 264))}
    return {name: (0.2 * values if "lora" in name else values).astype(np.float32) for name, values in found.items()}


def write_mlx_adapter(folder: Path, kind: str = "lora", tensors=None, **settings) -> Path:
    """An adapter's folder as mlx-lm writes it. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, entries, at = matrices(kind) if tensors is None else tensors, {}, 0
    for name, values in tensors.items():
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at := at + values.nbytes]}
    header = json.dumps({"__metadata__": None, **entries}).encode()
    (folder / "adapters.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"".join(values.tobytes() for values in tensors.values()))
    parameters = {"rank": 4, "scale": 1.5, "dropout": 0.0} | settings
    (folder / "adapter_config.json").write_text(json.dumps(
        {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "model": "base"}))
    return folder


def main() -> None:
    """Write the file."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        base = write_chat_model(Path(place) / "base")
        for kind in KINDS:
            model, _ = load_model(base, lazy=False)
            keys = [*SHAPES, *(("model.embed_tokens", "lm_head") if kind == "lora" else ())]
            linear_to_lora_layers(model, 2, {"rank": 4, "scale": 1.5, "dropout": 0.0, "keys": keys},
                                  use_dora=kind == "dora")
            folder = write_mlx_adapter(Path(place) / kind, kind)
            model.load_weights(str(folder / "adapters.safetensors"), strict=False)
            found[kind] = np.array(model(mx.array([IDS]))[0, :, ::STEP]).round(6).tolist()
    path = Path(__file__).parent / "expected" / "mlx_adapters.json"
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
