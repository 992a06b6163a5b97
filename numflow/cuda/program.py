"""Runs a network on a GPU, or on the simulator of one: its steps bound to device memory and kernels."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from numflow.cuda.batch import longest_table
from numflow.cuda.bind import bind
from numflow.cuda.context import Context, Weights, overlap
from numflow.cuda.device.call import N_LOGIT_ROWS, ROW_FIELD, Call, Sizes
from numflow.cuda.device.device import Device, Launch
from numflow.cuda.device.gpu import open_device
from numflow.cuda.exchange.exchange import HostCall, World
from numflow.cuda.exchange.nccl import CHOICES
from numflow.cuda.graphs import Graphs, is_decode, rounded
from numflow.cuda.sample.sample import WORDS, best, encode, pick
from numflow.cuda.state.cache import KVCache
from numflow.cuda.state.cache_host import JOIN, Rooms, on_host
from numflow.decoding.choice import Choice
from numflow.errors import RequestError, did_you_mean
from numflow.network.batch import BatchBounds, checked
from numflow.network.windows import cache_windows, counts
from numflow.ops import Batch, Network, Step, TraceRow, View
from numflow.quant.kv import KV_TYPES

Progress = Callable[[str, int, int], None]


class Program:
    """A network bound to a device.

    weights:     the network's WeightSource.
    activations: "int8": quantised matrices meet int8 activations; "f32": exact float32 arithmetic everywhere.
    threads:     accepted because every executor has it; a GPU has its own.
    block_size:  tokens per KV block.
    kv_type:     one of quant.kv.KV_TYPES or "auto" (f32 with activations "f32", else f16); kv_k, kv_v: of K or V alone.
    rows:        tokens of a batch there is room for at first; larger batches make the program grow.
    fused:       let kernels do neighbouring steps together (fuse.py); numbers may differ in their last bits.
    units:       also where blocks must own 32 neighbouring results for that (linear/unit.py).
    gpu:         a Device, or the name of one: "gpu", "simulator", or "auto": what $NUMFLOW_CUDA says, else the GPU.
    host_embeddings: keep the table of tokens' embeddings in the host's memory, as the file has it; its rows are brought
                 for each batch.
    host_kv_percent: share of the layers whose keys and values are in pinned memory of the host; what a batch reads of
                 them is copied to the device while other layers are computed (cache_host.py).
    world, device: of a plan with several devices, where they meet and which of them this is. Devices beyond the GPUs
                 there are share them, each with a stream and memory of its own.
    collectives: how the devices of a group sum and gather: "copies" from GPU to GPU, "nccl", or "auto": NCCL where it
                 is installed and each device has a card of its own. Its sums may be rounded in another order.
    progress:    called as progress("weights", done, total) while the program is made.

    Raises:
        RequestError, DeviceError: an option is out of range, or there is no such device.
        NetworkError, FormatError: a weight cannot be had.
    """

    failure = ""  # why nothing can run here any more

    def __init__(self, network: Network, weights, activations: str = "int8", threads: int | None = None,
                 block_size: int = 64, kv_type: str = "auto", rows: int = 64, progress: Progress | None = None, *,
                 kv_k: str = "auto", kv_v: str = "auto", gpu: Device | str = "auto", fused: bool = True,
                 units: bool = True, host_embeddings: bool = False, host_kv_percent: float = 0.0,
                 collectives: str = "auto", world: World | None = None, device: int = 0):
        types = {"kv_k": kv_type if kv_k == "auto" else kv_k, "kv_v": kv_type if kv_v == "auto" else kv_v}
        for name, value, known in (("activations", activations, ("int8", "f32")), ("collectives", collectives, CHOICES),
                                   *((name, value, ("auto", *KV_TYPES)) for name, value in types.items())):
            if value not in known:
                raise RequestError(f"{name} should be one of {', '.join(known)}, is {value!r}")
        if not 0 <= host_kv_percent <= 100:
            raise RequestError(f"host_kv_percent should be in 0 .. 100, is {host_kv_percent!r}")
        number = device if world is None else world.numbers[device]
        self.device = open_device(gpu, number) if isinstance(gpu, str) else gpu
        if world is not None:
            world.join(device, self.device, network, collectives)
        self.network, self.block_size, self.blocks, self.cross_blocks = network, block_size, 0, 0
        self.window_blocks, windows = counts(None, 0, network), cache_windows(network)
        self.activations, self._fused, self._units = activations, fused, units
        report = progress or (lambda what, done, total: None)
        auto = "f32" if activations == "f32" else "f16"
        kinds = tuple(auto if value == "auto" else value for value in types.values())
        self._weights = Weights(weights, self.device, lambda done: report("weights", done, len(network.weights)))
        hosted = on_host(len(network.caches), host_kv_percent)
        self._caches = {name: KVCache(self.device, cache, block_size, *kinds, index in hosted, windows.get(name, 0))
                        for index, (name, cache) in enumerate(network.caches.items())}
        self._routes = max((step.outputs[0].width for steps in network.entries.values() for step in steps
                            if step.op == "moe_route"), default=1)
        self._limits = {entry: BatchBounds(network, steps) for entry, steps in network.entries.items()}
        capacity = {"tokens": rows, "logits": 8, "routes": rows * self._routes, "sequences": 8, "table": 8}
        for cache in self._caches.values():
            cache.resize(0)
        self._rooms = Rooms(self.device, network, self._caches)
        self._graphs = Graphs(self.device)
        self._ctx = Context(network, self.device, self._weights, self._caches, capacity, activations, world,
                            device, host_embeddings, self._rooms)
        self._bind()

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in device memory."""
        return self._weights.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key/value memory that is reserved."""
        return sum(cache.nbytes for cache in self._caches.values())

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

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that a single token uses."""
        return sorted({work.kernel.name for work in self.launches(Sizes((1,) * 4, 1))})

    def reserve(self, blocks: int, cross_blocks: int = 0, windows: Mapping[int, int] | None = None) -> None:
        """Hold this many KV blocks (and blocks of encoder memory), keeping the content of those that remain.

        windows: others than `blocks`, for the layers whose attention has these windows (0: the whole text).
        """
        own = counts(windows, blocks, self.network)
        wanted = [(cache, cross_blocks if cache.shape.kind == "cross" else own[cache.window])
                  for cache in self._caches.values()]
        moved = [cache.resize(count)  # what shrinks makes room for the others
                 for cache, count in sorted(wanted, key=lambda pair: pair[1] - pair[0].blocks)]
        moved.append(self._rooms.resize())
        self.blocks, self.cross_blocks, self.window_blocks = blocks, cross_blocks, own
        if any(moved):
            self._bind()

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], window: int | None = None) -> None:
        """Copy self-attention KV blocks, all layers or those with a window: block sources[i] to block targets[i].

        Raises:
            RequestError: not as many targets as sources, or no such block.
        """
        if len(sources) != len(targets):
            raise RequestError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
        self._check_blocks([*sources, *targets], window)
        for cache in self._self_caches(window):
            cache.copy_blocks(list(sources), list(targets))

    def save_blocks(self, blocks: Sequence[int], window: int | None = None) -> np.ndarray:
        """The content of blocks, uint8 [n, block_bytes], of all layers or those with a window.

        Raises:
            RequestError: no such block.
        """
        self._check_blocks(blocks, window)
        saved = np.empty((len(blocks), self._row_bytes(window)), np.uint8)
        for row, block in zip(saved, blocks):
            row[:] = np.concatenate([cache.save(block) for cache in self._self_caches(window)])
        return saved

    def load_blocks(self, blocks: Sequence[int], data: np.ndarray, window: int | None = None) -> None:
        """Put back what `save_blocks` has given.

        Raises:
            RequestError: no such block, or data of another shape.
        """
        self._check_blocks(blocks, window)
        if data.dtype != np.uint8 or data.shape != (len(blocks), self._row_bytes(window)):
            raise RequestError(f"{len(blocks)} blocks are uint8 [{len(blocks)}, {self._row_bytes(window)}], "
                               f"not {data.dtype} {list(data.shape)}")
        for row, block in zip(data, blocks):
            begin = 0
            for cache in self._self_caches(window):
                cache.load(block, row[begin:begin + cache.block_bytes])
                begin += cache.block_bytes

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits") -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; all steps if that is None.

        Returns:
            float32 [R, width of the output], the caller's own; None if `output` is None.

        Raises:
            RequestError: no such entry or output, or an id or a position of the batch is out of range.
        """
        end, sizes = self._end(entry, output), self._load(batch, entry)
        self._walk((entry, end), [call for _, part in self._bound[entry][:end] for call in part], sizes)
        return None if output is None else self._download(self.network.outputs[output], sizes.rows[N_LOGIT_ROWS])

    def sample(self, batch: Batch, choices: Sequence[Choice], entry: str = "main") -> np.ndarray:
        """A token for each wanted row, picked as its choice says, int32 [R]; only these come back from the device. -1
        where logits are not finite.

        Raises:
            RequestError: as `run`, or there are not as many choices as rows.
        """
        end, sizes = self._end(entry, "logits"), self._load(batch, entry)
        rows, logits, ctx = sizes.rows[N_LOGIT_ROWS], self.network.outputs["logits"], self._ctx
        if len(choices) != rows:
            raise RequestError(f"{rows} rows cannot be picked from by {len(choices)} choices")
        ids = ctx.scratch("chosen tokens", 4 * ctx.capacity["logits"])
        if greedy := all(choice.temperature == 0 for choice in choices):
            choose = best(ctx, logits, ids)
        else:
            settings = ctx.scratch("choices", 4 * WORDS * ctx.capacity["logits"])
            self.device.upload(settings, encode(choices))
            choose = pick(ctx, logits, settings, ids)
        calls = [call for _, part in self._bound[entry][:end] for call in part]
        self._walk((entry, end, "greedy" if greedy else "drawn"), [*calls, choose], sizes)
        return self.device.download(ids, 4 * rows).view(np.int32)

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """The same run step by step, waiting for each; one TraceRow per step."""
        self._end(entry, None)
        sizes, rows = self._load(batch, entry), []
        for index, (step, calls) in enumerate(self._bound[entry]):
            self.device.synchronize()
            start = time.perf_counter()
            for call in calls:
                self._launch(call, sizes)
            self.device.synchronize()
            microseconds = (time.perf_counter() - start) * 1e6
            rows.append(TraceRow(index, step.label, step.op, self._shapes(step, sizes),
                                 self._where(calls, sizes), microseconds))
        return rows

    def bound(self, entry: str) -> list[tuple[Step, list[Call]]]:
        """The steps of an entry with their calls, as they are bound now."""
        return self._bound[entry]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """What runs for a batch of these sizes, all entries one after the other."""
        return [work for bound in self._bound.values() for _, calls in bound for call in calls
                for work in call.launches(sizes) if isinstance(work, Launch)]

    def close(self) -> None:
        """Drop weights, caches and scratch memory; the program cannot run any more."""
        self._graphs.clear()
        if self._ctx.world is not None:
            self._ctx.world.leave(self._ctx.index)
        self._bound.clear()
        self._caches.clear()
        self.device.close()
        del self._ctx, self._weights

    def _self_caches(self, window: int | None = None) -> list[KVCache]:
        return [cache for cache in self._caches.values()
                if cache.shape.kind == "self" and window in (None, cache.window)]

    def _row_bytes(self, window: int | None) -> int:
        return self.block_bytes if window is None else self.window_bytes[window]

    def _check_blocks(self, blocks: Sequence[int], window: int | None) -> None:
        there = min(self.window_blocks.values()) if window is None else self.window_blocks[window]
        bad = [block for block in blocks if not 0 <= block < there]
        if bad:
            raise RequestError(f"KV block {bad[0]} is out of range: it should be in 0 .. {there - 1}")

    def _bind(self) -> None:
        """Bind every entry to the memory as it is now."""
        self._graphs.clear()
        self._bound = {entry: bind(steps, self._ctx, self._fused, self._units)
                       for entry, steps in self.network.entries.items()}

    def _walk(self, what: tuple, calls: list[Call | HostCall], sizes: Sizes) -> None:
        """Run the calls; of decode steps, those between two that the host takes part in are a graph."""
        parts = [(by_host, list(some)) for by_host, some in groupby(calls, lambda call: isinstance(call, HostCall))]
        graphs = self.device.graphs and is_decode(sizes)
        if self._rooms.count:  # a graph must have both queues to their end
            parts[-1][1].extend(JOIN)
            graphs = graphs and sum(not by_host for by_host, _ in parts) == 1
        for number, (by_host, some) in enumerate(parts):
            if graphs and not by_host:
                self._graphs.run((*what, number), some, rounded(sizes, self._routes))
                continue
            for call in some:
                self._launch(call, sizes)

    def _launch(self, call: Call | HostCall, sizes: Sizes) -> None:
        if isinstance(call, HostCall):
            call.act(sizes)
            return
        for work in call.launches(sizes):
            self.device.launch(work)

    @staticmethod
    def _where(calls: list[Call], sizes: Sizes) -> str:
        """file:line of the last kernel."""
        works = [work for call in calls for work in call.launches(sizes) if isinstance(work, Launch)]
        return works[-1].kernel.location if works else "-"

    def _end(self, entry: str, output: str | None) -> int:
        """Steps of the entry to run."""
        if not self._bound:
            raise RequestError("this program was closed")
        if entry not in self._bound:
            raise RequestError(f"{self.network.name} has no entry {entry!r}{did_you_mean(entry, self._bound)}")
        if output is None:
            return len(self._bound[entry])
        if output not in self.network.outputs:
            raise RequestError(f"{self.network.name} has no {output!r}{did_you_mean(output, self.network.outputs)}")
        view = self.network.outputs[output]
        writers = [i for i, (step, _) in enumerate(self._bound[entry]) if any(overlap(view, y) for y in step.outputs)]
        if not writers:
            raise RequestError(f"entry {entry!r} of {self.network.name} does not compute {output!r}")
        return writers[-1] + 1

    def _load(self, batch: Batch, entry: str) -> Sizes:
        """Check the batch, make room for it and bring it to the device."""
        arrays = checked(batch, self._limits[entry], self.block_size, self.window_blocks, self.cross_blocks)
        tokens, sequences = arrays["tokens"].size, arrays["lengths"].size
        counts = (tokens, arrays["logit_rows"].size, tokens * self._routes, sequences)
        needed = {**{rows: counts[field] for rows, field in ROW_FIELD.items()}, "sequences": sequences,
                  "table": longest_table(arrays)}
        have = self._ctx.capacity
        if any(needed[what] > have[what] for what in have):
            self._ctx.reset({what: n if needed[what] <= n else max(needed[what], 2 * n) for what, n in have.items()})
            self._bind()
        frequencies = self._ctx.by_length.rows(arrays["limits"]).reshape(-1).view(np.int32)
        self._ctx.batch.load({**arrays, "frequencies": frequencies}, counts)
        return Sizes(counts, int(max(arrays["lengths"].max(initial=0), arrays["cross_lengths"].max(initial=0))))

    def _download(self, view: View, rows: int) -> np.ndarray:
        ref, stride = self._ctx.view(view)
        ref += -4 * view.start
        whole = self.device.download(ref, 4 * rows * stride).view(np.float32).reshape(rows, stride)
        return whole[:, view.start:view.start + view.width].copy()

    def _shapes(self, step: Step, sizes: Sizes) -> str:
        """Shapes of inputs and outputs: "[3, 64] -> [3, 112]"."""
        def shape(view):
            return str([sizes.rows[self._ctx.rows(view)], view.width])
        return " -> ".join(", ".join(map(shape, views)) or "-" for views in (step.inputs, step.outputs))
