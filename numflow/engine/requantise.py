"""Quantising a model while it is loaded (`numflow.load(..., weights="q3h")`)."""

from pathlib import Path

from numflow import network
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import tensor_type
from numflow.network.gguf.mixes import by_tensor, named
from numflow.network.quantise.calibration import read_calibration
from numflow.network.quantise.kept import KeptTensors
from numflow.network.quantise.quantise import check_calibration, plan_of, quantised, renamed, uncalibrated
from numflow.network.quantise.transposed import transposed
from numflow.registry.progress import Silent


def requantised(checkpoint: Checkpoint, spec, weights: str | Path, imatrix: str | Path | None, threads: int | None,
                reporter: Silent, kept: bool = True) -> Checkpoint:
    """The checkpoint with its matrices in the types that a recipe says; each is quantised when it is read, or read from
    what an earlier start has kept of it.

    weights: a scheme, a preset, a GGUF type, a mix of them or a recipe file. imatrix: a calibration file (`numflow
    imatrix`), or an imatrix of GGML's programs.
    reporter: told which matrices stay as they are, and why, and how far quantising is; closed by the caller.
    kept: whether the next start may find what is quantised: the checkpoint has what its files have.

    Raises:
        RequestError: no such recipe, or a calibration of another model. FormatError: a calibration file that is none.
        SpecError: as `network.build`.
    """
    recipe = named(weights)
    original, checkpoint = checkpoint, transposed(checkpoint, spec)
    built = network.build(spec, checkpoint, fuse=False)
    plan = plan_of(built, checkpoint, by_tensor(recipe, built, original, spec, imatrix is not None))
    calibration = None if imatrix is None else renamed(read_calibration(Path(imatrix)), plan.modules, plan, checkpoint)
    for line in filter(None, (plan.says(), uncalibrated(calibration, plan))):
        reporter.note(line)
    if calibration is not None:
        check_calibration(calibration, plan, checkpoint)
    sizes = {name: tensor_type(scheme).row_bytes(tensor.columns) * tensor.rows
             for name, scheme in plan.schemes.items() for tensor in [checkpoint.tensors[name]]}
    tensors = KeptTensors.open(original, None if imatrix is None else Path(imatrix),
                               sum(sizes.values())) if kept else None
    what = f"quantising to {recipe.name}" + (", kept for the next start" if tensors is not None else "")
    return quantised(checkpoint, plan, calibration, threads, tensors, _Told(reporter, what, sizes))


class _Told:
    """Reports how far quantising is, from the first tensor that has to be quantised until all are there."""

    def __init__(self, reporter: Silent, what: str, sizes: dict[str, int]):
        self._reporter, self._what, self._sizes, self._begun = reporter, what, sizes, False
        self._there: set[str] = set()

    def __call__(self, tensor: Tensor, there: bool) -> None:
        """A tensor is to be quantised, or is there."""
        if there:
            self._there.add(tensor.name)
        elif not self._begun:
            self._begun = True
            self._reporter.stage(self._what, sum(self._sizes.values()))
        self._reporter.done(sum(self._sizes[name] for name in self._there))
        if len(self._there) == len(self._sizes):  # before kernels are compiled, which has a line of its own
            self._reporter.close()
