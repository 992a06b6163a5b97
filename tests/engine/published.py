"""Tiny checkpoints of published families on disk, with the weights that tests/specs makes from their names."""

import json

import numpy as np
from safetensors.numpy import save_file

from tests.specs.case import load_case
from tests.specs.weights import values


def write_case(name, folder, **config):
    """config.json (with these keys added) and model.safetensors of a case of tests/specs. Returns the folder."""
    case = load_case(name)
    (folder / "config.json").write_text(json.dumps(case.configs[0] | config))
    save_file({tensor: values(tensor, shape).astype(np.float32) for tensor, shape in case.tensors.items()},
              folder / "model.safetensors")
    return folder
