"""Making and checking quantised model files (`numflow quantize`, `numflow verify`).

A file is made tensor by tensor, so that never more than one is in memory, and it appears only when it is complete. It
carries its report: recipe, hashes of its source, type, size, error and hash of each tensor, hashes of everything else
in the file, and one of the report itself. So nothing in it can change unnoticed.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import numflow
from numflow import formats, network
from numflow.errors import FormatError, RequestError
from numflow.formats import container, safetensors
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.mapped import release_memory
from numflow.formats.types import tensor_type, to_f32
from numflow.formats.writer import Entry, write
from numflow.network.calibration import Calibration
from numflow.network.quantise import Plan, check_calibration, encoded, plan_of
from numflow.quant.recipe import Recipe

_PART = 1 << 22      # weights whose error is measured at a time
_NO_HASH = 64 * "0"  # stands in a report where a hash comes
_SLACK = 64          # bytes that a tensor's numbers may need more in the report than zeros do
Written = Callable[[int, int], None]


def quantize(source: Checkpoint, target: Path, recipe: Recipe, calibration: Calibration | None = None,
             spec: str | Path | None = None, threads: int | None = None, written: Written = lambda done, total: None,
             replace: bool = False) -> dict[str, Any]:
    """Write `source` to the file `target` with its matrices quantised, and return the report that it carries.

    written: called with (bytes so far, bytes in all). replace: write over a file that is there.

    Raises:
        RequestError: the target exists, is the source, or cannot be written; weights that a scheme cannot hold.
        FormatError: NaN or infinite weights, or a broken source.
        SpecError, NetworkError: the source is no model that numflow knows.
    """
    target = Path(target)
    check_target(target, source, replace)
    if threads is not None and threads < 1:
        raise RequestError(f"threads should be a whole number from 1, is {threads}")
    chosen = network.choose_spec(source, spec)
    built = network.build(chosen, source, fuse=False)
    plan = plan_of(built, source, recipe)
    if not plan.schemes:
        raise RequestError(f"{source.path}: recipe {recipe.name!r} quantises nothing. {plan.says()}".rstrip())
    if calibration is not None:
        check_calibration(calibration, plan, source)
    used = {part.tensor for weight in built.weights.values() for part in weight.parts}
    rows = [Row(tensor, plan, calibration, threads, tensor.name in used) for tensor in source.tensors.values()]
    specs = [container.Attached(path, f"spec/{path.name}", "" if i else "spec") for i, path in enumerate(chosen.chain)]
    files = [*container.attached(source.files), *specs]
    attached = {file.name: _file_bytes(file.path) for file in files}
    config = container.json_entry(container.CONFIG, dict(source.config))
    metadata = container.metadata_of(source.naming, {row.tensor.name: (row.kind, row.tensor.shape) for row in rows},
                                     files)
    report = {"numflow": numflow.__version__, "recipe": recipe.as_dict(), "source": source_facts(source),
              "calibration": dict(calibration.facts) if calibration else None, **totals(rows),
              "kept": dict(plan.kept), "idle": list(plan.idle),
              "files": {name: _sha(data) for name, data in attached.items()}, "config": _sha(config.read()),
              "metadata": _text_sha(metadata[container.KEY]), "tensors": [row.facts for row in rows],
              "sha256": _NO_HASH}
    size = len(json.dumps(report)) + _SLACK * len(rows)

    def finished_report() -> np.ndarray:
        report["sha256"] = _report_sha(report)
        text = json.dumps(report).encode()
        return np.frombuffer(text + b" " * (size - len(text)), np.uint8)

    entries = [container.entry_of(row.tensor, row.kind, row.read) for row in rows]
    entries += [Entry.of(container.PREFIX + name, data) for name, data in attached.items()]
    entries += [config, Entry(container.REPORT, "U8", (size,), size, finished_report)]
    write(target, entries, metadata, step_of(written, sum(entry.nbytes for entry in entries)))
    return report


def step_of(written: Written, total: int) -> Callable[[int], None]:
    """What is called after each tensor: its pages go, those of the source too, and `written` is told."""
    def step(done: int) -> None:
        release_memory()
        written(done, total)

    return step


class Row:
    """One tensor on its way: `read` makes its bytes, and fills in what the report says of it."""

    def __init__(self, tensor: Tensor, plan: Plan, calibration: Calibration | None, threads: int | None, used: bool):
        """used: by the network, and so to be finite, whatever type it gets."""
        self.tensor, self._calibration, self._threads, self._used = tensor, calibration, threads, used
        self.scheme = plan.schemes.get(tensor.name)
        self.kind = self.scheme or tensor.type.name
        self.nbytes = container.entry_of(tensor, self.kind, self.read).nbytes
        self.facts: dict[str, Any] = {
            "name": tensor.name, "modules": list(plan.modules.get(tensor.name, ())), "type": self.kind,
            "from": tensor.type.name, "shape": list(tensor.shape), "bytes": self.nbytes, "sha256": _NO_HASH}
        if self.scheme:
            self.facts |= {"error": 0.0, "weighted_error": 0.0}

    def read(self) -> np.ndarray:
        if self.scheme is None:
            if self._used:
                check_finite(self.tensor)
            data = self.tensor.raw()
        else:
            data = encoded(self.tensor, self.scheme, self._calibration, self._threads)
            self.facts |= errors(self.tensor, data, self.kind, self._importance())
        self.facts["sha256"] = _sha(data)
        return data

    def _importance(self) -> np.ndarray | None:
        return None if self._calibration is None else self._calibration.importance(self.tensor.name)


def check_finite(tensor: Tensor) -> None:
    """Refuse a tensor with a NaN or an infinity.

    Raises:
        FormatError: the message has its row and column.
    """
    step = max(1, _PART // max(1, tensor.columns))
    for first in range(0, tensor.rows, step):
        finite = np.isfinite(tensor.f32(slice(first, first + step)))
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            raise FormatError(f"{tensor.name}: row {first + row}, column {column} is no finite number")


def errors(tensor: Tensor, data: np.ndarray, kind: str, importance: np.ndarray | None) -> dict[str, float]:
    """Relative rms error of a quantised tensor, and the same with squares weighted by importances [K] or [X, K]."""
    sums = np.zeros(4)
    step = max(1, _PART // max(1, tensor.columns))
    for first in range(0, tensor.rows, step):
        rows = slice(first, min(first + step, tensor.rows))
        x = tensor.f32(rows)
        squares = np.square(to_f32(data[rows], kind) - x), np.square(x)
        c = np.ones(1, np.float32)
        if importance is not None:
            expert = np.arange(rows.start, rows.stop) * len(importance) // tensor.rows
            c = importance[expert] if importance.ndim == 2 else importance
        sums += [part.sum(dtype=np.float64) for part in (*squares, *(c * square for square in squares))]
    pairs = ((sums[0], sums[1]), (sums[2], sums[3]))
    plain, weighted = (float(f"{np.sqrt(error / whole):.6e}") if whole else 0.0 for error, whole in pairs)
    return {"error": plain, "weighted_error": weighted}


def verify(target: Path, against: Path | None = None,
           checked: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Recompute what a quantised model's report says, and return the report.

    against: the model it was made from; its hash and each tensor's error are recomputed too.
    checked: called with the name of each tensor.

    Raises:
        FormatError: the file is no such model, or something is not as the report says; the message has what.
    """
    report = container.read_report(target)
    if report.get("sha256") != _report_sha(report):
        raise FormatError(f"{target}: its report has been changed: it has another hash than it says")
    model = formats.open_checkpoint(target)
    source = None if against is None else formats.open_checkpoint(against)
    wrong = [] if source is None else _other_source(report, source)
    try:
        for row in report["tensors"]:
            checked(row["name"])
            wrong += _other_tensor(row, model, source)
            release_memory()
        expected = {**report, **_totals_of(report["tensors"])}
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


