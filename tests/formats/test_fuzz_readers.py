"""Damaged files for the readers of quantised checkpoints, adapters and imatrix files: one line, or tensors to read.

Tensors and configurations are changed as such, and then bytes of the files. `NUMFLOW_FUZZ_SECONDS=600 pytest
tests/formats/test_fuzz_readers.py -m slow` runs each for minutes; 15 seconds where nothing is said.
"""

import json
import os
import random
import time

import numpy as np
import pytest

from numflow.errors import NumflowError
from numflow.formats import open_checkpoint
from numflow.formats.adapter import open_adapter
from numflow.network.quantise.calibration import Calibration, read_calibration
from numflow.network.quantise.imatrix_files import write_imatrix
from tests.formats.peft import PREFIX, pair, write_adapter
from tests.formats.quantised_files import VARIANTS, made
from tests.formats.test_adapter import NAME, gguf_file
from tests.formats.test_fuzz import PIECES, edit
from tests.formats.test_quantised import _change, folder_of

pytestmark = pytest.mark.slow
METHODS = sorted({maker.__name__ for maker, _ in VARIANTS.values()})
VALUES = [0, -1, 3, 1 << 70, "x", None, [], {}, [128, 128], 1.5, True, float("inf"), {"q_proj": 2}, {"(": 1}]


def quantised(method: str):
    """A checkpoint of a variant of a method."""
    names = [name for name, (maker, _) in VARIANTS.items() if maker.__name__ == method]

    def write(rng, folder):
        name = rng.choice(names)
        tensors, _, config = made(name, 64, 192)
        for _ in range(rng.randint(0, 3)):
            _change(rng, tensors, config)
        folder_of(folder, tensors, config)
        return folder, [folder / "model.safetensors", folder / "config.json"]

    return write, lambda folder: [tensor.f32().size for tensor in open_checkpoint(folder).tensors.values()]


def peft(rng, folder):
    """An adapter with all that PEFT may write, DoRA or a table."""
    dora, tensors = rng.random() < 0.5, pair(NAME, (6, 5))
    tensors |= {f"{PREFIX}lm_head.weight": np.ones((7, 3), np.float32), f"{PREFIX}{NAME}.lora_B.bias": np.ones(6, "f4")}
    tensors |= ({f"{PREFIX}{NAME}.lora_magnitude_vector": np.ones(6, np.float32)} if dora else
                pair("model.embed_tokens", (3, 7), kind="lora_embedding_{}"))
    for _ in range(rng.randint(0, 2)):
        name = rng.choice(sorted(tensors))
        tensors[name] = np.ascontiguousarray(rng.choice([tensors[name].T, tensors[name][:1], tensors[name][..., None]]))
    write_adapter(folder, tensors, use_dora=dora)
    settings = json.loads((folder / "adapter_config.json").read_text())
    for _ in range(rng.randint(0, 2)):
        settings[rng.choice(sorted(settings))] = rng.choice(VALUES)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder, [folder / "adapter_model.safetensors", folder / "adapter_config.json"]


def gguf(rng, folder):
    """An adapter in GGUF."""
    (folder / "a.gguf").write_bytes(gguf_file())
    return folder / "a.gguf", [folder / "a.gguf"]


def imatrix(name: str):
    """A file of importances."""
    def write(rng, folder):
        found = {"blk.0.attn_q.weight": np.ones(8, np.float32), "blk.1.ffn_up_exps.weight": np.ones((3, 8), np.float32)}
        write_imatrix(Calibration(found, facts={"tokens": 1024, "context": 512}), folder / name)
        return folder / name, [folder / name]

    return write, lambda path: [read_calibration(path).importances]


def changes(place) -> list:
    """All that an adapter has, read."""
    found = open_adapter(place)
    return [each.matrices() for each in found.added.values()] + [each.f32() for each in found.replaced.values()]


READERS = {**{method: quantised(method) for method in METHODS}, "peft": (peft, changes),
           "adapter.gguf": (gguf, changes), "imatrix.gguf": imatrix("x.gguf"), "imatrix.dat": imatrix("x.dat")}


@pytest.mark.parametrize("name", READERS)
def test_fuzz_for_long(tmp_path, name):
    rng, (write, read) = random.Random(name), READERS[name]
    end, tries, good, slowest = time.monotonic() + float(os.environ.get("NUMFLOW_FUZZ_SECONDS", "15")), 0, 0, 0.0
    while time.monotonic() < end or tries < 50:
        place, files = write(rng, tmp_path)
        if rng.random() < 0.5:
            path = rng.choice(files)
            path.write_bytes(edit(path.read_bytes(), [
                (rng.random() ** 3, rng.randrange(3), rng.choice(PIECES) if rng.random() < 0.5 else
                 rng.randbytes(rng.randint(1, 9))) for _ in range(rng.randint(1, 3))]))
        began = time.process_time()
        try:
            read(place)
            good += 1
        except NumflowError as error:
            assert "\n" not in str(error), str(error)
        slowest, tries = max(slowest, time.process_time() - began), tries + 1
        for path in tmp_path.iterdir():
            path.unlink()
    print(f"{name}: {tries} files, {good} read, the slowest took {slowest * 1000:.0f} ms of the processor")
    assert 0 < good < tries and slowest < 20
