"""Base class of programs on one device: entries and outputs, KV blocks, batches, growing capacity."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from numflow.errors import RequestError, did_you_mean, option
from numflow.executor.contract import Program
from numflow.network.batch import BatchBounds, LastBatch, checked, given_rows
from numflow.network.windows import STATE, counts
from numflow.ops import Batch, Cache, Network, State, Step, View
from numflow.quant.kv import KV_TYPES


class CacheMemory(Protocol):
    """An executor's memory for the keys and values of one attention, or for the state of a recurrent step, whose slots
    count as blocks.

    window: window of the attention, 0: the whole sequence; STATE for a state.
    """

    window: int

    @property
    def shape(self) -> Cache | State:
        """The network's cache or state."""

    @property
    def blocks(self) -> int:
        """Number of reserved blocks."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""

    def resize(self, blocks: int) -> bool:
        """Reserve `blocks` blocks; blocks that remain keep their content. Returns whether the memory has moved."""

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks, int64 [n] each; no target is a source."""

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Content of blocks int64 [n], uint8 [n, block_bytes]."""

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Restore the content that `save` returned."""


class OneDevice(Program):
    """A Program that runs its whole network on one device. Executors add `run` and the binding of steps to kernels.

    blocks, cross_blocks, window_blocks: reserved KV blocks, blocks of encoder memory, and KV blocks by window.
    """

    def __init__(self, network: Network, block_size: int):
        self.network, self.block_size, self.blocks, self.cross_blocks = network, block_size, 0, 0
        self.window_blocks = counts(None, 0, network)
        self._caches: Mapping[str, CacheMemory] = {}  # by name, once the executor has made them
        self._states: Mapping[str, CacheMemory] = {}
        self._routes = max((step.outputs[0].width for steps in network.entries.values() for step in steps
                            if step.op == "moe_route"), default=1)
        self._limits = {entry: BatchBounds(network, steps) for entry, steps in network.entries.items()}
        self._last = LastBatch()
        self._ends: dict[tuple[str, str | None], int] = {}
        self._closed = False
        self.adapters = 0  # adapter indices are below this

    @property
    def kv_bytes(self) -> int:
        """Reserved bytes of keys, values and states."""
        return sum(memory.nbytes for memory in self._memories)

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers."""
        return sum(cache.block_bytes for cache in self._self_caches())

    @property
    def window_bytes(self) -> dict[int, int]:
        """By window, bytes of one KV block of the layers with this window; for STATE, bytes of a slot."""
        return {window: sum(cache.block_bytes for cache in self._self_caches(window)) for window in self.window_blocks}

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers."""
        return sum(cache.block_bytes for cache in self._caches.values() if cache.shape.kind == "cross")

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Reserve KV blocks and blocks of encoder memory; blocks that remain keep their content.

        windows: number of blocks by window where it differs from `blocks`, and number of slots for STATE.
        """
        by_window = counts(windows, blocks, self.network)
        self._last.forget()
        wanted = [(cache, cross_blocks if cache.shape.kind == "cross" else by_window[cache.window])
                  for cache in self._memories]
        moved = [cache.resize(count)  # shrinking caches first: they free memory for the growing ones
                 for cache, count in sorted(wanted, key=lambda pair: pair[1] - pair[0].blocks)]
        self.blocks, self.cross_blocks, self.window_blocks = blocks, cross_blocks, by_window
        if any(moved):
            self._moved()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks of all layers, or of layers with a window; no target is a source.

        Raises:
            RequestError: not as many targets as sources, or no such block.
        """
        if len(sources) != len(targets):
            raise RequestError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
        ids = self._block_ids(sources, window), self._block_ids(targets, window)
        for cache in self._self_caches(window):
            cache.copy(*ids)

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """Content of self-attention KV blocks, uint8 [n, bytes of a block], of all layers or of layers with a window.

        Raises:
            RequestError: no such block.
        """
        ids = self._block_ids(blocks, window)
        saved = [cache.save(ids) for cache in self._self_caches(window)]
        return np.concatenate(saved, axis=1) if saved else np.zeros((len(ids), 0), np.uint8)

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Load content that `save_blocks` returned into blocks, the same or others.

        Raises:
            RequestError: no such block, or data of another shape.
        """
        ids, caches, offset = self._block_ids(blocks, window), self._self_caches(window), 0
        size = sum(cache.block_bytes for cache in caches)
        if data.dtype != np.uint8 or data.shape != (len(ids), size):
            raise RequestError(f"{len(ids)} KV blocks are uint8 {[len(ids), size]}, not {data.dtype} "
                               f"{list(data.shape)}")
        for cache in caches:
            cache.load(ids, data[:, offset:offset + cache.block_bytes])
            offset += cache.block_bytes

    def close(self) -> None:
        """Free weights, caches and scratch memory; the program cannot run any more. May be called twice."""
        if not self._closed:
            self._closed, self._caches, self._states = True, {}, {}
            self._drop()

    def _drop(self) -> None:
        """Free the executor's resources other than caches; called once."""

    def _moved(self) -> None:
        """Bind again after caches have moved; for executors whose kernels hold addresses."""

    @property
    def _memories(self) -> list[CacheMemory]:
        return [*self._caches.values(), *self._states.values()]

    def _self_caches(self, window: int | None = None) -> list[CacheMemory]:
        """Self-attention caches with a window, or all for None; for STATE the states."""
        if window == STATE:
            return list(self._states.values())
        return [cache for cache in self._caches.values()
                if cache.shape.kind == "self" and window in (None, cache.window)]

    def _block_ids(self, blocks: Sequence[int], window: int | None) -> np.ndarray:
        """Checked ids as int64 [n]; for a window that no layer of this device has, any ids are accepted."""
        ids = np.asarray(blocks, np.int64)
        reserved = [count for key, count in self.window_blocks.items()
                    if key == window or (window is None and key != STATE)]
        bad = ids[(ids < 0) | (ids >= min(reserved))] if reserved else ids[:0]
        if bad.size:
            noun = "state slot" if window == STATE else "KV block"
            raise RequestError(f"{noun} {bad[0]} is out of range: it should be in 0 .. {min(reserved) - 1}")
        return ids

    def _end(self, entry: str, output: str | None) -> int:
        """Number of steps of the entry to run; see `steps_to`.

        Raises:
            RequestError: as `steps_to`, or the program was closed.
        """
        if self._closed:
            raise RequestError("this program was closed")
        if (entry, output) not in self._ends:
            self._ends[entry, output] = steps_to(self.network, entry, output)
        return self._ends[entry, output]

    def _checked(self, batch: Batch, entry: str) -> dict[str, np.ndarray]:
        """Check a batch; returns its arrays by name (network.batch.checked)."""
        limits = self._limits[entry]
        return self._last.arrays(batch, (entry, self.adapters), limits, self.block_size, lambda: checked(
            batch, limits, self.block_size, self.window_blocks, self.cross_blocks, self.adapters))

    def _given(self, batch: Batch, entry: str) -> list[tuple[View, np.ndarray]]:
        """Input rows of a batch; see network.batch.given_rows."""
        return given_rows(batch, self._limits[entry])

    def _rows(self, batch: Batch) -> dict[str, int]:
        """Number of rows of buffers in a run of this batch, by the keys of ops.ROWS."""
        tokens = len(batch.tokens)
        return {"tokens": tokens, "logits": len(batch.logit_rows), "routes": tokens * self._routes}

    def _shapes(self, step: Step, batch: Batch) -> str:
        """Shapes of a step's inputs and outputs: "[3, 64] -> [3, 112]"."""
        rows = self._rows(batch)

        def shape(view: View) -> str:
            return str([rows[self.network.buffers[view.buffer].rows], view.width])
        return " -> ".join(", ".join(map(shape, views)) or "-" for views in (step.inputs, step.outputs))