def _other_tensor(row: Mapping[str, Any], model: Checkpoint, source: Checkpoint | None) -> list[str]:
    """What is not as the report says about one tensor."""
    name = row["name"]
    if name not in model.tensors:
        return [f"tensor {name!r} is missing"]
    tensor = model.tensors[name]
    if tensor.type.name != row["type"] or list(tensor.shape) != row["shape"] or tensor.nbytes != row["bytes"]:
        return [f"tensor {name!r} is {tensor.type.name} {list(tensor.shape)}, the report says {row['type']} "
                f"{row['shape']}"]
    data = tensor.raw()
    if _sha(data) != row["sha256"]:
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
    found = {name.removeprefix(container.PREFIX): _sha(tensor.raw()) for name, tensor in stored.items()
             if name.startswith(container.PREFIX) and name not in (container.CONFIG, container.REPORT)}
    expected = report.get("files", {})
    wrong = [f"the file {name!r} in it is another one" for name in sorted(found.keys() | expected.keys())
             if found.get(name) != expected.get(name)]
    hashes = {"config": _sha(stored[container.CONFIG].raw()), "metadata": _text_sha(metadata[container.KEY])}
    return wrong + [f"its {what} is another one" for what, found in hashes.items() if found != report.get(what)]


def _other_source(report: Mapping[str, Any], source: Checkpoint) -> list[str]:
    found = source_facts(source)
    same = [f["sha256"] for f in found["files"]] == [f["sha256"] for f in report.get("source", {}).get("files", [])]
    return [] if same else [f"{source.path} has other hashes than its source had"]


def totals(rows: list[Row]) -> dict[str, Any]:
    return _totals_of([row.facts for row in rows])


def _totals_of(tensors: list[Mapping[str, Any]]) -> dict[str, Any]:
    """bytes of all tensors; weights and bits_per_weight of the quantised matrices, those that stayed so included."""
    quantised = [row for row in tensors if row["modules"] and tensor_type(row["type"]).block > 1]
    weights = sum(int(np.prod(row["shape"])) for row in quantised)
    bits = 8 * sum(row["bytes"] for row in quantised) / max(weights, 1)
    return {"bytes": sum(row["bytes"] for row in tensors), "weights": weights, "bits_per_weight": round(bits, 6)}


def source_facts(source: Checkpoint) -> dict[str, Any]:
    """Names, sizes and hashes of the weight files."""
    paths = [Path(path) for path in source.files.get("weights", [])]
    return {"files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": _file_sha(path)} for path in paths]}


def _file_sha(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_bytes(path: Path) -> np.ndarray:
    try:
        return np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None


def _sha(data: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).hexdigest()


def _text_sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _report_sha(report: Mapping[str, Any]) -> str:
    """The hash of a report that has no hash of itself yet."""
    return _text_sha(json.dumps({**report, "sha256": _NO_HASH}))


def check_target(target: Path, source: Checkpoint, replace: bool) -> None:
    if any(target.exists() and target.samefile(path) for path in source.files.get("weights", [])):
        raise RequestError(f"{target}: the target is the source itself")
    if target.exists() and not target.is_file():  # --force would put a file in the place of a device
        raise RequestError(f"{target} is there already, and is no file")
    if target.exists() and not replace:
        raise RequestError(f"{target} is there already; --force writes over a file")
    if not target.parent.is_dir():
        raise RequestError(f"{target}: no folder {target.parent}")
