"""The shell that the programs of one device share: entries and outputs, KV blocks, batches, room that grows."""

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
    """Keys and values of one attention, as an executor keeps them, or the state of a recurrent step, whose slots are
    its blocks. window: of the attention, 0: the whole text; STATE of a state."""

    window: int

    @property
    def shape(self) -> Cache | State:
        """Of the network."""

    @property
    def blocks(self) -> int:
        """Blocks that are reserved."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""

    def resize(self, blocks: int) -> bool:
        """Hold so many blocks, keeping the content of those that remain. Returns whether the memory has moved."""

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks, int64 [n] each; no target is a source."""

    def save(self, blocks: np.ndarray) -> np.ndarray:
        """Content of blocks int64 [n], uint8 [n, block_bytes]."""

    def load(self, blocks: np.ndarray, data: np.ndarray) -> None:
        """Put back what `save` returned."""


class OneDevice(Program):
    """A Program whose network is here as a whole. Executors add `run` and what binds steps to kernels.

    blocks, cross_blocks, window_blocks: KV blocks that are reserved, those of encoder memory, and of each window.
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
        self.adapters = 0  # numbers that adapters may have

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are reserved, and of states."""
        return sum(memory.nbytes for memory in self._memories)

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers."""
        return sum(cache.block_bytes for cache in self._self_caches())

    @property
    def window_bytes(self) -> dict[int, int]:
        """Bytes of one KV block of the layers with each window, and of a slot of STATE."""
        return {window: sum(cache.block_bytes for cache in self._self_caches(window)) for window in self.window_blocks}

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers."""
        return sum(cache.block_bytes for cache in self._caches.values() if cache.shape.kind == "cross")

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Hold this many KV blocks (and blocks of encoder memory), keeping the content of those that remain.

        windows: others than `blocks`, for the layers with these windows, and the slots of STATE.
        """
        own = counts(windows, blocks, self.network)
        self._last.forget()
        wanted = [(cache, cross_blocks if cache.shape.kind == "cross" else own[cache.window])
                  for cache in self._memories]
        moved = [cache.resize(count)  # what shrinks makes room for the others
                 for cache, count in sorted(wanted, key=lambda pair: pair[1] - pair[0].blocks)]
        self.blocks, self.cross_blocks, self.window_blocks = blocks, cross_blocks, own
        if any(moved):
            self._moved()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks, all layers or those with a window; no target is a source.

        Raises:
            RequestError: not as many targets as sources, or no such block.
        """
        if len(sources) != len(targets):
            raise RequestError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
        moved = self._block_ids(sources, window), self._block_ids(targets, window)
        for cache in self._self_caches(window):
            cache.copy(*moved)

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """Content of self-attention KV blocks, uint8 [n, bytes of a block], all layers or those with a window.

        Raises:
            RequestError: no such block.
        """
        ids = self._block_ids(blocks, window)
        saved = [cache.save(ids) for cache in self._self_caches(window)]
        return np.concatenate(saved, axis=1) if saved else np.zeros((len(ids), 0), np.uint8)

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Put what `save_blocks` returned into blocks, the same or others.

        Raises:
            RequestError: no such block, or data of another shape.
        """
        ids, caches, at = self._block_ids(blocks, window), self._self_caches(window), 0
        size = sum(cache.block_bytes for cache in caches)
        if data.dtype != np.uint8 or data.shape != (len(ids), size):
            raise RequestError(f"{len(ids)} KV blocks are uint8 {[len(ids), size]}, not {data.dtype} "
                               f"{list(data.shape)}")
        for cache in caches:
            cache.load(ids, data[:, at:at + cache.block_bytes])
            at += cache.block_bytes

    def close(self) -> None:
        """Drop weights, caches and scratch memory; the program cannot run any more. May be called twice."""
        if not self._closed:
            self._closed, self._caches, self._states = True, {}, {}
            self._drop()

    def _drop(self) -> None:
        """Give back what the executor holds beside the caches; called once."""

    def _moved(self) -> None:
        """Follow caches that lie elsewhere now; for executors whose kernels hold addresses."""

    @property
    def _memories(self) -> list[CacheMemory]:
        return [*self._caches.values(), *self._states.values()]

    def _self_caches(self, window: int | None = None) -> list[CacheMemory]:
        """Caches with a window, all for None; for STATE the states."""
        if window == STATE:
            return list(self._states.values())
        return [cache for cache in self._caches.values()
                if cache.shape.kind == "self" and window in (None, cache.window)]

    def _block_ids(self, blocks: Sequence[int], window: int | None) -> np.ndarray:
        """Ids as int64 [n]; of a window that no layer here has, any are right."""
        ids = np.asarray(blocks, np.int64)
        there = [count for own, count in self.window_blocks.items()
                 if own == window or (window is None and own != STATE)]
        bad = ids[(ids < 0) | (ids >= min(there))] if there else ids[:0]
        if bad.size:
            what = "state slot" if window == STATE else "KV block"
            raise RequestError(f"{what} {bad[0]} is out of range: it should be in 0 .. {min(there) - 1}")
        return ids

    def _end(self, entry: str, output: str | None) -> int:
        """Steps of the entry to run; see `steps_to`.

        Raises:
            RequestError: also of a program that was closed.
        """
        if self._closed:
            raise RequestError("this program was closed")
        if (entry, output) not in self._ends:
            self._ends[entry, output] = steps_to(self.network, entry, output)
        return self._ends[entry, output]

    def _checked(self, batch: Batch, entry: str) -> dict[str, np.ndarray]:
        """The arrays of a batch by name, all ids and positions in range; see network.batch.checked."""
        limits = self._limits[entry]
        return self._last.arrays(batch, (entry, self.adapters), limits, self.block_size, lambda: checked(
            batch, limits, self.block_size, self.window_blocks, self.cross_blocks, self.adapters))

    def _given(self, batch: Batch, entry: str) -> list[tuple[View, np.ndarray]]:
        """Rows that a batch brings; see network.batch.given_rows."""
        return given_rows(batch, self._limits[entry])

    def _rows(self, batch: Batch) -> dict[str, int]:
        """Rows of the buffers in a run of this batch, by the keys of ops.ROWS."""
        tokens = len(batch.tokens)
        return {"tokens": tokens, "logits": len(batch.logit_rows), "routes": tokens * self._routes}

    def _shapes(self, step: Step, batch: Batch) -> str:
        """Shapes of a step's inputs and outputs: "[3, 64] -> [3, 112]"."""
        rows = self._rows(batch)

        def shape(view: View) -> str:
            return str([rows[self.network.buffers[view.buffer].rows], view.width])
        return " -> ".join(", ".join(map(shape, views)) or "-" for views in (step.inputs, step.outputs))