def steps_to(network: Network, entry: str, output: str | None) -> int:
    """Number of steps of an entry up to the last step that writes the output; all if the output is None.

    Raises:
        RequestError: no such entry or output, or the entry does not compute it.
    """
    if entry not in network.entries:
        raise RequestError(f"{network.name} has no entry {entry!r}{did_you_mean(entry, network.entries)}")
    steps = network.entries[entry]
    if output is None:
        return len(steps)
    if output not in network.outputs:
        raise RequestError(f"{network.name} has no {output!r}{did_you_mean(output, network.outputs)}")
    view = network.outputs[output]
    last = max((i for i, step in enumerate(steps) if any(view.overlaps(y) for y in step.outputs)), default=None)
    if last is None:
        raise RequestError(f"entry {entry!r} of {network.name} does not compute {output!r}")
    return last + 1


def grown(have: Mapping[str, int], needed: Mapping[str, int]) -> dict[str, int] | None:
    """New capacities for the needed sizes, at least doubled where they grow; None if all suffice."""
    if all(needed[key] <= capacity for key, capacity in have.items()):
        return None
    return {key: capacity if needed[key] <= capacity else max(needed[key], 2 * capacity)
            for key, capacity in have.items()}


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Check that an option has one of the known values.

    Raises:
        RequestError: it has another value.
    """
    if value not in (known := tuple(known)):
        raise RequestError(f"{option(name)} should be one of {', '.join(known)}, is {value!r}")


def kv_types(auto: str, kv_k: str, kv_v: str, known: Iterable[str] = KV_TYPES) -> tuple[str, str]:
    """Types of cached keys and values, checked against the executor's types; `auto` replaces "auto".

    Raises:
        RequestError: no such type.
    """
    for name, kind in (("kv_k", kv_k), ("kv_v", kv_v)):
        check_choice(name, kind, ("auto", *known))
    return auto if kv_k == "auto" else kv_k, auto if kv_v == "auto" else kv_v
