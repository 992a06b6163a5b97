"""Whole texts side by side: ragged batches, where no text notices the others."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from numflow.engine.sequence import ROW_VALUES, Part, Runner

BATCH_ROWS = 512  # tokens of all texts of a batch; a longer text runs alone


class Text(NamedTuple):
    """ids i32 [n]; types i32 [n] token types, None for zeros; encoder_ids i32 [m] where there is an encoder."""

    ids: np.ndarray
    types: np.ndarray | None = None
    encoder_ids: np.ndarray | None = None


def outputs(runner: Runner, texts: Iterable[Text], output: str) -> Iterator[np.ndarray]:
    """`output` at every position of each text, float32 [len(ids), N], in order."""
    limit = max(1, min(BATCH_ROWS, ROW_VALUES // runner.network.outputs[output].width))
    for group in groups(texts, limit):
        with ExitStack() as stack:
            sequences = [stack.enter_context(runner.open(len(text.ids), text.encoder_ids)) for text in group]
            results = _together(runner, sequences, group, output)
        yield from results


def _together(runner, sequences, group, output) -> Sequence[np.ndarray]:
    if len(group) == 1 and output != "encoder_hidden":
        text, = group
        y = np.empty((len(text.ids), runner.network.outputs[output].width), np.float32)
        for start, rows in sequences[0].rows(text.ids, output, text.types):
            y[start:start + len(rows)] = rows
        return [y]
    parts = [Part(sequence, text.ids, np.arange(len(text.ids)), text.types) for sequence, text in zip(sequences, group)]
    y = runner.encode(parts) if output == "encoder_hidden" else runner.run(parts, output)
    return np.split(y, np.cumsum([len(text.ids) for text in group])[:-1])


def groups(texts: Iterable[Text], limit: int) -> Iterator[Sequence[Text]]:
    """Runs of texts that have `limit` tokens at most; a longer text is a group of its own."""
    group: list[Text] = []
    for text in texts:
        if group and sum(len(other.ids) for other in group) + len(text.ids) > limit:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