def steps_to(network: Network, entry: str, output: str | None) -> int:
    """Steps of an entry up to the last one that writes the output; all if that is None.

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
    last = max((at for at, step in enumerate(steps) if any(view.overlaps(y) for y in step.outputs)), default=None)
    if last is None:
        raise RequestError(f"entry {entry!r} of {network.name} does not compute {output!r}")
    return last + 1


def grown(have: Mapping[str, int], needed: Mapping[str, int]) -> dict[str, int] | None:
    """Room for what is needed, at least twice as much as before where it does not suffice; None where all does."""
    if all(needed[what] <= room for what, room in have.items()):
        return None
    return {what: room if needed[what] <= room else max(needed[what], 2 * room) for what, room in have.items()}


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse an option without one of the known values.

    Raises:
        RequestError: another value.
    """
    if value not in (known := tuple(known)):
        raise RequestError(f"{option(name)} should be one of {', '.join(known)}, is {value!r}")


def kv_types(auto: str, kv_k: str, kv_v: str, known: Iterable[str] = KV_TYPES) -> tuple[str, str]:
    """Types of cached keys and values, of those that the executor knows; `auto` for "auto".

    Raises:
        RequestError: no such type.
    """
    for name, kind in (("kv_k", kv_k), ("kv_v", kv_v)):
        check_choice(name, kind, ("auto", *known))
    return auto if kv_k == "auto" else kv_k, auto if kv_v == "auto" else kv_v
