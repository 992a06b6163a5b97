"""Runs a network on the CPU: its steps bound to memory and compiled kernels, walked by threads outside the GIL."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from numflow.cpu.batch import fill_header, table_fields
from numflow.cpu.bind import Bound
from numflow.cpu.context import Context, Weights, overlap
from numflow.cpu.exchange.exchange import by_host
from numflow.cpu.exchange.world import World
from numflow.cpu.linear.activations import PIECES
from numflow.cpu.linear.linear import pieces_of
from numflow.cpu.measure.clock import Stamps
from numflow.cpu.runtime.cores import default_threads
from numflow.cpu.runtime.kernel import ROW_FIELD, compile_seconds
from numflow.cpu.runtime.threads import Threads, shared_threads
from numflow.cpu.state.cache import KVCache
from numflow.errors import DeviceError, RequestError, did_you_mean
from numflow.network.batch import BatchBounds, checked
from numflow.network.cost import all_floats
from numflow.network.windows import cache_windows, counts
from numflow.ops import Batch, Network, Step, TraceRow, View
from numflow.quant.kv import KV_TYPES

Progress = Callable[[str, int, int], None]
_WANTED_ROWS = 8  # rows of outputs there is room for at first


class Program:
    """A network bound to the CPU.

    weights:     the network's WeightSource.
    activations: "int8": quantised matrices meet int8 activations; "int16": pairs of int8, much closer to exact float32
                 arithmetic; "f32": that.
    threads:     None: one per physical core this process may use.
    block_size:  tokens per KV block, a multiple of 64.
    kv_k, kv_v:  types of cached keys and values, of quant.kv.KV_TYPES, or "auto": f16 unless activations are f32 or
                 all weights are floats.
    rows:        tokens of a batch there is room for at first; larger batches make the program grow.
    fused:       let kernels do neighbouring steps together (fuse.py); the results are the same bits.
    progress:    called as progress("weights" or "kernels", done, total) while the program is made.
    world, device: of a plan with several devices, where they meet and which of them this is; its threads are its own.

    Raises:
        RequestError, DeviceError: an option is out of range.
        NetworkError, FormatError: a weight cannot be had.
    """

    failure = ""  # why nothing can run here any more

    def __init__(self, network: Network, weights, activations: str = "int8", threads: int | None = None,
                 block_size: int = 64, kv_k: str = "auto", kv_v: str = "auto", rows: int = 512,
                 fused: bool = True, progress: Progress | None = None, world: World | None = None, device: int = 0):
        for name, value, known in (("activations", activations, tuple(PIECES)),
                                   ("kv_k", kv_k, ("auto", *KV_TYPES)), ("kv_v", kv_v, ("auto", *KV_TYPES))):
            if value not in known:
                raise RequestError(f"{name} should be one of {', '.join(known)}, is {value!r}")
        self.network, self.block_size, self.blocks, self.cross_blocks = network, block_size, 0, 0
        self.window_blocks = counts(None, 0, network)
        self._progress = progress or (lambda what, done, total: None)
        threads, self._world = default_threads() if threads is None else threads, world
        self.pool: Threads = shared_threads(threads) if world is None else Threads(threads)
        n_threads, compiling = self.pool.n_threads, compile_seconds["compiled"]
        self.activations, self.threads, self._fused = activations, n_threads, fused
        exact = activations == "f32" or all_floats(network)
        kv = [("f32" if exact else "f16") if kind == "auto" else kind for kind in (kv_k, kv_v)]
        self._weights = Weights(weights, n_threads, lambda done: self._progress("weights", done, len(network.weights)))
        windows, self._tables = cache_windows(network), table_fields(list(self.window_blocks))
        self._caches = {name: KVCache(cache, block_size, kv[0], kv[1], windows.get(name, 0),
                                      self._tables[windows.get(name, 0)])
                        for name, cache in network.caches.items()}
        self._routes = max((step.outputs[0].width for steps in network.entries.values() for step in steps
                            if step.op == "moe_route"), default=1)
        self._limits = {entry: BatchBounds(network, steps) for entry, steps in network.entries.items()}
        capacity = {"tokens": rows, "logits": _WANTED_ROWS, "routes": rows * self._routes}
        self._ctx = Context(network, self._weights, self._caches, capacity, activations, n_threads, world, device)
        self._bind()
        self._weights.keep()
        self.compile_s = compile_seconds["compiled"] - compiling

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._weights.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key/value memory that is reserved."""
        return sum(cache.nbytes for cache in self._caches.values())

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels the program uses."""
        return sorted({call.kernel.name for bound in self._bound.values() for call in bound.calls})

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Hold this many KV blocks (and blocks of encoder memory), keeping the content of those that remain.

        windows: others than `blocks`, for the layers whose attention has these windows (0: the whole text).
        """
        own = counts(windows, blocks, self.network)
        wanted = [(cache, cross_blocks if cache.shape.kind == "cross" else own[cache.window])
                  for cache in self._caches.values()]
        for cache, count in sorted(wanted, key=lambda pair: pair[1] - pair[0].blocks):  # what shrinks makes room
            cache.resize(count)
        self.blocks, self.cross_blocks, self.window_blocks = blocks, cross_blocks, own

    @property
    def block_bytes(self) -> int:
        """Bytes of one self-attention KV block, all layers."""
        return sum(cache.block_bytes for cache in self._self_caches())

    @property
    def window_bytes(self) -> dict[int, int]:
        """Bytes of one KV block of the layers with each window."""
        return {window: sum(cache.block_bytes for cache in self._self_caches(window)) for window in self.window_blocks}

    @property
    def cross_block_bytes(self) -> int:
        """Bytes of one block of encoder memory, all layers."""
        return sum(cache.block_bytes for cache in self._caches.values() if cache.shape.kind == "cross")

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks, all layers or those with a window; no target is a source."""
        moved = self._block_ids(sources, window), self._block_ids(targets, window)
        for cache in self._self_caches(window):
            cache.copy(*moved)

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """The content of self-attention KV blocks, uint8 [n, block_bytes], of all layers or those with a window."""
        ids = self._block_ids(blocks, window)
        saved = [cache.save(ids) for cache in self._self_caches(window)]
        return np.concatenate(saved, axis=1) if saved else np.zeros((len(ids), 0), np.uint8)

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Put what `save_blocks` returned into blocks, the same or others."""
        ids, at = self._block_ids(blocks, window), 0
        size = self.block_bytes if window is None else self.window_bytes[window]
        if data.shape != (len(ids), size):
            raise RequestError(f"{len(ids)} KV blocks are {[len(ids), size]} bytes, not {list(data.shape)}")
        for cache in self._self_caches(window):
            cache.load(ids, data[:, at:at + cache.block_bytes])
            at += cache.block_bytes

    def _self_caches(self, window: int | None = None) -> list[KVCache]:
        return [cache for cache in self._caches.values()
                if cache.shape.kind == "self" and window in (None, cache.window)]

    def _block_ids(self, blocks: Sequence[int], window: int | None) -> np.ndarray:
        ids = np.asarray(blocks, np.int64)
        there = min(self.window_blocks.values()) if window is None else self.window_blocks[window]
        if ids.size and (ids.min() < 0 or ids.max() >= there):
            raise RequestError(f"KV blocks {ids.tolist()[:8]} are not all in 0 .. {there - 1}")
        return ids

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits") -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; all steps if that is None.

        Returns:
            float32 [R, width of the output], the caller's own; None if `output` is None.

        Raises:
            RequestError: no such entry or output, or an id or a position of the batch is out of range.
        """
        self.advance(batch, entry, output)
        return None if output is None else self.result(output)

    def advance(self, batch: Batch, entry: str = "main", output: str | None = "logits") -> None:
        """As `run`, for a device of a plan whose output another one hands out."""
        self._entry(entry)
        rows, arrays = self._rows(entry, output), self._checked(batch, entry)
        self._load(arrays)
        self._walk(self._bound[entry], rows)
        del arrays  # the header points into them

    def prepare(self, arrays: dict[str, np.ndarray], entry: str = "main", output: str | None = "logits") -> None:
        """All of a run but the walk, which the pool's threads are then to do by themselves (exchange/lockstep.py).

        arrays: of a batch that was checked (network.batch.checked); they must live until the walk is done.
        """
        self._entry(entry)
        rows = self._rows(entry, output)
        self._load(arrays)
        self.pool.hold(self._bound[entry].table, rows)

    def result(self, output: str) -> np.ndarray:
        """What the last run has computed, as `run` returns it."""
        rows = int(self._ctx.header_fields[ROW_FIELD["logits"]])
        return self._ctx.buffers.columns(self.network.outputs[output], rows).copy()

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """The same run with a barrier and a look at the clock after every step; one TraceRow per step."""
        self._entry(entry)
        arrays = self._checked(batch, entry)
        self._load(arrays)
        bound = self._bound[entry]
        stamps = Stamps(bound.table, bound.ends)
        self.pool.run(stamps.table, len(stamps.table))
        del arrays
        return [TraceRow(index, step.label, step.op, self._shapes(step), kernel.location, microseconds,
                         bound.done_by.get(index))
                for index, ((step, _), kernel, microseconds) in enumerate(
                    zip(bound.steps, bound.kernels, stamps.microseconds.tolist(), strict=True))]

    def weight_cost(self, name: str) -> tuple[int, bool]:
        """Bytes of a weight in memory, and whether it meets int8 activations."""
        if name in self._weights.matrices:
            packed = self._weights.matrices[name]
            return packed.nbytes, pieces_of(packed, self._ctx.activations) > 0
        return self._weights.vectors[name].nbytes, False

    def done_by(self, entry: str = "main") -> dict[int, int]:
        """Steps of an entry that the kernels of another one do: index -> index of that one."""
        self._entry(entry)
        return self._bound[entry].done_by

    def _walk(self, bound: Bound, rows: int) -> None:
        """The first rows of the table; exchanges with devices elsewhere in their place."""
        begin = 0
        for at, step in bound.by_host:
            if at < rows:
                self.pool.run(bound.table[begin:at], at - begin)
                by_host(step, self._ctx)
                begin = at
        self.pool.run(bound.table[begin:], rows - begin)
        if self._world is not None and self._world.aborted:
            raise DeviceError("the run was broken off: another device failed")

    def close(self) -> None:
        """Drop weights, caches and scratch memory; the program cannot run any more."""
        self._bound.clear()
        self._caches.clear()
        del self._ctx, self._weights, self.pool

    def _bind(self) -> None:
        """Bind every entry to the buffers as they are now."""
        self._bound = {entry: Bound(steps, self._ctx, self._fused) for entry, steps in self.network.entries.items()}
        total, done = len(self.kernels), 0

        def one_more():
            nonlocal done
            done += 1
            self._progress("kernels", min(done, total), total)

        for bound in self._bound.values():
            bound.compile(one_more)
        self._stops = {(entry, output): self._stop(bound, view) for entry, bound in self._bound.items()
                       for output, view in self.network.outputs.items()}

    def _stop(self, bound: Bound, view: View) -> int:
        """Table rows up to the last step that writes the view; 0 if none does."""
        ends = [end for (step, _), end in zip(bound.steps, bound.ends, strict=True)
                if any(overlap(view, y) for y in step.outputs)]
        return ends[-1] if ends else 0

    def _entry(self, entry: str) -> None:
        if not self._bound:
            raise RequestError("this program was closed")
        if entry not in self._bound:
            raise RequestError(f"{self.network.name} has no entry {entry!r}{did_you_mean(entry, self._bound)}")

    def _rows(self, entry: str, output: str | None) -> int:
        """Table rows to walk."""
        if output is None:
            return len(self._bound[entry].table)
        if output not in self.network.outputs:
            raise RequestError(f"{self.network.name} has no {output!r}{did_you_mean(output, self.network.outputs)}")
        if not self._stops[entry, output]:
            raise RequestError(f"entry {entry!r} of {self.network.name} does not compute {output!r}")
        return self._stops[entry, output]

    def _checked(self, batch: Batch, entry: str) -> dict[str, np.ndarray]:
        return checked(batch, self._limits[entry], self.block_size, self.window_blocks, self.cross_blocks)

    def _load(self, arrays: dict[str, np.ndarray]) -> None:
        """Make room for a batch and fill the header."""
        self._frequencies = self._ctx.by_length.rows(arrays["limits"])  # the header points to them
        fill_header(self._ctx.header_fields, arrays, self._frequencies, self._routes, self._tables)
        capacity = self._ctx.capacity
        needed = {rows: int(self._ctx.header_fields[field]) for rows, field in ROW_FIELD.items()}
        if any(needed[rows] > capacity[rows] for rows in needed):
            self._ctx.reset({rows: have if needed[rows] <= have else max(needed[rows], 2 * have)
                             for rows, have in capacity.items()})
            self._bind()

    def _shapes(self, step: Step) -> str:
        """Shapes of inputs and outputs: "[3, 64] -> [3, 112]"."""
        def shape(view):
            return str([int(self._ctx.header_fields[self._ctx.rows(view)]), view.width])
        return " -> ".join(", ".join(map(shape, views)) or "-" for views in (step.inputs, step.outputs))
