"""Facts on a model's files, from their headers; the model need not be loaded."""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from numflow import formats, network, registry
from numflow.errors import NumflowError
from numflow.server.config.config import ModelConfig


@dataclass(frozen=True)
class FileFacts:
    """Facts on a model's files.

    kind: decoder, encoder or encoder-decoder. family: name of the specification. parameters: number of elements of all
    tensors. type: the stored type with most bytes. context: context length in tokens. digest: hash of names, sizes and
    modification times of the files. modified: the latest modification time.
    """

    kind: str
    family: str
    format: str
    parameters: int
    type: str
    context: int
    size: int
    digest: str
    modified: str

    @property
    def short(self) -> str:
        """The number of parameters with a unit, such as 7B."""
        for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.3g}{name}"
        return str(self.parameters)


def file_facts(config: ModelConfig) -> FileFacts | None:
    """Facts on a configured model; None if its files are not on this disk or cannot be read."""
    try:
        return _read(str(config.path), config.load.get("spec"))
    except (NumflowError, OSError):
        return None


@lru_cache(maxsize=256)
def _read(path: str, spec: str | None) -> FileFacts:
    location = Path(registry.resolve(path, offline=True, progress=False))
    checkpoint = formats.open_checkpoint(location)
    chosen = network.choose_spec(checkpoint, spec)
    bytes_of: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        bytes_of[tensor.type.name] = bytes_of.get(tensor.type.name, 0) + tensor.nbytes
    files = weight_files(path)
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    modified = max((state[2] for state in states), default=0) / 1e9
    return FileFacts(
        chosen.type, chosen.name, checkpoint.format, sum(prod(one.shape) for one in checkpoint.tensors.values()),
        max(bytes_of, key=lambda name: bytes_of[name], default="F32"),
        int(network.build(chosen, checkpoint).facts["context"]), sum(state[1] for state in states),
        hashlib.sha256(repr(states).encode()).hexdigest(), datetime.fromtimestamp(modified, UTC).isoformat())


def weight_files(path: str) -> list[Path]:
    """The files of a model; empty if it is not on this disk."""
    try:
        location = Path(registry.resolve(path, offline=True, progress=False))
    except NumflowError:
        return []
    return sorted(file for file in location.rglob("*") if file.is_file()) if location.is_dir() else [location]


def quantisation(config: ModelConfig, facts: FileFacts) -> str:
    """The type of most weights when the model runs."""
    chosen: Any = config.load.get("weights")
    return str(chosen).upper() if chosen else facts.type
