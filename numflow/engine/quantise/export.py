"""Export of a model as a GGUF file, for other programs (`numflow quantize SRC DST.gguf`)."""

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np

import numflow
from numflow import network
from numflow.engine.quantise.quantize import Own, Row, check_target, step_of
from numflow.engine.quantise.report import source_facts, totals_of
from numflow.engine.tasks.embedding_recipe import read_recipe as read_embedding
from numflow.errors import RequestError, TokenizerError
from numflow.formats import gguf_writer
from numflow.formats.checkpoint import Checkpoint, Tensor
from numflow.formats.types import GGML_NUMBERS, TYPES
from numflow.formats.writer import TensorEntry
from numflow.network.gguf.as_gguf import as_gguf
from numflow.network.gguf.mixes import by_tensor
from numflow.network.quantise.calibration import Calibration
from numflow.network.quantise.quantise import (
    check_calibration,
    matrices,
    plan_of,
    renamed,
    uncalibrated,
    wants_calibration,
)
from numflow.network.quantise.transposed import transposed
from numflow.quant.recipe import Recipe
from numflow.spec.reader import Spec

_POOLINGS = ("none", "mean", "cls", "last")  # index: GGUF's number of the pooling


def export_gguf(source: Checkpoint, target: Path, recipe: Recipe, spec: str | Path | None = None,
                written: Callable[[int, int], None] = lambda done, total: None, replace: bool = False,
                calibration: Calibration | None = None, threads: int | None = None,
                own: Own | None = None) -> dict[str, Any]:
    """Write `source` to the GGUF file `target` with its matrices in GGUF types.

    Metadata of a GGUF source, including the tokenizer, is copied unchanged; for other sources it is created from the
    spec and the tokenizer files. The report is returned; a GGUF file cannot contain it.

    recipe: GGUF types (`gguf_writer.WRITTEN`), and a type or a mix (`gguf_mixes.MIXES`) for all other matrices.
    written, replace, own: as for `quantize`. calibration: by tensor names of the source, or of GGUF.

    Raises:
        RequestError: GGUF cannot express a part of the model; and as `quantize`.
        TokenizerError: GGUF cannot express a part of the tokenizer.
        FormatError, SpecError, NetworkError: as `quantize`.
    """
    check_target(Path(target), source, replace)
    chosen = network.choose_spec(source, spec)
    seen, pairs, alignment = as_gguf_file(source, chosen)
    read = chosen if source.naming == "gguf" else network.choose_spec(seen)
    built = network.with_further(read, seen, network.build(read, seen, fuse=False))
    plan = plan_of(built, seen, by_tensor(recipe, built, seen, chosen, calibration is not None))
    if not plan.schemes:
        raise RequestError(f"{source.path}: recipe {recipe.name!r} quantises nothing. {plan.says()}".rstrip())
    if calibration is None and own is not None and wants_calibration(plan):
        calibration = own()
    if calibration is not None:
        turned = transposed(source, chosen)
        calibration = renamed(calibration, matrices(network.build(chosen, turned, fuse=False)), plan, seen)
        check_calibration(calibration, plan, seen)
    used = {part.tensor for weight in built.weights.values() for part in weight.parts}
    rows = [Row(tensor, plan, calibration, threads, tensor.name in used) for tensor in seen.tensors.values()]
    entries = [TensorEntry(row.tensor.name, row.kind, row.tensor.shape, row.nbytes, row.read) for row in rows]
    gguf_writer.write(Path(target), pairs, alignment, entries, step_of(written, sum(row.nbytes for row in rows)))
    return {"numflow": numflow.__version__, "recipe": recipe.as_dict(), "source": source_facts(source),
            "calibration": dict(calibration.facts) if calibration else None, **totals_of([row.facts for row in rows]),
            "kept": dict(plan.kept), "idle": list(plan.idle), "uncalibrated": uncalibrated(calibration, plan),
            "tensors": [row.facts for row in rows]}


def as_gguf_file(source: Checkpoint, spec: Spec) -> tuple[Checkpoint, dict[str, bytes], int]:
    """The source with GGUF names and layout, its metadata as bytes, and the alignment of its tensors."""
    if source.format == "gguf":
        return source, *gguf_writer.copied_pairs(source.files["weights"][0])
    if source.naming == "gguf":  # a numflow file made from a GGUF file
        tensors = {name: _of_known_type(tensor) for name, tensor in source.tensors.items()}
        return changed(source, tensors=tensors), *gguf_writer.made_pairs(source.config)
    seen = as_gguf(source, spec)
    tokenizer = _tokenizer(source, spec, seen)
    lowers = tokenizer.get("tokenizer.ggml.normalizer.lowercase", False)
    metadata = dict(seen.config) | _name(source, spec) | tokenizer | _pooling(source, spec, seen, lowers)
    return changed(seen, config=metadata), *gguf_writer.made_pairs(metadata)


def _of_known_type(tensor: Tensor) -> Tensor:
    """The tensor, converted to float32 if GGUF lacks its type."""
    if tensor.type.name in GGML_NUMBERS:
        return tensor

    def read() -> np.ndarray:
        return np.ascontiguousarray(tensor.f32().reshape(tensor.rows, tensor.columns)).view(np.uint8)

    return Tensor(tensor.name, tensor.shape, TYPES["F32"], read)


def _name(source: Checkpoint, spec: Spec) -> dict[str, Any]:
    found = {"general.type": "model", "general.name": Path(source.path).stem or spec.name}
    return found | {f"general.{key}": value for key in ("license",) if (value := spec.section("model").get(key))}


def _pooling(source: Checkpoint, spec: Spec, seen: Checkpoint, lowers: bool) -> dict[str, Any]:
    """Metadata on the pooling of hidden states, for encoders. lowers: the tokenizer lower-cases texts."""
    if spec.type != "encoder":
        return {}
    recipe = read_embedding(source.files, network.resolve(spec, source)[0].option("generation", "pooling"))
    modes = recipe.pooling
    if len(modes) > 1 or any(mode not in _POOLINGS for mode in modes) or set(recipe.layers) - {"normalize"}:
        how = " and ".join(modes) + (" and a matrix after it" if set(recipe.layers) - {"normalize"} else "")
        raise RequestError(f"{source.path}: embeddings are made by {how}, which a GGUF file cannot express; a target "
                           f"that ends in .safetensors stores the whole model")
    if recipe.lower and not lowers:
        raise RequestError(f"{source.path}: texts are lower-cased before they are embedded, which a GGUF file cannot "
                           f"express; a target that ends in .safetensors stores the whole model")
    types = seen.tensors.get("token_types.weight")
    return {f"{seen.config['general.architecture']}.pooling_type": _POOLINGS.index(modes[0]) if modes else 0,
            "tokenizer.ggml.token_type_count": types.rows if types else 1}


def _tokenizer(source: Checkpoint, spec: Spec, seen: Checkpoint) -> dict[str, Any]:
    """tokenizer.ggml.*: without a tokenizer other programs cannot load the file."""
    from numflow.tokenizer import load_tokenizer
    from numflow.tokenizer.gguf_table import metadata_of

    options = spec.section("tokenizer")
    try:
        tokenizer = load_tokenizer(source, options)
    except TokenizerError as error:
        raise TokenizerError(f"{error}; a GGUF file needs one") from None
    also = []
    if "tokenizer.model" in source.files and not {"kind", "file"} & options.keys():
        also = [load_tokenizer(source, {**options, "kind": "sentencepiece"})]
    rows = seen.config[f"{seen.config['general.architecture']}.vocab_size"]
    return metadata_of(tokenizer, rows, str(source.path), options.get("pre", ""), also)
