"""Quantising a model while it is loaded (`numflow.load(..., weights="q3h")`)."""

import sys
from pathlib import Path

from numflow import network
from numflow.formats.checkpoint import Checkpoint
from numflow.network.calibration import read_calibration
from numflow.network.quantise import check_calibration, plan_of, quantised, uncalibrated
from numflow.network.upright import upright
from numflow.quant.recipe import read_recipe


def requantised(checkpoint: Checkpoint, spec, weights: str | Path, imatrix: str | Path | None, threads: int | None,
                progress: bool) -> Checkpoint:
    """The checkpoint with its matrices in the types that a recipe says; each is quantised when it is read.

    weights: a scheme, a preset or a recipe file. imatrix: a calibration file (`numflow imatrix`).
    progress: say on standard error which matrices stay as they are, and why.

    Raises:
        RequestError: no such recipe, or a calibration of another model. FormatError: a calibration file that is none.
        SpecError: as `network.build`.
    """
    recipe = read_recipe(weights)
    checkpoint = upright(checkpoint, spec)
    plan = plan_of(network.build(spec, checkpoint, fuse=False), checkpoint, recipe)
    calibration = None if imatrix is None else read_calibration(Path(imatrix))
    for line in filter(None, (plan.says(), uncalibrated(calibration, plan)) if progress else ()):
        print(line, file=sys.stderr, flush=True)
    if calibration is not None:
        check_calibration(calibration, plan, checkpoint)
    return quantised(checkpoint, plan, calibration, threads)
