"""Walk of a token: from text to ids, through every step of the network, to the most probable next tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from numflow.decoding.select import largest
from numflow.errors import RequestError, TokenizerError
from numflow.executor.contract import WALK, TraceRow
from numflow.ops import Network, View

BEST = 5  # number of tokens listed


@dataclass(frozen=True)
class Values:
    """Minimum, maximum and root mean square of a step's result. finite: whether all values are finite."""

    least: float
    most: float
    rms: float
    finite: bool


@dataclass(frozen=True)
class Guess:
    """Candidate for the next token: id, text, probability."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class Walk:
    """One decoding step.

    text:      the prompt as it was run, including the chat template.
    template:  whether a chat template was applied.
    ids:       (id, its text) of every token of the prompt; the walk runs the last one.
    rows:      one row for each step, with times as in `Model.trace`.
    values:    values by index of the step; steps whose result is not stored in memory have none.
    best:      the most probable next tokens.
    lens:      logit lens: the most probable tokens of the head applied to the residual stream after each layer.
    stream:    the residual stream after each layer, float32 [layers, D].
    """

    text: str
    template: bool
    ids: list[tuple[int, str]]
    rows: list[TraceRow]
    values: Mapping[int, Values] = field(default_factory=dict)
    best: list[Guess] = field(default_factory=list)
    lens: list[list[Guess]] = field(default_factory=list)
    stream: np.ndarray | None = None


def trace(model, prompt: str | Sequence[int] | Sequence[Mapping] = (), chat: bool = False,
          repeat: int = 5) -> list[TraceRow]:
    """See Model.trace."""
    request = model.request(prompt, {"max_tokens": 1, "chat": chat})
    with _before_last(model, request) as sequence:
        return _timed(model, sequence, request, repeat)


def walk(model, prompt: str | Sequence[int] | Sequence[Mapping], chat: bool = False, lens: bool = False,
         repeat: int = 5) -> Walk:
    """See Model.walk."""
    request = model.request(prompt, {"max_tokens": 1, "chat": chat})
    last = request.prefix[-1:]
    with _before_last(model, request) as sequence:
        rows = _timed(model, sequence, request, repeat)
        found: dict[str, Any] = {}
        if WALK in model.program.can:
            results = dict(model.runner.walk(sequence, last))
            found["values"] = {index: _values(outputs) for index, outputs in results.items() if outputs}
            found["best"] = _best(model, results[len(rows) - 1][0])
            ends = _layers(model.network)
            if ends is not None:
                view, layers, head = ends
                streams = [results[end][0] for end in layers]
                found["stream"] = np.concatenate(streams)
                if lens:
                    found["lens"] = [_best(model, dict(model.runner.walk(sequence, last, head, (view, stream)))[
                        len(rows) - 1][0]) for stream in streams]
            elif lens:
                raise RequestError(f"{model.network.name} has no residual stream that its head could read")
        elif lens:
            raise RequestError("this backend shows no values: use backend cpu or reference, on one device")
    ids = [int(id) for id in request.prefix]
    return Walk(_text(model, ids), _templated(model, prompt, chat), [(id, _text(model, [id])) for id in ids], rows,
                **found)


def _text(model, ids: list[int]) -> str:
    """Text of ids; "" without a tokenizer."""
    try:
        return model.tokenizer.decode(ids, skip_special=False)
    except TokenizerError:
        return ""


def _templated(model, prompt, chat: bool) -> bool:
    return bool(chat and model.has_template and not (prompt and isinstance(prompt[0], int)))


def _before_last(model, request):
    """Sequence that has run all tokens of a prompt but the last."""
    sequence = model.runner.open(len(request.prefix), request.prompt if request.encoder else None, request.max_length)
    if len(request.prefix) > 1:
        sequence.last(request.prefix[:-1])
    return sequence


def _timed(model, sequence, request, repeat: int) -> list[TraceRow]:
    """Rows of the last token's step, median of `repeat` runs. The first run is a warm-up and does not count."""
    runs = [model.runner.trace(sequence, request.prefix[-1:]) for _ in range(repeat + 1)][1:]
    return [replace(rows[0], microseconds=float(np.median([row.microseconds for row in rows])))
            for rows in zip(*runs, strict=True)]


def _values(outputs: list[np.ndarray]) -> Values:
    x = np.concatenate([y.ravel() for y in outputs]).astype(np.float64)
    return Values(float(x.min()), float(x.max()), float(np.sqrt(np.mean(x * x))), bool(np.isfinite(x).all()))


def _best(model, logits: np.ndarray) -> list[Guess]:
    """Most probable tokens of logits [1, V], best first."""
    x = logits[0].astype(np.float64)
    p = np.exp(x - x.max())
    p /= p.sum()
    ids = largest(x, np.arange(len(x)), min(BEST, len(x)))
    return [Guess(int(id), _text(model, [int(id)]), float(p[id]))
            for id in ids[np.argsort(-x[ids], kind="stable")]]


def _layers(network: Network) -> tuple[View, list[int], int] | None:
    """View of the residual stream after the layers, index of the last step of each layer, index of the first step
    after.

    None if a layer does not end with a view of the width that the first step after the layers reads.
    """
    steps = network.entries["main"]
    found: dict[str, tuple[int, int]] = {}
    for index, step in enumerate(steps):
        if ".blk." in f".{step.label}":
            layer = step.label.split("blk.", 1)[1].split(".")[0]
            first, _ = found.get(layer, (index, index))
            found[layer] = first, index
    layers = list(found.values())
    head = layers[-1][1] + 1 if layers else 0
    if not 0 < head < len(steps) or len(steps[head].inputs) != 1 or steps[-1].outputs[0] != network.outputs["logits"]:
        return None
    view = steps[head].inputs[0]
    written = all([out.width for out in steps[last].outputs] == [view.width] for _, last in layers)
    return (view, [last for _, last in layers], head) if written else None
