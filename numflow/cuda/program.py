"""The Program of the CUDA executor: a network's steps bound to device memory and kernels of a GPU or its simulator."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from numflow.cuda.bind import bind
from numflow.cuda.context import Context, Weights
from numflow.cuda.device.call import N_LOGIT_ROWS, Call, Sizes
from numflow.cuda.device.device import Device, Launch, Order
from numflow.cuda.device.gpu import chosen_device, open_device
from numflow.cuda.estimate import KV_TYPES
from numflow.cuda.exchange.exchange import HostCall, World
from numflow.cuda.exchange.nccl import CHOICES
from numflow.cuda.graphs import Graphs, is_decode, rounded
from numflow.cuda.patterns import Together, together
from numflow.cuda.sample.sample import best, follow, follow_drawn, pick
from numflow.cuda.state.cache import KVCache
from numflow.cuda.state.cache_host import JOIN, Buffers, on_host
from numflow.cuda.state.matrix_state import slot_words
from numflow.cuda.state.sequence_state import StateMemory
from numflow.cuda.weights.quantise import Quantiser
from numflow.decoding.choice import Choice, draws, encode
from numflow.errors import DeviceError, RequestError, option
from numflow.executor.base import OneDevice, check_choice, grown, kv_types
from numflow.executor.contract import ADAPT, DECODE, MOST_STEPS, SAMPLE, TRACE, Progress, TraceRow
from numflow.network.adapters.parts import AdaptedParts
from numflow.network.batch import ends
from numflow.network.windows import cache_windows
from numflow.ops import Batch, Network, Step, View

# An event between two steps: the first kernel of a step does not start early. The last kernel of a step may write the
# batch tables of the next one, which kernels read before after_previous().
BOUNDARY = Order("step", beside=False, waits=False)


class Program(OneDevice):
    """A network bound to a device.

    weights:     the network's WeightSource.
    activations: "int8": activations are quantised to int8 for products with quantised matrices. "f32": float32
                 arithmetic throughout. "fp8": as "int8", and for more than 64 tokens, activations are quantised to
                 8-bit floats, with a scale for each token, for products with matrices of 8-bit floats, on GPUs of
                 compute capability 8.9, 9.0, 10.x and 12.x. "nvfp4": as "fp8", and for matrices of NVFP4 and MXFP4 to
                 4-bit floats with block scales, on GPUs of compute capability 10.x and 12.x.
    threads:     ignored; part of the interface of executors.
    block_size:  tokens per KV block.
    kv_type:     one of estimate.KV_TYPES or "auto" (f32 with activations "f32", else f16); kv_k, kv_v: of K or V alone.
    rows:        tokens of a batch that memory is allocated for at first; larger batches reallocate.
    fused:       fuse consecutive steps into one kernel (patterns.py); results may differ in their last bits.
    units:       also use fusions whose blocks compute 32 adjacent results (linear/unit.py).
    gpu:         a Device, or a name: "gpu", "simulator", or "auto": $NUMFLOW_CUDA, by default "gpu".
    host_embeddings: keep the embedding table in host memory, as stored in the file; the rows of each batch are copied
                 to the device.
    host_kv_percent: percentage of the layers whose keys and values are in pinned host memory; the blocks that a batch
                 reads are copied to the device while other layers are computed (cache_host.py).
    state_type:  data type of matrix states: one of quant.state.STATE_TYPES, or "auto" for the network's choice.
    world, device: the World of a plan with several devices, and the index of this device in it. If there are more
                 devices than GPUs, devices share GPUs, each with its own stream and memory.
    collectives: algorithm of all-reduce and all-gather: "copies" between GPUs, "nccl", or "auto": NCCL if it is
                 installed and each device has a GPU of its own. NCCL may add in another order.
    progress:    called as progress("weights", done, total) while weights are loaded.

    Raises:
        RequestError, DeviceError: an option is out of range, or there is no such device.
        NetworkError, FormatError: a weight cannot be loaded.
    """

    threads, can = None, frozenset({SAMPLE, TRACE, ADAPT})  # and DECODE, unless the host takes part in every step

    def __init__(self, network: Network, weights, activations: str = "int8", threads: int | None = None,
                 block_size: int = 64, kv_type: str = "auto", rows: int = 64, progress: Progress | None = None, *,
                 kv_k: str = "auto", kv_v: str = "auto", gpu: Device | str = "auto", fused: bool = True,
                 units: bool = True, host_embeddings: bool = False, host_kv_percent: float = 0.0,
                 collectives: str = "auto", world: World | None = None, device: int = 0,
                 state_type: str = "auto"):
        check_choice("activations", activations, ("int8", "fp8", "nvfp4", "f32"))
        check_choice("collectives", collectives, CHOICES)
        kinds = kv_types("f32" if activations == "f32" else "f16", *(kv_type if kind == "auto" else kind
                                                                     for kind in (kv_k, kv_v)), known=KV_TYPES)
        if not 0 <= host_kv_percent <= 100:
            raise RequestError(f"{option('host_kv_percent')} should be in 0 .. 100, is {host_kv_percent!r}")
        super().__init__(network, block_size)
        gpu_index = device if world is None else world.numbers[device]
        self.device = open_device(gpu, gpu_index) if isinstance(gpu, str) else gpu
        if activations == "fp8" and not self.device.float8:
            raise DeviceError(f"{option('activations')} fp8 needs a GPU of compute capability 8.9, 9.0, 10.x or 12.x "
                              "(RTX 40 and 50, L40S, H100, B200), for which there are products of 8-bit floats; int8 "
                              "takes such matrices as float16")
        if activations == "nvfp4" and not self.device.float4:
            raise DeviceError(f"{option('activations')} nvfp4 needs a GPU of compute capability 10.x or 12.x (B200, "
                              "RTX 50), for which there are products of 4-bit floats; int8 takes such matrices as "
                              "float16")
        if world is not None:
            world.join(device, self.device, network, collectives)
        self.activations = activations
        report = progress or (lambda what, done, total: None)
        self._weights = Weights(weights, self.device, lambda done: report("weights", done, len(network.weights)))
        in_host, windows = on_host(len(network.caches), host_kv_percent), cache_windows(network)
        self._caches = {name: KVCache(self.device, cache, block_size, *kinds, index in in_host, windows.get(name, 0))
                        for index, (name, cache) in enumerate(network.caches.items())}
        plain = {name for name, cache in self._caches.items() if not cache.host and {*cache.types} <= {"f32", "f16"}}
        self._together = {entry: together(network, entry, activations, plain, units) if fused else Together()
                          for entry in network.entries}
        capacity = {"tokens": rows, "logits": 8, "routes": rows * self._routes, "sequences": 8, "table": 8}
        for cache in self._caches.values():
            cache.resize(0)
        states = {name: StateMemory(self.device, state, words)
                  for name, (state, words) in slot_words(network, state_type).items()}
        self._states = states
        self._kv_buffers = Buffers(self.device, network, self._caches)
        self._graphs = Graphs(self.device)
        self._ctx = Context(network, self.device, self._weights, self._caches, capacity, activations, world,
                            device, host_embeddings, self._kv_buffers, states)
        self._bind()
        if world is None and not (host_embeddings or in_host):
            self.can |= {DECODE}

    @classmethod
    def quantiser(cls, gpu: Device | str = "auto", device: int = 0) -> Quantiser | None:
        """The quantiser of weights on a GPU. None for the simulator: the CPU quantises a thousand times faster."""
        if isinstance(gpu, str) and chosen_device(gpu) == "simulator":
            return None
        return Quantiser(lambda: open_device(gpu, device) if isinstance(gpu, str) else gpu, isinstance(gpu, str))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights and adapters in device memory."""
        return self._weights.nbytes + self._ctx.adapters.nbytes

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that run for a single token."""
        return sorted({work.kernel.name for work in self.launches(Sizes((1,) * 4, 1))})

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; see executor.contract.Program."""
        end, given = self._end(entry, output), self._given(batch, entry)
        sizes = self._load(batch, entry)
        for view, values in given:
            self._upload(view, values)
        self._walk((entry, end), sizes)
        if not wanted or output is None:
            return None
        return self._download(self.network.outputs[output], sizes.rows[N_LOGIT_ROWS])

    def result(self, output: str) -> np.ndarray:
        """See executor.contract.Program."""
        view = self.network.outputs[output]
        return self._download(view, self._sizes.rows[self._ctx.rows(view)])

    def sample(self, batch: Batch, choices: Sequence[Choice], entry: str = "main") -> np.ndarray:
        """Sample a token for each logit row, by its Choice; see executor.contract.Program."""
        rows, end = len(batch.logit_rows), self._end(entry, "logits")
        settings, drawn = encode(choices, rows), any(choice.temperature for choice in choices)
        sizes = self._load(batch, entry, {"choices": settings} if drawn else None)
        ctx, logits = self._ctx, self.network.outputs["logits"]
        self._walk((entry, end, "drawn" if drawn else "greedy"), sizes,
                   lambda: pick(ctx, logits) if drawn else best(ctx, logits))
        self.device.synchronize()
        return ctx.batch.chosen(rows)

    def decode(self, batch: Batch, steps: int, choices: Sequence[Choice] | None = None,
               entry: str = "main") -> np.ndarray:
        """See executor.contract.Program. The device prepares the batch of each next step; Python waits for the last."""
        end, rows = self._end(entry, "logits"), len(batch.logit_rows)
        name, choose, settings = "steps", follow, None
        if choices is not None:
            name, choose = "drawn steps", follow_drawn
            settings = {"choices": encode(choices, rows), "draws": draws(choices, steps, MOST_STEPS)}
        sizes = self._load(batch, entry, settings)
        self._last.check_ahead(batch, steps, MOST_STEPS, self._limits[entry], self.block_size)
        ctx, logits = self._ctx, self.network.outputs["logits"]
        for _ in range(steps):
            self._walk((entry, end, name), Sizes(sizes.rows, sizes.keys + steps - 1), lambda: choose(ctx, logits))
        self.device.synchronize()
        self._last.went_on(batch, steps - 1, on_copy=True)
        return ctx.batch.chosen_by_step(steps, rows)

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """Run the batch step by step and measure each step; one TraceRow per step."""
        self._end(entry, None)
        sizes, rows = self._load(batch, entry), []
        for view, values in self._given(batch, entry):
            self._upload(view, values)
        for index, (step, calls) in enumerate(self._bound[entry]):
            self.device.synchronize()
            start = time.perf_counter()
            for call in calls:
                self._launch(call, sizes)
            self.device.synchronize()
            microseconds = (time.perf_counter() - start) * 1e6
            rows.append(TraceRow(index, step.label, step.op, self._shapes(step, batch),
                                 self._where(calls, sizes), microseconds))
        return rows

    def set_adapter(self, number: int, parts: AdaptedParts | None) -> None:
        """See executor.contract.Program."""
        self._end("main", None)
        moved = self._ctx.adapters.put(number, parts)
        self.adapters = self._ctx.adapters.capacity
        if moved:  # bound launches contain addresses
            self._ctx.reset(self._ctx.capacity)
            self._bind()

    def bound(self, entry: str) -> list[tuple[Step, list[Call]]]:
        """The steps of an entry with their calls, as currently bound."""
        return self._bound[entry]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """The launches for a batch of these sizes, of all entries in turn."""
        return [work for bound in self._bound.values() for _, calls in bound for call in calls
                for work in call.launches(sizes) if isinstance(work, Launch)]

    def _drop(self) -> None:
        self._graphs.clear()
        if self._ctx.world is not None:
            self._ctx.world.leave(self._ctx.index)
        self._bound.clear()
        self._parts.clear()
        self.device.close()
        del self._ctx, self._weights

    def _moved(self) -> None:
        """Resize the device buffers of caches in host memory and bind again, after the caches were reallocated."""
        self._kv_buffers.resize()
        self._bind()

    def _bind(self) -> None:
        """Bind every entry to the current addresses of its memory."""
        self._graphs.clear()
        self._parts: dict[tuple, list[tuple[bool, list[Call | HostCall]]]] = {}
        self._bound = {entry: bind(steps, self._ctx, self._together[entry])
                       for entry, steps in self.network.entries.items()}

    def _walk(self, run_key: tuple, sizes: Sizes, choose: Callable[[], Call] | None = None) -> None:
        """Run an entry up to a step, run_key[:2] = (entry, end), then the sampling call that `choose` makes.

        In decode steps, each sequence of calls between two calls of the host is a CUDA graph.
        """
        if run_key not in self._parts:
            self._parts[run_key] = self._cut(run_key, choose)
        parts = self._parts[run_key]
        graphs = self.device.graphs and is_decode(sizes)
        if self._kv_buffers.count:  # a graph must contain all work of both streams
            graphs = graphs and sum(not by_host for by_host, _ in parts) == 1
        if not graphs:
            self.device.launch(BOUNDARY)
        for number, (by_host, calls) in enumerate(parts):
            if graphs and not by_host:
                self._graphs.run((*run_key, number), calls, rounded(sizes, self._routes))
                continue
            for call in calls:
                self._launch(call, sizes)

    def _cut(self, run_key: tuple, choose: Callable[[], Call] | None) -> list[tuple[bool, list[Call | HostCall]]]:
        """The calls of an entry up to a step, split into runs of calls of the host and of calls of the device."""
        entry, end, *_ = run_key
        calls = [call for _, part in self._bound[entry][:end] for call in part]
        calls += [choose()] if choose else []
        parts = [(by_host, list(part)) for by_host, part in groupby(calls, lambda call: isinstance(call, HostCall))]
        if self._kv_buffers.count:
            parts[-1][1].extend(JOIN)
        return parts

    def _launch(self, call: Call | HostCall, sizes: Sizes) -> None:
        if isinstance(call, HostCall):
            call.act(sizes)
            return
        for work in call.launches(sizes):
            self.device.launch(work)

    @staticmethod
    def _where(calls: list[Call], sizes: Sizes) -> str:
        """file:line of the last kernel of these calls."""
        works = [work for call in calls for work in call.launches(sizes) if isinstance(work, Launch)]
        return works[-1].kernel.location if works else "-"

    def _load(self, batch: Batch, entry: str, settings: Mapping[str, np.ndarray] | None = None) -> Sizes:
        """Check the batch, reallocate memory if needed, and send the batch and sampling settings to the device."""
        arrays, rows = self._checked(batch, entry), self._rows(batch)
        counts = (rows["tokens"], rows["logits"], rows["routes"], arrays["lengths"].size)
        needed = {**rows, "sequences": counts[-1],
                  "table": max([array.shape[1] for array in arrays.values() if array.ndim == 2])}
        if (capacity := grown(self._ctx.capacity, needed)) is not None:
            self._ctx.reset(capacity)
            self._bind()
        more = {name: words.reshape(-1).view(np.int32) for name, words in settings.items()} if settings else {}
        if self._ctx.by_length.width:
            more["frequencies"] = self._ctx.by_length.rows(arrays["limits"]).reshape(-1).view(np.int32)
        self._ctx.batch.load(arrays | more, counts)
        self._sizes = Sizes(counts, max(ends(arrays["lengths"])[1], ends(arrays["cross_lengths"])[1]))
        return self._sizes

    def _upload(self, view: View, values: np.ndarray) -> None:
        """Send rows to a buffer. The view begins at the buffer's first column."""
        ref, stride = self._ctx.view(view)
        padded = np.zeros((len(values), stride), np.float32)
        padded[:, :view.width] = values
        self.device.upload(ref, padded)

    def _download(self, view: View, rows: int) -> np.ndarray:
        ref, stride = self._ctx.view(view)
        ref += -4 * view.start
        whole = self.device.download(ref, 4 * rows * stride).view(np.float32).reshape(rows, stride)
        return whole[:, view.start:view.start + view.width].copy()
