"""The batch of a run in device memory, checked on the way so that no id leads outside any memory.

One upload brings it: counts i32 [4] (call.py), then the arrays of `ARRAYS` one after the other, each with room for as
many tokens, rows or sequences as there may be. Kernels of a recorded run find the next batch at the same addresses.
"""

import numpy as np

from numflow.cuda.device import Device, Ref
from numflow.errors import RequestError
from numflow.ops import Batch, Network, Step, param

COUNTS = 16  # i32, of which the first 4 are used
# Array: what it has room for. Tables have a row of `table` block ids for each sequence.
ARRAYS = {"tokens": "tokens", "positions": "tokens", "types": "tokens", "sequence_of": "tokens",
          "logit_rows": "logits", "starts": "starts", "lengths": "sequences", "blocks": "tables",
          "cross_blocks": "tables", "cross_lengths": "sequences"}


class Limits:
    """What ids and positions of a batch must stay below, from the steps of one entry that look them up."""

    def __init__(self, network: Network, steps: tuple[Step, ...]):
        self.tokens, self.types, self.positions = (_least(network, steps, op) for op in
                                                   ("embed", "embed_type", "embed_position"))
        kinds = {network.caches[param(step, "cache")].kind for step in steps if "cache" in step.params}
        self.has_self, self.has_cross = "self" in kinds, "cross" in kinds
        self.writes_cross = any(step.op == "cache_write" and network.caches[param(step, "cache")].kind == "cross"
                                for step in steps)


def _least(network: Network, steps: tuple[Step, ...], op: str) -> int | None:
    """Rows of the smallest table that ops of this name look up; None without such ops."""
    rows = [network.weights[step.weights["table"]].shape[0] - (param(step, "offset") if op == "embed_position" else 0)
            for step in steps if step.op == op]
    return min(rows, default=None)


