"""A family's case: committed configuration, tensor names and expected results; weights are derived from the names."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import TYPES
from numflow.ops import Batch
from tests.specs.weights import values

FOLDER = Path(__file__).parent / "cases"
VARIANT_FOLDER = Path(__file__).parent / "variants"
GGUF_FOLDER = Path(__file__).parent / "gguf"
LLAMA_CPP_FOLDER = Path(__file__).parent / "llama_cpp"


@dataclass(frozen=True)
class Case:
    """One tiny model.

    configs: config.json as published, and as transformers writes it today.
    tensors: name -> shape as in the weight file.
    inputs:  per prompt, ids by argument ("ids", "types", "decoder_ids").
    rows:    per prompt, the rows whose results are stored.
    expected: "logits_0", "hidden_0", "encoder_hidden_0" ..., "scores_0" [labels]: float32 arrays of these rows.
    salt:    suffix of the names that weights are derived from.
    """

    name: str
    configs: tuple[dict, ...]
    tensors: dict[str, tuple[int, ...]]
    inputs: list[dict]
    rows: list[dict]
    expected: dict[str, np.ndarray]
    salt: str = ""


def names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.npz"))


def load_case(name: str, folder: Path = FOLDER) -> Case:
    with np.load(folder / f"{name}.npz") as file:
        arrays = dict(file)
    about = json.loads(arrays.pop("about").tobytes())
    tensors = {tensor: tuple(shape) for tensor, shape in about["tensors"].items()}
    return Case(name, tuple(about["configs"]), tensors, about["inputs"], about["rows"], arrays,
                about.get("salt", ""))


def memory_checkpoint(config: dict, tensors: dict[str, tuple[int, ...]], naming: str = "hf", make=values) -> Checkpoint:
    """A checkpoint in memory; `make(name, shape)` gives a tensor's values when it is read."""
    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        def read():
            return np.ascontiguousarray(make(name, shape)).reshape(-1, shape[-1] if shape else 1).view(np.uint8)

        return Tensor(name, shape, TYPES["F16" if make is values else "F32"], read)

    format = {"hf": "safetensors"}.get(naming, naming)
    return Checkpoint(Path("toy"), format, naming, {n: tensor(n, s) for n, s in tensors.items()}, config)


def gguf_names() -> list[str]:
    return sorted(path.stem for path in GGUF_FOLDER.glob("*.npz"))


def gguf_checkpoint(case: Case) -> Checkpoint:
    """The case as llama.cpp's converter stores it: committed metadata, names and element order, with this case's
    values."""
    with np.load(GGUF_FOLDER / f"{case.name}.npz") as file:
        arrays = dict(file)
    about, places = json.loads(arrays.pop("about").tobytes()), np.cumsum(arrays.pop("places"))
    source = np.concatenate([values(name, shape).reshape(-1) for name, shape in case.tensors.items()])
    stored, first = {}, 0
    for name, tensor in about["tensors"].items():
        if name in arrays:
            stored[name] = arrays[name]
            continue
        count = int(np.prod(tensor["shape"]))
        stored[name] = source[places[first:first + count]].astype(np.float32) + tensor["add"]
        if tensor.get("negative_exp"):
            stored[name] = -np.exp(stored[name])
        first += count
    shapes = {name: tuple(tensor["shape"]) for name, tensor in about["tensors"].items()}
    return memory_checkpoint(about["metadata"], shapes, "gguf", lambda name, shape: stored[name])


def run(program, ids: list[int], output: str = "logits", types: list[int] | None = None,
        encoder_ids: list[int] | None = None) -> np.ndarray:
    """`output` at every position of one sequence, float32 [len(ids), width]; the encoder is run first, if there is one.
    """
    if encoder_ids is not None:
        program.run(_batch(program, encoder_ids, len(encoder_ids)), entry="encode", output=None)
    entry = "encode" if output == "encoder_hidden" else "main"
    batch = _batch(program, ids, len(encoder_ids or ids))
    batch.types = None if types is None else np.array(types, np.int32)
    return program.run(batch, entry=entry, output=output)


def _batch(program, ids: list[int], memory: int) -> Batch:
    """One whole sequence from position 0 in the first blocks, with `memory` tokens in the cross cache."""
    count = len(ids)
    blocks, cross = (-(-n // program.block_size) for n in (count, memory))
    program.reserve(blocks, cross)
    each = np.arange(count, dtype=np.int32)
    return Batch(tokens=np.array(ids, np.int32), positions=each, starts=np.array([0, count], np.int32),
                 blocks=np.arange(blocks, dtype=np.int32)[None], logit_rows=each,
                 cross_blocks=np.arange(cross, dtype=np.int32)[None], cross_lengths=np.array([memory], np.int32),
                 slots=np.zeros(1, np.int32))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the standard deviation of the expected values."""
    return float(np.abs(found - expected).max() / expected.std())
