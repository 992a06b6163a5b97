"""numflow's own models made wide and deep by weights that do not change the results, so that reading weights dominates.

Added rows of a feed-forward layer are random and are multiplied by columns of zeros. The output matrices of added
layers are zero.
"""

import json
import re
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from numflow import registry

FFN = 8192  # numbers inside a feed-forward layer
LAYERS = {"tiny": 32, "tiny-hybrid": 32, "tiny-draft": 16, "tiny-eagle": 1}  # a draft model has a sixth of the weights
QUICK_FFN, QUICK_LAYERS = 256, 6
_LAST = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # of a branch


def write(name, folder, quick):
    """The wide copy of one of our models, with the block in its file; its folder."""
    made = shutil.copytree(registry.resolve(name), folder / name)
    config, tensors = json.loads((made / "config.json").read_text()), load_file(made / "model.safetensors")
    ffn, layers = (QUICK_FFN, min(QUICK_LAYERS, LAYERS[name])) if quick else (FFN, LAYERS[name])
    own = config["num_hidden_layers"]
    for layer in range(own, layers):
        tensors |= empty_layer(tensors, own - 1, layer)
    rng = np.random.default_rng(0)
    for at in [key.removesuffix("gate_proj.weight") for key in tensors if key.endswith("mlp.gate_proj.weight")]:
        widen(tensors, at, ffn, rng)
    config |= {"num_hidden_layers": layers, "intermediate_size": ffn}
    if "layer_types" in config:
        config["layer_types"] += config["layer_types"][-1:] * (layers - own)
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config))
    return made


def empty_layer(tensors, like, layer):
    """Tensors of a layer of the kind of another one that adds zeros to the residual stream."""
    found = {}
    for key, value in tensors.items():
        if key.startswith(f"model.layers.{like}."):
            new = re.sub(r"layers\.\d+", f"layers.{layer}", key, count=1)
            found[new] = np.zeros_like(value) if key.endswith(_LAST) else value
    return found


def widen(tensors, at, ffn, rng):
    """A wider feed-forward layer whose output does not depend on the added columns."""
    for name in ("gate_proj", "up_proj"):
        rows = tensors[f"{at}{name}.weight"]
        more = rng.normal(0, 0.1, (ffn - len(rows), rows.shape[1])).astype(rows.dtype)
        tensors[f"{at}{name}.weight"] = np.concatenate([rows, more])
    down = tensors[f"{at}down_proj.weight"]
    tensors[f"{at}down_proj.weight"] = np.pad(down, ((0, 0), (0, ffn - down.shape[1])))