class BatchMemory:
    """Room for a batch on a device: `capacity` of tokens, logits, sequences, and table (block ids of a sequence)."""

    def __init__(self, device: Device, capacity: dict[str, int]):
        self.device, self.capacity = device, capacity
        room = {**capacity, "starts": capacity["sequences"] + 1,
                "tables": capacity["sequences"] * capacity["table"]}
        self._begin, at = {}, COUNTS
        for name, what in ARRAYS.items():
            self._begin[name] = at
            at += -(-max(room[what], 1) // 4) * 4
        self._host = np.zeros(at, np.int32)
        self._memory = device.alloc(at * 4)
        device.upload(self._memory.at(), self._host)

    @property
    def counts(self) -> Ref:
        """Where kernels find the number of rows of each kind."""
        return self._memory.at()

    def ref(self, name: str) -> Ref:
        """Where an array of ARRAYS begins."""
        return self._memory.at(4 * self._begin[name])

    def host(self, name: str, count: int) -> np.ndarray:
        """The first numbers of an array of the batch, as they were brought."""
        return self._host[self._begin[name]:self._begin[name] + count]

    @property
    def stride(self) -> int:
        """Ids from one row of a block table to the next."""
        return self.capacity["table"]

    def free(self) -> None:
        """Give the memory back."""
        self.device.free(self._memory)

    def fits(self, arrays: dict[str, np.ndarray]) -> bool:
        """Whether there is room for these arrays."""
        have = self.capacity
        return (arrays["tokens"].size <= have["tokens"] and arrays["logit_rows"].size <= have["logits"]
                and arrays["lengths"].size <= have["sequences"]
                and max(arrays["blocks"].shape[1], arrays["cross_blocks"].shape[1]) <= have["table"])

    def load(self, arrays: dict[str, np.ndarray], counts: tuple[int, ...]) -> None:
        """Bring a batch to the device."""
        self._host[:len(counts)] = counts
        for name, array in arrays.items():
            begin = self._begin[name]
            if array.ndim == 2:
                rows = self._host[begin:begin + len(array) * self.stride].reshape(len(array), self.stride)
                rows[:, :array.shape[1]] = array
            else:
                self._host[begin:begin + array.size] = array
        self.device.upload(self._memory.at(), self._host)


def checked(batch: Batch, limits: Limits, block_size: int, blocks: int, cross_blocks: int) -> dict[str, np.ndarray]:
    """The arrays of ARRAYS for a batch, int32.

    Raises:
        RequestError: arrays of the batch disagree, or an id or a position is out of range.
    """
    tokens, positions, starts, rows = (_i32(a) for a in (batch.tokens, batch.positions, batch.starts, batch.logit_rows))
    types = _i32(batch.types) if batch.types is not None else np.zeros(tokens.size, np.int32)
    if not tokens.size:
        raise RequestError("a batch without tokens")
    if positions.size != tokens.size or types.size != tokens.size:
        raise RequestError(f"a batch of {tokens.size} tokens has {positions.size} positions and {types.size} types")
    counts = starts[1:] - starts[:-1]
    if not starts.size or starts[0] != 0 or starts[-1] != tokens.size or (counts < 0).any():
        raise RequestError(f"starts of a batch should rise from 0 to {tokens.size}, are {starts.tolist()[:8]}")
    for what, values, limit in (("token id", tokens, limits.tokens), ("token type", types, limits.types),
                                ("position", positions, limits.positions), ("logit row", rows, tokens.size)):
        _check_range(what, values, limit)
    sequence_of = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    lengths, table = _lengths(positions, starts, counts), _table(batch.blocks, counts.size)
    cross_table, cross_lengths = _table(batch.cross_blocks, counts.size), np.zeros(counts.size, np.int32)
    if limits.has_self:
        _check_blocks("KV block", table, lengths, block_size, blocks)
    if limits.has_cross:
        cross_lengths = lengths if limits.writes_cross else _cross_lengths(batch, counts.size)
        _check_blocks("encoder block", cross_table, cross_lengths, block_size, cross_blocks)
    return {"tokens": tokens, "positions": positions, "types": types, "sequence_of": sequence_of, "logit_rows": rows,
            "starts": starts, "lengths": lengths, "blocks": table, "cross_blocks": cross_table,
            "cross_lengths": cross_lengths}


def _lengths(positions: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """i32 [B], keys of each sequence once the batch is written. Positions rise by one within a sequence."""
    if positions.min() < 0:
        raise RequestError(f"position {positions.min()} of a token is negative")
    if positions.size > counts.size:
        rises = positions[1:] - positions[:-1] == 1
        rises[starts[1:-1][(starts[1:-1] > 0) & (starts[1:-1] < positions.size)] - 1] = True
        if not rises.all():
            raise RequestError("positions of a sequence's tokens should rise by one")
    return np.where(counts > 0, positions[starts[1:] - 1] + 1, 0).astype(np.int32)


def _cross_lengths(batch: Batch, sequences: int) -> np.ndarray:
    if batch.cross_lengths is None or len(batch.cross_lengths) != sequences:
        raise RequestError(f"cross_lengths of the batch should give {sequences} lengths")
    return _i32(batch.cross_lengths)


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
    if limit is not None and values.size and values.view(np.uint32).max() >= limit:
        bad = values[(values < 0) | (values >= limit)][0]
        raise RequestError(f"{what} {bad} is out of range: it should be in 0 .. {limit - 1}")


def _check_blocks(what: str, table: np.ndarray, tokens: np.ndarray, block_size: int, blocks: int) -> None:
    """Every block that holds one of the first tokens[b] tokens of sequence b must be there."""
    needed = -(-tokens // block_size)
    most = needed.max(initial=0)
    if most > table.shape[1]:
        raise RequestError(f"{tokens.max()} tokens need {most} {what}s, the table has {table.shape[1]}")
    used = table[:, :most]
    _check_range(what, used[np.arange(most) < needed[:, None]] if len(used) > 1 else used, blocks)
