"""Verification of a GGUF file, which has no report, against its source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numflow import formats, network
from numflow.engine.quantise.export import as_gguf_file
from numflow.engine.quantise.report import errors, sha, source_facts, totals_of
from numflow.errors import FormatError
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.gguf_writer import WRITTEN
from numflow.formats.mapped import release_memory
from numflow.network.quantise.quantise import encoded

_WORSE = 1.5   # maximum error of another program's quantisation, as a factor of numflow's
_MOST = 0.5    # maximum relative error of types that numflow does not write
_LEAST = 1e-6  # tolerance for exact rounding


def verify_gguf(target: Path, against: Path, checked: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Compare names, shapes and bytes of all tensors; for tensors of another type than in the source, compare the error
    with the error of quantising the source to this type. Returns a report.

    Raises:
        FormatError: a tensor is missing, or has another shape, other bytes or too large an error; the message names it.
    """
    model, source = formats.open_checkpoint(target), formats.open_checkpoint(against)
    seen = as_gguf_file(source, network.choose_spec(source, None))[0]
    wrong, rows = _other_names(model, seen), []
    for name, tensor in model.tensors.items():
        if name not in seen.tensors:
            continue
        checked(name)
        row, fault = _compared(tensor, seen.tensors[name])
        rows.append(row)
        wrong += [fault] if fault else []
        release_memory()
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise FormatError(f"{target} is not made of {against}: {'; '.join(wrong[:3])}{more}")
    return {"recipe": {"name": "none: a GGUF file carries no report"}, "source": source_facts(source),
            **totals_of(rows), "tensors": rows}


def _other_names(model: Checkpoint, seen: Checkpoint) -> list[str]:
    return [*(f"tensor {name!r} is missing" for name in seen.tensors if name not in model.tensors),
            *(f"tensor {name!r} is not in the source" for name in model.tensors if name not in seen.tensors)]


def _compared(tensor: Tensor, source: Tensor) -> tuple[dict[str, Any], str]:
    """Row of the report for a tensor, and a message on its fault, if any."""
    kind, data = tensor.type.name, tensor.raw()
    row: dict[str, Any] = {
        "name": tensor.name, "type": kind, "shape": list(tensor.shape), "bytes": tensor.nbytes, "sha256": sha(data),
        "modules": [tensor.name] if len(tensor.shape) > 1 else []}
    if tensor.shape != source.shape:
        return row, f"tensor {tensor.name!r} is {list(tensor.shape)}, in the source {list(source.shape)}"
    if source.type.name == kind:
        same = sha(source.raw()) == row["sha256"]
        return row, "" if same else f"tensor {tensor.name!r} has other bytes than the source"
    row |= errors(source, data, kind, None)
    if kind in WRITTEN.values():
        encoded_here = encoded(source, kind)
        most = row["error"]
        if sha(encoded_here) != row["sha256"]:
            most = _WORSE * errors(source, encoded_here, kind, None)["error"] + _LEAST
    else:
        most = _MOST
    far = not row["error"] <= most
    return row, f"tensor {tensor.name!r} has an error of {row['error']:g}, {kind} needs at most {most:g}" if far else ""
