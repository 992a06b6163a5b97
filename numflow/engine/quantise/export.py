"""Writing a model as a GGUF file, for other programs (`numflow quantize SRC.gguf DST.gguf`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numflow
from numflow import network
from numflow.engine.quantise.quantize import Row, check_target, step_of
from numflow.engine.quantise.report import source_facts, totals_of
from numflow.errors import RequestError
from numflow.formats import gguf_writer
from numflow.formats.checkpoint import Checkpoint
from numflow.formats.writer import Entry
from numflow.network.quantise import plan_of
from numflow.quant.recipe import Recipe


def export_gguf(source: Checkpoint, target: Path, recipe: Recipe, spec: str | Path | None = None,
                written: Callable[[int, int], None] = lambda done, total: None, replace: bool = False
                ) -> dict[str, Any]:
    """Write `source`, a GGUF file, to the GGUF file `target` with its matrices in other types of that format.

    Metadata, among it the tokenizer, is copied as it is. The report is returned; the file has no room for one.

    recipe: of GGUF types (`gguf_writer.ENCODED`). written, replace: as for `quantize`.

    Raises:
        RequestError: the source is no GGUF file, or has tensors of a type that GGUF lacks; and as `quantize`.
        FormatError, SpecError, NetworkError: as `quantize`.
    """
    if source.format != "gguf":
        raise RequestError(f"{source.path}: only a GGUF file can be written as GGUF, because its metadata is copied; "
                           f"this is {source.format}")
    check_target(Path(target), source, replace)
    chosen = network.choose_spec(source, spec)
    built = network.build(chosen, source, fuse=False)
    plan = plan_of(built, source, recipe)
    if not plan.schemes:
        raise RequestError(f"{source.path}: recipe {recipe.name!r} quantises nothing. {plan.says()}".rstrip())
    used = {part.tensor for weight in built.weights.values() for part in weight.parts}
    rows = [Row(tensor, plan, None, None, tensor.name in used) for tensor in source.tensors.values()]
    entries = [Entry(row.tensor.name, row.kind, row.tensor.shape, row.nbytes, row.read) for row in rows]
    gguf_writer.write(Path(target), source.files["weights"][0], entries,
                      step_of(written, sum(row.nbytes for row in rows)))
    return {"numflow": numflow.__version__, "recipe": recipe.as_dict(), "source": source_facts(source),
            "calibration": None, **totals_of([row.facts for row in rows]), "kept": dict(plan.kept),
            "idle": list(plan.idle), "tensors": [row.facts for row in rows]}
