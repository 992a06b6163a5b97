"""Quantised model files (`numflow quantize`).

A file is written tensor by tensor, so that at most one tensor is in memory, and appears only when complete. The file
contains its report: recipe, hashes of the source, type, size, error and hash of each tensor, hashes of everything else
in the file, and a hash of the report itself. So every change of the file can be detected.
"""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import numflow
from numflow import network
from numflow.engine.quantise.report import (
    NO_HASH,
    check_finite,
    errors,
    file_bytes,
    report_sha,
    sha,
    source_facts,
    text_sha,
    totals_of,
)
from numflow.errors import RequestError
from numflow.formats import container
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.mapped import release_memory
from numflow.formats.writer import TensorEntry, check_place, found, write
from numflow.network.gguf.mixes import by_tensor
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.quantise import (
    QuantisePlan,
    check_calibration,
    encoded,
    plan_of,
    renamed,
    uncalibrated,
    wants_calibration,
)
from numflow.network.quantise.transposed import transposed
from numflow.quant.recipe import Recipe
from numflow.spec import Spec
from numflow.tokenizer.load import named_file

_SLACK = 64  # extra bytes of a tensor's values in the report, compared to zeros
Written = Callable[[int, int], None]
Own = Callable[[], Calibration | None]


def quantize(source: Checkpoint, target: Path, recipe: Recipe, calibration: Calibration | None = None,
             spec: str | Path | None = None, threads: int | None = None, written: Written = lambda done, total: None,
             replace: bool = False, own: Own | None = None) -> dict[str, Any]:
    """Write `source` to the file `target` with its matrices quantised; returns the report in the file.

    written: called with (bytes so far, total bytes). replace: overwrite an existing file.
    own: function that makes a calibration if none is given and the recipe benefits from one; may return None.

    Raises:
        RequestError: the target exists, is the source, or cannot be written; weights that a scheme cannot represent.
        FormatError: NaN or infinite weights, or a damaged source.
        SpecError, NetworkError: the source is no model that numflow knows.
    """
    target = Path(target)
    check_target(target, source, replace)
    if threads is not None and threads < 1:
        raise RequestError(f"threads should be a whole number from 1, is {threads}")
    chosen = network.choose_spec(source, spec)
    original, source = source, transposed(source, chosen)
    built = network.build(chosen, source, fuse=False)
    plan = plan_of(built, source, by_tensor(recipe, built, original, chosen, calibration is not None))
    if not plan.schemes:
        raise RequestError(f"{source.path}: recipe {recipe.name!r} quantises nothing. {plan.says()}".rstrip())
    if calibration is None and own is not None and wants_calibration(plan):
        calibration = own()
    if calibration is not None:
        calibration = renamed(calibration, plan.modules, plan, source)
        check_calibration(calibration, plan, source)
    used = {part.tensor for weight in built.weights.values() for part in weight.parts}
    rows = [Row(tensor, plan, calibration, threads, tensor.name in used) for tensor in source.tensors.values()]
    specs = [container.Attached(path, f"spec/{path.name}", "" if i else "spec") for i, path in enumerate(chosen.chain)]
    files = [*container.attached(source.files), *specs, *_tokenizer(source, chosen)]
    attached = {file.name: file_bytes(file.path) for file in files}
    config = container.json_entry(container.CONFIG, dict(source.config))
    metadata = container.metadata_of(source.naming, {row.tensor.name: (row.kind, row.tensor.shape) for row in rows},
                                     files, [row.tensor.name for row in rows if row.tensor.turned])
    report = {"numflow": numflow.__version__, "recipe": recipe.as_dict(), "source": source_facts(source),
              "calibration": dict(calibration.facts) if calibration else None, **totals_of([row.facts for row in rows]),
              "kept": dict(plan.kept), "idle": list(plan.idle), "uncalibrated": uncalibrated(calibration, plan),
              "files": {name: sha(data) for name, data in attached.items()}, "config": sha(config.read()),
              "metadata": text_sha(metadata[container.KEY]), "tensors": [row.facts for row in rows],
              "sha256": NO_HASH}
    size = len(json.dumps(report)) + _SLACK * len(rows)

    def finished_report() -> np.ndarray:
        report["sha256"] = report_sha(report)
        text = json.dumps(report).encode()
        return np.frombuffer(text + b" " * (size - len(text)), np.uint8)

    entries = [container.entry_of(row.tensor, row.kind, row.read) for row in rows]
    entries += [TensorEntry.of(container.PREFIX + name, data) for name, data in attached.items()]
    entries += [config, TensorEntry(container.REPORT, "U8", (size,), size, finished_report)]
    write(target, entries, metadata, step_of(written, sum(entry.nbytes for entry in entries)))
    return report


def _tokenizer(source: Checkpoint, chosen: Spec) -> list[container.Attached]:
    """The tokenizer file named by the specification, if no role has it."""
    name = chosen.section("tokenizer").get("file", "")
    path = named_file(source, name) if name else None
    known = {Path(file) for role, file in source.files.items() if role != "weights"}
    return [container.Attached(path, name, container.ROLE_OF_NONE)] if path and path not in known else []


def step_of(written: Written, total: int) -> Callable[[int], None]:
    """Callback after each tensor: releases mapped pages, and calls `written`."""
    def step(done: int) -> None:
        release_memory()
        written(done, total)

    return step


class Row:
    """One tensor of the target: `read` returns its bytes, and completes its row of the report."""

    def __init__(self, tensor: Tensor, plan: QuantisePlan, calibration: Calibration | None, threads: int | None,
                 used: bool):
        """used: whether the network uses the tensor; its values must then be finite."""
        self.tensor, self._calibration, self._threads, self._used = tensor, calibration, threads, used
        self.scheme = plan.schemes.get(tensor.name)
        self.kind = self.scheme or tensor.type.name
        self.nbytes = container.entry_of(tensor, self.kind, self.read).nbytes
        self.facts: dict[str, Any] = {
            "name": tensor.name, "modules": list(plan.modules.get(tensor.name, ())), "type": self.kind,
            "from": tensor.type.name, "shape": list(tensor.shape), "bytes": self.nbytes, "sha256": NO_HASH}
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
        self.facts["sha256"] = sha(data)
        return data

    def _importance(self) -> np.ndarray | None:
        return None if self._calibration is None else self._calibration.importance(self.tensor.name)


def check_target(target: Path, source: Checkpoint, replace: bool) -> None:
    """Refuse a target that is a file of the source, or cannot be written.

    Raises:
        RequestError: the message names the reason.
    """
    ours = [*source.files.get("weights", []), *(path for role, path in source.files.items() if role != "weights")]
    there = found(target)
    if there and any(target.samefile(path) for path in ours):
        raise RequestError(f"{target}: the target is the source itself")
    if there and not stat.S_ISREG(there.st_mode):  # --force would replace a device by a file
        raise RequestError(f"{target} is there already, and is no file")
    if there and not replace:
        raise RequestError(f"{target} is there already; --force writes over a file")
    check_place(target)
