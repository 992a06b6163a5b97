"""Facts on the files of a model, by their headers, whether it is loaded or not."""

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

    kind: decoder, encoder or encoder-decoder. family: name of its specification. parameters: numbers of all tensors.
    type: stored type of most bytes. context: longest text in tokens. digest: of names, sizes and times of the files.
    modified: the latest of these.
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
        """The number of parameters, as people say it."""
        for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.3g}{name}"
        return str(self.parameters)


def file_facts(config: ModelConfig) -> FileFacts | None:
    """Facts on a configured model; None: its files are not here, or cannot be read."""
    try:
        return _read(str(config.path), config.load.get("spec"))
    except (NumflowError, OSError):
        return None


@lru_cache(maxsize=256)
def _read(path: str, spec: str | None) -> FileFacts:
    place = Path(registry.resolve(path, offline=True, progress=False))
    checkpoint = formats.open_checkpoint(place)
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
    """The files of a model that is on this disk; empty if it is not."""
    try:
        place = Path(registry.resolve(path, offline=True, progress=False))
    except NumflowError:
        return []
    return sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]


def quantisation(config: ModelConfig, facts: FileFacts) -> str:
    """The type that most of the weights have when the model runs."""
    chosen: Any = config.load.get("weights")
    return str(chosen).upper() if chosen else facts.type
