"""Calibration without a given text: on text that the model generates (`weights="q3h"` without `imatrix`).

A decoder continues openings of many kinds, and random single tokens, at several temperatures: probable texts cover the
common inputs, improbable ones the rare inputs. The calibration is the statistics of the inputs of its matrices while it
reads these texts. It is cached on disk for quantisation to other schemes.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from numflow import network, trust
from numflow.engine.calibration.collector import WIDEST, over_windows
from numflow.engine.request.facts import ModelFacts
from numflow.errors import FormatError, NumflowError, TokenizerError
from numflow.formats import kept
from numflow.formats.checkpoint import Checkpoint
from numflow.machine import free_memory
from numflow.network.quantise.calibration import Calibration, read_calibration
from numflow.network.quantise.kept import folder
from numflow.ops import Network
from numflow.registry.progress import Silent
from numflow.spec.reader import Spec

METHOD = "text of the model's own, 1"  # a new version number invalidates cached calibrations
TEMPERATURES = (0.7, 1.0, 1.3)
LENGTH, TOGETHER = 256, 32      # tokens of a text; texts generated in one batch
MOST, LEAST = 16384, 2048       # total tokens: maximum, and minimum for large models
FOR_COLUMN = 16                 # tokens per column of the widest matrix, an upper limit too
FOR_MOMENTS = 4                 # tokens per column needed for second moments; with fewer, moments are noise
_WORK = 4e13                    # maximum weights times tokens
_SEED = 7
OPENINGS = (
    "The history of the city begins", "In mathematics, a", "Once upon a time there was", "The river flows from",
    "def read_file(path):", "Dear customer,", "She opened the door and", "The war ended in", "= Early life =",
    "How do plants make their food?", "The album was released in", "A recipe for bread:", "La ville de",
    "Die Entdeckung der", "The species is found in", "The results of the study show that", "According to the minister,",
    "import numpy as np", "He scored two goals in", "The film was directed by", "El presidente", "Chapter 1",
    "The temperature of the water", "Question: What is the capital of", "During the nineteenth century,",
    "The church was built in", "The Supreme Court held that", "My favourite place is", "The storm moved north and",
    "The game takes place in", "The company announced", "There are three ways to")
Opens = Callable[..., Any]  # engine.load.model_of


def obstacle(built: Network) -> str:
    """Reason why a model cannot be calibrated on text that it generates, "" if it can."""
    if not ModelFacts.of(built).decoder or "logits" not in built.outputs:
        return "it writes no text by itself"
    largest, free = max((4 * _size(weight) for weight in built.weights.values()), default=0), free_memory()
    if free is not None and 2 * largest > free:
        return "there is no memory for its largest matrix in float32"
    return ""


def calibration_or_why(model_of: Opens, checkpoint: Checkpoint, spec: Spec,
                       **options) -> tuple[Calibration | None, str]:
    """`own_calibration` of a model, or None and why there is none."""
    if why := obstacle(network.build(spec, checkpoint, fuse=False)):
        return None, why
    try:
        return own_calibration(model_of, checkpoint, spec, **options), ""
    except NumflowError as error:  # quantisation reports errors of the weights later
        return None, f"running it fails: {error}"


def own_calibration(model_of: Opens, checkpoint: Checkpoint, spec: Spec, backend: str = "cpu", moments: bool = True,
                    threads: int | None = None, reporter: Silent | None = None, keep: bool = True) -> Calibration:
    """Calibration of a model on text that it generates, or the cached one of an earlier start.

    model_of: makes a Model of the checkpoint. backend: backend that generates: "reference", or else the CPU.
    moments: whether to collect second moments, if the memory suffices.
    keep: whether to cache the calibration on disk; the checkpoint's tensors must then be unchanged.

    Raises:
        NumflowError: any error of running the model.
    """
    reporter, built, free = reporter or Silent(), network.build(spec, checkpoint, fuse=False), free_memory()
    tokens = tokens_for(built)
    moments = moments and (free is None or _moment_bytes(built) <= free // 4)
    path = _path(checkpoint, moments) if keep else None
    if path is not None and trust.readable(path):
        with contextlib.suppress(FormatError):
            return read_calibration(path)
    with model_of(checkpoint, spec, backend if backend == "reference" else "cpu", threads) as model:
        windows = generated_texts(model, tokens, reporter)
    with model_of(checkpoint, spec, "reference", threads) as model:
        model.program.keeps_weights = free is None or 2 * model.program.weights_bytes <= free
        reporter.stage("calibrating on them", 0)
        seen = over_windows(model, windows, min(WIDEST, tokens // FOR_MOMENTS) if moments else 0,
                            lambda done, total: reporter.part(done, total, "text"))
    shown = ", ".join(f"{temperature:g}" for temperature in TEMPERATURES)
    found = replace(seen, facts={**seen.facts, "text": f"written by the model at temperatures {shown}"})
    if path is not None:
        _write_cache(found, path)
    return found


def tokens_for(built: Network) -> int:
    """Number of tokens that a model generates and reads: FOR_COLUMN per column of its widest matrix, fewer for large
    models."""
    weights = sum(map(_size, built.weights.values()))
    widest = max((step.inputs[0].width for steps in built.entries.values() for step in steps if step.op == "linear"),
                 default=0)
    return int(min(MOST, FOR_COLUMN * widest, max(LEAST, _WORK / max(weights, 1))))


def generated_texts(model: Any, tokens: int, reporter: Silent) -> list[list[int]]:
    """Generate texts as ids, including their prompts: LENGTH tokens each, or fewer if the model ends a text."""
    length = min(LENGTH, model.context)
    count = max(len(TEMPERATURES), tokens // length)
    reporter.stage(f"writing {count} texts to calibrate on", 0)
    prompts = _prompts(model, count, length - 1)
    found: list[list[int]] = []
    for step, temperature in enumerate(TEMPERATURES):
        group = prompts[step::len(TEMPERATURES)]
        for first in range(0, len(group), TOGETHER):
            batch = group[first:first + TOGETHER]
            texts = model.generate_batch(batch, max_tokens=length, temperature=temperature, seed=first)
            found += [[*prompt, *text.ids][:length] for prompt, text in zip(batch, texts, strict=True)]
            reporter.part(len(found), count, "text")
    return [ids for ids in found if len(ids) > 1]


def _prompts(model: Any, count: int, longest: int) -> list[list[int]]:
    """Prompts as ids: alternately one of OPENINGS, and the start token with a random token."""
    try:
        tokenizer = model.tokenizer
    except TokenizerError:
        tokenizer = None
    start = [tokenizer.bos_id] if tokenizer is not None and tokenizer.add_bos else []
    found = [[*start, int(id)] for id in np.random.default_rng(_SEED).integers(model.vocabulary, size=count)]
    if tokenizer is not None:
        for index in range(0, count, 2):
            found[index] = tokenizer.encode(OPENINGS[index // 2 % len(OPENINGS)], parse_special=False)
    return [ids[:longest] for ids in found]


def _size(weight) -> int:
    return int(np.prod(weight.shape))


def _moment_bytes(built: Network) -> int:
    """Bytes of the second moments of all distinct inputs."""
    total, last = 0, None
    for steps in built.entries.values():
        for step in (step for step in steps if step.op == "linear"):
            view = step.inputs[0]
            total += 4 * view.width ** 2 if view != last and view.width <= WIDEST else 0
            last = view
    return total


def _path(checkpoint: Checkpoint, moments: bool) -> Path | None:
    """Cache file of the calibration of a model, next to its quantised tensors; None without a cache."""
    if not kept.is_on() or not trust.usable(folder(), "quantised weights"):
        return None
    try:
        state = kept.state_of(checkpoint.files.get("weights", [checkpoint.path]))
    except OSError:  # a checkpoint without files
        return None
    return folder() / kept.file_name(checkpoint.path, state, (METHOD, str(moments)))


def _write_cache(calibration: Calibration, path: Path) -> None:
    """Write a calibration to the cache, if there is room."""
    arrays = (*calibration.importances.values(), *calibration.moments.values())
    with contextlib.suppress(OSError, NumflowError):  # the cache is optional
        if kept.make_room(path, sum(array.nbytes for array in arrays)):
            calibration.write(path)
