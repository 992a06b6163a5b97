"""Quantisation of a model while it is loaded (`numflow.load(..., weights="q3h")`)."""

import threading
from dataclasses import dataclass
from pathlib import Path

from numflow import network
from numflow.engine.calibration.own_text import METHOD, calibration_or_why, obstacle
from numflow.engine.load import model_of
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import tensor_type
from numflow.network.gguf.mixes import by_tensor, named
from numflow.network.quantise.calibration import Calibration, LaterCalibration, read_calibration
from numflow.network.quantise.kept import KeptTensors
from numflow.network.quantise.quantise import (
    check_calibration,
    plan_of,
    quantised,
    renamed,
    uncalibrated,
    wants_calibration,
)
from numflow.network.quantise.transposed import transposed
from numflow.ops import Network
from numflow.quant import RowsOf
from numflow.registry.progress import Silent
from numflow.spec.reader import Spec


@dataclass(frozen=True)
class Requantising:
    """Options of quantisation while a model is loaded.

    weights: a scheme, a preset, a GGUF type, a mix of them or a recipe file. imatrix: a calibration file (`numflow
    imatrix`), or an imatrix of GGML's programs; None: if `calibration`, the model is calibrated on text that it
    generates, with `backend`. at_once: calibrate before quantising, so that other processes find the calibration.
    """

    weights: str | Path
    imatrix: str | Path | None = None
    calibration: bool = True
    backend: str = "cpu"
    at_once: bool = False


def requantised(checkpoint: Checkpoint, spec: Spec, how: Requantising, threads: int | None, reporter: Silent,
                kept: bool = True, rows_of: RowsOf | None = None) -> Checkpoint:
    """Checkpoint with its matrices in the types of a recipe. Each matrix is quantised when it is read, or read from the
    cache of an earlier start.

    reporter: gets the matrices that are not quantised, with reasons, and the progress; closed by the caller.
    kept: whether to cache quantised matrices for the next start; the checkpoint's tensors must then be unchanged.
    rows_of: quantiser that runs on a GPU instead of the CPU.

    Raises:
        RequestError: unknown recipe, or a calibration of another model. FormatError: an invalid calibration file.
        SpecError: as `network.build`.
    """
    recipe, imatrix = named(how.weights), None if how.imatrix is None else Path(how.imatrix)
    original, checkpoint = checkpoint, transposed(checkpoint, spec)
    built = network.build(spec, checkpoint, fuse=False)
    plan = plan_of(built, checkpoint, by_tensor(recipe, built, original, spec, imatrix is not None))
    calibration = None if imatrix is None else renamed(read_calibration(imatrix), plan.modules, plan, checkpoint)
    for line in filter(None, (plan.says(), uncalibrated(calibration, plan))):
        reporter.note(line)
    later = None
    if calibration is not None:
        check_calibration(calibration, plan, checkpoint)
    elif how.calibration and wants_calibration(plan):
        later = _own_calibration(original, spec, built, how.backend, threads, reporter, kept)
        if how.at_once and later is not None:
            later.made()
    sizes = {name: tensor_type(scheme).row_bytes(tensor.columns) * tensor.rows
             for name, scheme in plan.schemes.items() for tensor in [checkpoint.tensors[name]]}
    tensors = KeptTensors.open(original, imatrix, sum(sizes.values()), METHOD if later else "") if kept else None
    where = "" if rows_of is None else " on the GPU"
    what = f"quantising to {recipe.name}{where}" + (", kept for the next start" if tensors is not None else "")
    return quantised(checkpoint, plan, calibration or later, threads, tensors, _Progress(reporter, what, sizes, later),
                     rows_of)


def _own_calibration(checkpoint: Checkpoint, spec: Spec, built: Network, backend: str, threads: int | None,
                     reporter: Silent, kept: bool) -> LaterCalibration | None:
    """Calibration of a model on text that it generates, computed on first use; None if impossible."""
    def note_why(why: str) -> None:
        reporter.note(f"{built.name} is quantised without calibration: {why}; an imatrix can be given")

    def make() -> Calibration:
        found, why = calibration_or_why(model_of, checkpoint, spec, backend=backend, threads=threads, reporter=reporter,
                                        keep=kept)
        if found is None:
            note_why(why)
        return found or Calibration({})

    if why := obstacle(built):
        note_why(why)
        return None
    return LaterCalibration(make)


class _Progress:
    """Progress of quantisation, from the first tensor that is quantised to the last one. Devices load in threads.

    later: calibration, computed before the first tensor, since it reports its own stages.
    """

    def __init__(self, reporter: Silent, what: str, sizes: dict[str, int], later: LaterCalibration | None):
        self._reporter, self._what, self._sizes, self._later, self._begun = reporter, what, sizes, later, False
        self._ready: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, tensor: Tensor, ready: bool) -> None:
        """Note that the quantisation of a tensor begins, or that the tensor is ready (`ready`)."""
        with self._lock:
            if ready:
                self._ready.add(tensor.name)
            elif not self._begun:
                self._begun = True
                if self._later is not None:
                    self._later.made()
                self._reporter.stage(self._what, sum(self._sizes.values()))
            self._reporter.done(sum(self._sizes[name] for name in self._ready))
            if len(self._ready) == len(self._sizes):  # before kernels are compiled, which has its own line
                self._reporter.close()
