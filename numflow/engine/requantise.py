"""Quantising a model while it is loaded (`numflow.load(..., weights="q3h")`)."""

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
    """The options of quantising while a model is loaded.

    weights: a scheme, a preset, a GGUF type, a mix of them or a recipe file. imatrix: a calibration file (`numflow
    imatrix`), or an imatrix of GGML's programs; None: `calibration` says whether the model is calibrated on text that
    it writes, with `backend`. at_once: before anything is quantised, so that other processes find it.
    """

    weights: str | Path
    imatrix: str | Path | None = None
    calibration: bool = True
    backend: str = "cpu"
    at_once: bool = False


def requantised(checkpoint: Checkpoint, spec: Spec, how: Requantising, threads: int | None, reporter: Silent,
                kept: bool = True, rows_of: RowsOf | None = None) -> Checkpoint:
    """The checkpoint with its matrices in the types that a recipe says; each is quantised when it is read, or read from
    what an earlier start has kept of it.

    reporter: told which matrices stay as they are, and why, and how far quantising is; closed by the caller.
    kept: whether the next start may find what is quantised: the checkpoint has what its files have.
    rows_of: searches in place of the processors: a GPU's.

    Raises:
        RequestError: no such recipe, or a calibration of another model. FormatError: a calibration file that is none.
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
        later = _own(original, spec, built, how.backend, threads, reporter, kept)
        if how.at_once and later is not None:
            later.made()
    sizes = {name: tensor_type(scheme).row_bytes(tensor.columns) * tensor.rows
             for name, scheme in plan.schemes.items() for tensor in [checkpoint.tensors[name]]}
    tensors = KeptTensors.open(original, imatrix, sum(sizes.values()), METHOD if later else "") if kept else None
    where = "" if rows_of is None else " on the GPU"
    what = f"quantising to {recipe.name}{where}" + (", kept for the next start" if tensors is not None else "")
    return quantised(checkpoint, plan, calibration or later, threads, tensors, _Told(reporter, what, sizes, later),
                     rows_of)


def _own(checkpoint: Checkpoint, spec: Spec, built: Network, backend: str, threads: int | None, reporter: Silent,
         kept: bool) -> LaterCalibration | None:
    """The calibration of a model on its own text, made when it is first asked for; None where there can be none."""
    def told(why: str) -> None:
        reporter.note(f"{built.name} is quantised without calibration: {why}; an imatrix can be given")

    def make() -> Calibration:
        found, why = calibration_or_why(model_of, checkpoint, spec, backend=backend, threads=threads, told=reporter,
                                        keep=kept)
        if found is None:
            told(why)
        return found or Calibration({})

    if why := obstacle(built):
        told(why)
        return None
    return LaterCalibration(make)


class _Told:
    """Reports how far quantising is, from the first tensor that has to be quantised until all are there; devices load
    in threads of their own.

    later: made before the first, as it has stages of its own.
    """

    def __init__(self, reporter: Silent, what: str, sizes: dict[str, int], later: LaterCalibration | None):
        self._reporter, self._what, self._sizes, self._later, self._begun = reporter, what, sizes, later, False
        self._there: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, tensor: Tensor, there: bool) -> None:
        """A tensor is to be quantised, or is there."""
        with self._lock:
            if there:
                self._there.add(tensor.name)
            elif not self._begun:
                self._begun = True
                if self._later is not None:
                    self._later.made()
                self._reporter.stage(self._what, sum(self._sizes.values()))
            self._reporter.done(sum(self._sizes[name] for name in self._there))
            if len(self._there) == len(self._sizes):  # before kernels are compiled, which has a line of its own
                self._reporter.close()
