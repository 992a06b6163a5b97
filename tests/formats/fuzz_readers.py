"""Damaged files for the readers of quantised checkpoints, adapters and imatrix files: one-line errors, or readable
tensors.

    python -m tests.formats.fuzz_readers --seconds 600 [--only gptq,awq] [--seed 1]

Tensors and configurations are changed first, then bytes of the files. Each reader is fuzzed for so many seconds; a line
reports the number of files and the slowest file's time. A damaged file that raises anything but a one-line
NumflowError, or that warns, ends the run with its traceback. The same reader and seed give the same files.
"""

import argparse
import json
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

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
    """An adapter with everything that PEFT may write, with DoRA or a table."""
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
    """A GGUF adapter."""
    (folder / "a.gguf").write_bytes(gguf_file())
    return folder / "a.gguf", [folder / "a.gguf"]


def imatrix(name: str):
    """An imatrix file."""
    def write(rng, folder):
        found = {"blk.0.attn_q.weight": np.ones(8, np.float32), "blk.1.ffn_up_exps.weight": np.ones((3, 8), np.float32)}
        write_imatrix(Calibration(found, facts={"tokens": 1024, "context": 512}), folder / name)
        return folder / name, [folder / name]

    return write, lambda path: [read_calibration(path).importances]


def changes(place) -> list:
    """All changes of an adapter, read."""
    found = open_adapter(place)
    return [each.matrices() for each in found.added.values()] + [each.f32() for each in found.replaced.values()]


READERS = {**{method: quantised(method) for method in METHODS}, "peft": (peft, changes),
           "adapter.gguf": (gguf, changes), "imatrix.gguf": imatrix("x.gguf"), "imatrix.dat": imatrix("x.dat")}


def fuzz(name: str, folder: Path, seconds: float, seed: str = "") -> tuple[int, int, float]:
    """(files given to a reader, files that it read, CPU seconds of the slowest file)"""
    rng, (write, read) = random.Random(name + seed), READERS[name]
    end, tries, good, slowest = time.monotonic() + seconds, 0, 0, 0.0
    while time.monotonic() < end or tries < 50:
        place, files = write(rng, folder)
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
        for path in folder.iterdir():
            path.unlink()
    return tries, good, slowest


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default=",".join(READERS), help="readers, with commas between")
    parser.add_argument("--seed", default="")
    given = parser.parse_args()
    if unknown := set(given.only.split(",")) - set(READERS):
        parser.error(f"no reader {', '.join(sorted(unknown))}; there are {', '.join(READERS)}")
    warnings.simplefilter("error")
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            tries, good, slowest = fuzz(name, Path(folder), given.seconds, given.seed)
        print(f"{name}: {tries} files, {good} read, the slowest took {slowest * 1000:.0f} ms of the processor",
              flush=True)


if __name__ == "__main__":
    main()
