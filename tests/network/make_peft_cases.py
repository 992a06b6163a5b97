"""Writes peft/NAME.npz: results of PEFT for adapters whose modules are fused otherwise than the base's files, and for
PEFT's methods beside LoRA.

    python -m tests.network.make_peft_cases [NAME ...]

Run it from the repository root in an environment with torch, transformers, peft, safetensors and NumPy (the tests need
none of them). The bases are those of tests/specs; an adapter's values are derived from its tensors' names.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.network.peft_cases import CASES, FOLDER, adapter_values
from tests.specs.configs import CASES as BASES
from tests.specs.make_transformers_cases import CLASSES, save


def make(name: str) -> None:
    base, settings = CASES[name]
    kind, config, options = BASES[base]
    with tempfile.TemporaryDirectory() as temporary:
        folder, adapter = Path(temporary, "base"), Path(temporary, "adapter")
        folder.mkdir()
        asked = json.loads(json.dumps(config | options.get("asked", {})))
        save(kind, asked, folder, options)
        (folder / "config.json").write_text(json.dumps(asked))

        def opened():
            return CLASSES[kind].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

        more = {key: value for key, value in settings.items() if key != "peft_type"}
        own = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]](**more) if "peft_type" in settings else LoraConfig(
            r=3, lora_alpha=6, **more)
        get_peft_model(opened(), own).save_pretrained(adapter)
        path = adapter / "adapter_model.safetensors"
        with safe_open(path, "numpy") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()  # noqa: SIM118
                      if not key.endswith("base_layer.weight")}  # the base's, once more
        save_file({key: adapter_values(key, shape) for key, shape in shapes.items()}, path)
        said = json.loads((adapter / "adapter_config.json").read_text())
        ids = [5 + (7 * i * i + 3 * i) % 40 for i in range(9)]
        with torch.no_grad():
            model = PeftModel.from_pretrained(opened(), adapter).eval()
            found = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        output = "hidden" if kind == "hidden" else "logits"
        rows = (found.hidden_states[-1] if kind == "hidden" else found.logits)[0].numpy()[[0, 4, 8]]
    kept = {key: value for key, value in said.items() if value not in (None, False, [], {})}
    about = {"base": base, "config": kept, "tensors": shapes, "ids": ids, "output": output, "rows": [0, 4, 8]}
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{name}.npz", expected=rows,
                        about=np.frombuffer(json.dumps(about, separators=(",", ":")).encode(), np.uint8))
    print(name, len(shapes), float(rows.std()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        make(case)
