"""Checks of a batch for all executors: no id or position may address memory out of bounds."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np

from numflow.errors import RequestError
from numflow.network.steps.builder import KEPT
from numflow.network.windows import STATE, cache_windows, table_name
from numflow.ops import Batch, Network, Step, View, caches_of, param, states_of

FEW = 32  # up to so many values, Python's min and max are faster than NumPy's


class BatchBounds:
    """Exclusive upper bounds of a batch's ids and positions, from the look-ups in one entry's steps."""

    def __init__(self, network: Network, steps: tuple[Step, ...]):
        self.tokens, self.types, self.positions = (_least(network, steps, op) for op in
                                                   ("embed", "embed_type", "embed_position"))
        kinds = {network.caches[name].kind for step in steps for name in caches_of(step).values()}
        self.has_cross, window_of = "cross" in kinds, cache_windows(network)
        self.windows = sorted({window_of[name] for step in steps for name in caches_of(step).values()
                               if name in window_of})
        self.states = any(states_of(step) for step in steps)
        self.given = {name: view for name, view in network.inputs.items()
                      if any(view.overlaps(x) for step in steps for x in step.inputs)}
        self.dropped: tuple[int, float] = network.facts.get("dropped", (-1, 1.0))
        self.writes_cross = any(step.op == "cache_write" and network.caches[param(step, "cache")].kind == "cross"
                                for step in steps)


def _least(network: Network, steps: tuple[Step, ...], op: str) -> int | None:
    """Rows of the smallest table that ops of this name read; None without such ops."""
    return min((_rows(network, step) for step in steps if step.op == op), default=None)


def _rows(network: Network, step: Step) -> int:
    """Exclusive upper bound of a look-up's indices, independent of how devices share the table."""
    if step.op == "embed" and param(step, "vocabulary"):
        return param(step, "vocabulary")
    return network.weights[step.weights["table"]].shape[0] - step.params.get("offset", 0)


