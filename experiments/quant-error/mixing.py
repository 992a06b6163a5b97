"""Quantised model files for the experiment: a scheme for all matrices, and mixes that take their tensors from those."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from numflow import formats
from numflow.engine.quantise.quantize import quantize
from numflow.formats import container
from numflow.formats.checkpoint import Tensor
from numflow.formats.types import TYPES
from numflow.formats.writer import TensorEntry, write
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.quantise import encoded
from numflow.quant.recipe import read_recipe


@dataclass(frozen=True)
class Files:
    """Files of one model in the folder `work`, each made once."""

    source: Path
    work: Path
    calibration: Calibration | None

    def whole(self, scheme: str) -> Path:
        """Every matrix in one scheme."""
        path = self.work / f"{scheme}{'' if self.calibration else '-plain'}.safetensors"
        if not path.exists():
            quantize(formats.open_checkpoint(self.source), path, read_recipe(scheme), self.calibration)
        return path

    def mixed(self, name: str, schemes: dict[str, str]) -> Path:
        """The tensors of `schemes` in these schemes, all others as in the source."""
        path = self.work / f"{name}.safetensors"
        if path.exists():
            return path
        source = formats.open_checkpoint(self.source)
        tensors = {n: self._tensor(t, schemes[n]) if n in schemes else t for n, t in source.tensors.items()}
        model = replace(source, tensors=tensors)
        files = container.attached(model.files)
        entries = [container.entry_of(t, t.type.name, t.raw) for t in tensors.values()]
        entries += [TensorEntry.of(container.PREFIX + f.name, np.fromfile(f.path, np.uint8)) for f in files]
        entries += [container.json_entry(container.CONFIG, dict(model.config)),
                    container.json_entry(container.REPORT, {"mixed": schemes})]
        types = {t.name: (t.type.name, t.shape) for t in tensors.values()}
        write(path, entries, container.metadata_of(model.naming, types, files))
        return path

    def _tensor(self, tensor: Tensor, scheme: str) -> Tensor:
        """A tensor in a scheme, quantised once for all mixes that have it."""
        kept = self.work / "tensors" / f"{tensor.name}.{scheme}.npy"

        def read() -> np.ndarray:
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                np.save(kept, encoded(tensor, scheme, self.calibration))
            return np.load(kept, mmap_mode="r")

        return Tensor(tensor.name, tensor.shape, TYPES[scheme], read)
