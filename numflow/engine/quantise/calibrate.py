"""Calibration: statistics of the inputs of a model's matrices while the model reads a text (`numflow imatrix`).

For every matrix: the mean square of each input column, and on request the second moment of the inputs. The model runs
in float32 on the reference executor, which exposes the inputs of every step. The head is not run: it is expensive, and
its input is known without it. In an encoder-decoder both stacks read the text.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from numflow import formats, network
from numflow.engine.calibration.collector import WIDEST, over_windows
from numflow.engine.load import load
from numflow.engine.measure.perplexity import windows_of
from numflow.network.gguf.as_gguf import as_gguf
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.imatrix_files import OLD, for_tensors, write_imatrix
from numflow.network.quantise.quantise import matrices
from numflow.network.quantise.transposed import transposed


def calibrate(path_or_name: str | Path, text: str, context: int = 512, chunks: int | None = None,
              moments: bool = True, progress: Callable[[int, int], None] | None = None, **load_options) -> Calibration:
    """Run a model over a text and collect statistics of the inputs of its matrices.

    context, chunks: the text is cut into windows of `context` tokens; the first `chunks` windows are read.
    moments:         collect second moments for error feedback: K x K float32 per distinct input of K columns.
    progress:        called with (windows done, windows).

    Raises:
        RequestError: the text is too short, or the model computes NaN; and the errors of `load`.
    """
    with load(path_or_name, backend="reference", **load_options) as model:
        context = min(context, model.context)
        windows, _ = windows_of(model, text, context, chunks, "plain")
        found = over_windows(model, windows, WIDEST if moments else 0, progress)
    return replace(found, facts={**found.facts, "context": context,
                                 "text_sha256": hashlib.sha256(text.encode()).hexdigest()})


def is_imatrix_name(path: Path) -> bool:
    """Whether a file of this name is written in the imatrix format of GGML's programs."""
    return path.suffix.lower() in (".gguf", *OLD)


def save(calibration: Calibration, path: Path, model: Path, spec: str | Path | None = None) -> None:
    """Write a calibration of a model; if `is_imatrix_name`, only importances, under GGUF tensor names.

    Raises:
        RequestError: the file cannot be written, or GGUF has no architecture for the model.
    """
    if not is_imatrix_name(path):
        calibration.write(path)
        return
    checkpoint = formats.open_checkpoint(model)
    if checkpoint.naming == "gguf":
        write_imatrix(calibration, path)
        return
    chosen = network.choose_spec(checkpoint, spec)
    seen, built = as_gguf(checkpoint, chosen), network.build(chosen, transposed(checkpoint, chosen), fuse=False)
    wanted = matrices(network.build(network.choose_spec(seen), seen, fuse=False))
    found = for_tensors(calibration, matrices(built), wanted, lambda name: seen.tensors[name].columns)
    named = {name: found.importances[name] for name in wanted if name in found.importances}
    write_imatrix(Calibration(named, facts=calibration.facts), path)