def checked(batch: Batch, limits: BatchBounds, block_size: int, blocks: Mapping[int, int],
            cross_blocks: int, adapters: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a batch by name, int32, checked: those of Batch and these.

    sequence_of [T]: the sequence of each row. lengths [B]: keys of each sequence after the batch is written, also the
    default of `limits`. adapters [T] and wanted_adapters [R]: adapter of each row, -1 for none. Block tables have the
    names of `windows.table_name`.

    blocks: number of KV blocks by window, and of slots by STATE. adapters: number of adapters.

    Raises:
        RequestError: arrays of the batch disagree, or an id or a position is out of range.
    """
    tokens, positions, starts, rows = (_i32(a) for a in (batch.tokens, batch.positions, batch.starts, batch.logit_rows))
    types = np.zeros(tokens.size, np.int32) if batch.types is None else _i32(batch.types)
    if not tokens.size:
        raise RequestError("a batch without tokens")
    if positions.size != tokens.size or types.size != tokens.size:
        raise RequestError(f"a batch of {tokens.size} tokens has {positions.size} positions and {types.size} types")
    decoding = starts.size == tokens.size + 1 and starts.tolist() == [*range(starts.size)]
    counts, sequence_of = (starts[1:] - starts[:-1], starts[:-1]) if decoding else _sequences(starts, tokens.size)
    _check_range("token id", tokens, limits.tokens)
    _check_range("position", positions, limits.positions or 1 << 31)
    _check_range("logit row", rows, tokens.size)
    if batch.types is not None:
        _check_range("token type", types, limits.types)
    lengths = positions + np.int32(1) if decoding else _lengths(positions, starts, counts)
    tables = {"blocks": _table(batch.blocks, counts.size)}
    sequence_limits = lengths if batch.limits is None else _of_sequences("limits", batch.limits, counts.size)
    cross_table, cross_lengths = _table(batch.cross_blocks, counts.size), np.zeros(counts.size, np.int32)
    for window in limits.windows:
        blocks_of = batch.blocks if batch.windows is None else batch.windows.get(window, batch.blocks)
        table = tables[table_name(window)] = _table(blocks_of, counts.size)
        first = np.where(counts > 0, np.maximum(lengths - counts - window + 1, 0), 0) if window else None
        _check_blocks("KV block", table, lengths, block_size, blocks[window], first)
    slots = _slots(batch.slots, counts, blocks[STATE]) if limits.states else np.zeros(0, np.int32)
    if limits.has_cross:
        cross_lengths = lengths if limits.writes_cross else _of_sequences("cross_lengths", batch.cross_lengths,
                                                                                 counts.size)
        _check_blocks("encoder block", cross_table, cross_lengths, block_size, cross_blocks)
    adapter_of = ~np.zeros(tokens.size, np.int32)
    if batch.adapters is not None:
        adapter_of = _of_sequences("adapters", batch.adapters, counts.size)[sequence_of]
        _check_range("adapter", adapter_of + 1, adapters + 1)
        if batch.adapter_starts is not None:
            first = _of_sequences("adapter_starts", batch.adapter_starts, counts.size)[sequence_of]
            adapter_of = np.where(positions < first, np.int32(-1), adapter_of)
    return {"adapters": adapter_of, "wanted_adapters": adapter_of[rows], "tokens": tokens,
            "positions": positions, "types": types, "sequence_of": sequence_of, "logit_rows": rows,
            "starts": starts, "lengths": lengths, "cross_blocks": cross_table, "cross_lengths": cross_lengths,
            "limits": sequence_limits, "slots": slots, **tables}


class LastBatch:
    """The last checked batch. After Batch.go_on its arrays are the same, and only changed values are checked and
    copied."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._key: object = None
        self._gone_on = 0
        self._arrays: dict[str, np.ndarray] = {}

    def forget(self) -> None:
        """Check the next batch completely, because the bounds have changed."""
        self._batch = None

    def arrays(self, batch: Batch, key: object, limits: BatchBounds, block_size: int,
               check: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The checked arrays of a batch: those of the last call, updated, after Batch.go_on; else the result of
        `check`.

        key: identifies the bounds. The batch is checked completely when a token begins a new KV block.
        """
        if batch is self._batch and key == self._key and batch.gone_on == self._gone_on + 1 and \
                all(position % block_size for position in batch.positions.tolist()):
            self._gone_on, arrays = batch.gone_on, self._arrays
            _check_range("token id", batch.tokens, limits.tokens)
            _check_range("position", batch.positions, limits.positions or 1 << 31)
            arrays["tokens"][:], arrays["positions"][:] = batch.tokens, batch.positions
            np.add(batch.positions, 1, out=arrays["lengths"])
            return arrays
        self._batch, self._arrays = None, check()
        if not (batch.limits is None or batch.given or limits.has_cross or _adapters_will_start(batch)) and \
                batch.starts.tolist() == [*range(len(batch.tokens) + 1)]:
            self._batch, self._key, self._gone_on = batch, key, batch.gone_on
        return self._arrays

    def check_ahead(self, batch: Batch, steps: int, most: int, limits: BatchBounds, block_size: int) -> None:
        """Refuse to run several decoding steps at once that the last checked batch cannot run.

        Raises:
            RequestError: more than `most` steps, a batch that is not one token per sequence, or a step that would begin
            a KV block or exceed the positions.
        """
        if not 1 <= steps <= most:
            raise RequestError(f"steps at once should be 1 to {most}, are {steps}")
        if batch is not self._batch or len(batch.logit_rows) != len(batch.tokens):
            raise RequestError("several steps at once need a batch with limits, of one token for each sequence, all of "
                               "them output rows, without given hidden states or encoder memory")
        if max(position % block_size for position in batch.positions.tolist()) + steps > block_size:
            raise RequestError(f"{steps} steps of a batch should end within the KV blocks of its first")
        _check_range("position", batch.positions + np.int32(steps - 1), limits.positions or 1 << 31)

    def went_on(self, batch: Batch, steps: int, on_copy: bool = False) -> None:
        """Record that the last checked batch has run `steps` more steps, which advanced its arrays (or a copy:
        on_copy)."""
        if on_copy:
            self._arrays["positions"] += np.int32(steps)
            self._arrays["lengths"] += np.int32(steps)
        batch.positions[:] = self._arrays["positions"]
        batch.gone_on += steps
        self._gone_on = batch.gone_on


def given_rows(batch: Batch, limits: BatchBounds) -> list[tuple[View, np.ndarray]]:
    """The network inputs f32 [T, W] of a batch, with their views.

    Raises:
        RequestError: rows are missing, or of another shape.
    """
    found = []
    for name, view in limits.given.items():
        rows = kept_rows(batch, *limits.dropped) if name == KEPT else (batch.given or {}).get(name)
        if rows is None or rows.shape != (len(batch.tokens), view.width):
            shape = None if rows is None else list(rows.shape)
            raise RequestError(f"{name} of the batch should be [{len(batch.tokens)}, {view.width}], is {shape}")
        found.append((view, rows))
    return found


def _adapters_will_start(batch: Batch) -> bool:
    """Whether the adapter of a sequence has no effect yet, and will have one in a later step."""
    return batch.adapter_starts is not None and bool((np.repeat(
        batch.adapter_starts, np.diff(batch.starts)) > batch.positions).any())


def kept_rows(batch: Batch, token: int, keep: float) -> np.ndarray:
    """Token dropout factors f32 [T, 1]: 0 for `token`, else keep / (1 - fraction of `token` in the sequence)."""
    dropped = np.asarray(batch.tokens) == token
    factors = np.zeros((len(dropped), 1), np.float32)
    for begin, end in pairwise(np.asarray(batch.starts).tolist()):
        others = ~dropped[begin:end]
        if others.any():
            factors[begin:end, 0] = np.where(others, keep / others.mean(), 0)
    return factors


def _sequences(starts: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each sequence i32 [B], and the sequence of each token i32 [T]."""
    counts = starts[1:] - starts[:-1]
    if not starts.size or starts[0] != 0 or starts[-1] != tokens or (counts < 0).any():
        raise RequestError(f"starts of a batch should rise from 0 to {tokens}, are {starts.tolist()[:8]}")
    return counts, np.repeat(np.arange(counts.size, dtype=np.int32), counts)


def _lengths(positions: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Keys of each sequence after the batch is written, i32 [B]. Positions must rise by one within a sequence."""
    if positions.size > counts.size:
        rises = positions[1:] - positions[:-1] == 1
        rises[starts[1:-1][(starts[1:-1] > 0) & (starts[1:-1] < positions.size)] - 1] = True
        if not rises.all():
            raise RequestError("positions of a sequence's tokens should rise by one")
    return np.where(counts > 0, positions[starts[1:] - 1] + 1, 0).astype(np.int32)


def _of_sequences(name: str, lengths: np.ndarray | None, sequences: int) -> np.ndarray:
    if lengths is None or len(lengths) != sequences:
        raise RequestError(f"{name} of the batch should give {sequences} numbers")
    return _i32(lengths)


def _slots(slots: np.ndarray | None, counts: np.ndarray, available: int) -> np.ndarray:
    """State slots i32 [B]; sequences with rows must have distinct slots."""
    table = np.arange(counts.size, dtype=np.int32) if slots is None else _i32(slots)
    if table.size != counts.size:
        raise RequestError(f"slots of the batch should give the state slots of {counts.size} sequences")
    used = table[counts > 0]
    _check_range("state slot", used, available)
    if len(set(used.tolist())) < used.size:
        raise RequestError(f"sequences of a batch should have state slots of their own, have {used.tolist()[:8]}")
    return table


def ends(values: np.ndarray) -> tuple[int, int]:
    """Minimum and maximum of an array."""
    if values.size <= FEW:
        items = values.ravel().tolist()
        return min(items), max(items)
    return int(values.min()), int(values.max())


def _i32(array) -> np.ndarray:
    return np.ascontiguousarray(array, np.int32)


def _table(blocks: np.ndarray | None, sequences: int) -> np.ndarray:
    if blocks is None:
        return np.zeros((sequences, 0), np.int32)
    table = _i32(blocks)
    if table.ndim != 2 or len(table) != sequences:
        raise RequestError(f"the block table of a batch should have {sequences} rows, its shape is {table.shape}")
    return table


def _check_range(what: str, values: np.ndarray, limit: int | None) -> None:
    if limit is None or not values.size:
        return
    least, most = ends(values)
    if least < 0 or most >= limit:
        bad = values[(values < 0) | (values >= limit)][0]
        raise RequestError(f"{what} {bad} is out of range: it should be in 0 .. {limit - 1}")


def _check_blocks(what: str, table: np.ndarray, tokens: np.ndarray, block_size: int, blocks: int,
                  first: np.ndarray | None = None) -> None:
    """Check the block ids of tokens first[b] .. tokens[b] - 1 of each sequence b."""
    longest = ends(tokens)[1]
    most = -(-longest // block_size)
    if most > table.shape[1]:
        raise RequestError(f"{longest} tokens need {most} {what}s, the table has {table.shape[1]}")
    used = table[:, :most]
    if len(used) > 1 or first is not None:
        filled = np.arange(most) < -(-tokens // block_size)[:, None]
        used = used[filled if first is None else filled & (np.arange(most) >= (first // block_size)[:, None])]
    _check_range(what, used, blocks)
