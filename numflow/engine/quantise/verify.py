"""Verification of quantised model files against their report and their source (`numflow verify`)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numflow import formats
from numflow.engine.quantise.report import errors, report_sha, sha, source_facts, text_sha, totals_of
from numflow.errors import FormatError
from numflow.formats import container, safetensors
from numflow.formats.checkpoint import Checkpoint
from numflow.formats.mapped import release_memory
from numflow.network.quantise.transposed import transpose


def verify(target: Path, against: Path | None = None,
           checked: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Recompute the values in a quantised model's report; returns the report.

    against: source of the model; its hash and each tensor's error are recomputed too. A GGUF file, which has no report,
             is compared with the source only.
    checked: called with the name of each tensor.

    Raises:
        FormatError: the file is no quantised model, or differs from its report; the message names the differences.
    """
    if against is not None and formats.detect(Path(target)) == "gguf":
        from numflow.engine.quantise.verify_gguf import verify_gguf

        return verify_gguf(target, against, checked)
    report = container.read_report(target)
    if report.get("sha256") != report_sha(report):
        raise FormatError(f"{target}: its report has been changed: it has another hash than it says")
    model = formats.open_checkpoint(target)
    source = None if against is None else _as(model, formats.open_checkpoint(against))
    wrong = [] if source is None else _other_source(report, source)
    try:
        for row in report["tensors"]:
            checked(row["name"])
            wrong += _other_tensor(row, model, source)
            release_memory()
        expected = {**report, **totals_of(report["tensors"])}
    except (KeyError, TypeError) as error:
        raise FormatError(f"{target}: the report lacks {error}") from None
    wrong += [f"{key} is {expected[key]}, the report says {report.get(key)}" for key in ("bytes", "bits_per_weight")
              if expected[key] != report.get(key)]
    wrong += _other_files(report, Path(target))
    names = {row["name"] for row in report["tensors"]}
    wrong += [f"tensor {name!r} is not in the report" for name in model.tensors if name not in names]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise FormatError(f"{target} is not what its report says: {'; '.join(wrong[:3])}{more}")
    return report


def _as(model: Checkpoint, source: Checkpoint) -> Checkpoint:
    """The source with its matrices transposed as in the model."""
    both = model.tensors.keys() & source.tensors.keys()
    return transpose(source, {name for name in both if model.tensors[name].turned and not source.tensors[name].turned
                              and source.tensors[name].type.block == 1 and len(source.tensors[name].shape) > 1})


def _other_tensor(row: Mapping[str, Any], model: Checkpoint, source: Checkpoint | None) -> list[str]:
    """Differences between one tensor and its report."""
    name = row["name"]
    if name not in model.tensors:
        return [f"tensor {name!r} is missing"]
    tensor = model.tensors[name]
    if tensor.type.name != row["type"] or list(tensor.shape) != row["shape"] or tensor.nbytes != row["bytes"]:
        return [f"tensor {name!r} is {tensor.type.name} {list(tensor.shape)}, the report says {row['type']} "
                f"{row['shape']}"]
    data = tensor.raw()
    if sha(data) != row["sha256"]:
        return [f"tensor {name!r} has other bytes"]
    if source is None or "error" not in row:
        return []
    if name not in source.tensors or source.tensors[name].shape != tensor.shape:
        found = list(source.tensors[name].shape) if name in source.tensors else "missing"
        return [f"tensor {name!r} is {row['shape']}, in {source.path} it is {found}"]
    error = errors(source.tensors[name], data, row["type"], None)["error"]
    same = abs(error - row["error"]) <= 1e-5 * max(error, 1e-9)
    return [] if same else [f"tensor {name!r} has an error of {error:g}, the report says {row['error']:g}"]


def _other_files(report: Mapping[str, Any], target: Path) -> list[str]:
    """Attached files, configuration and metadata that are not those of the report."""
    stored, metadata = safetensors.read_with_metadata(target)
    found = {name.removeprefix(container.PREFIX): sha(tensor.raw()) for name, tensor in stored.items()
             if name.startswith(container.PREFIX) and name not in (container.CONFIG, container.REPORT)}
    expected = report.get("files", {})
    wrong = [f"the file {name!r} in it is another one" for name in sorted(found.keys() | expected.keys())
             if found.get(name) != expected.get(name)]
    hashes = {"config": sha(stored[container.CONFIG].raw()), "metadata": text_sha(metadata[container.KEY])}
    return wrong + [f"its {what} is another one" for what, found in hashes.items() if found != report.get(what)]


def _other_source(report: Mapping[str, Any], source: Checkpoint) -> list[str]:
    found = source_facts(source)
    same = [f["sha256"] for f in found["files"]] == [f["sha256"] for f in report.get("source", {}).get("files", [])]
    return [] if same else [f"{source.path} has other hashes than its source had"]
