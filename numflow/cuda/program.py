"""Runs a network on a GPU, or on the simulator of one: its steps bound to device memory and kernels."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from numflow.cuda.bind import bind
from numflow.cuda.context import Context, Weights
from numflow.cuda.device.call import N_LOGIT_ROWS, Call, Sizes
from numflow.cuda.device.device import Device, Launch
from numflow.cuda.device.gpu import chosen_device, open_device
from numflow.cuda.estimate import KV_TYPES
from numflow.cuda.exchange.exchange import HostCall, World
from numflow.cuda.exchange.nccl import CHOICES
from numflow.cuda.graphs import Graphs, is_decode, rounded
from numflow.cuda.patterns import Together, together
from numflow.cuda.sample.sample import best, follow, follow_drawn, pick
from numflow.cuda.state.cache import KVCache
from numflow.cuda.state.cache_host import JOIN, Rooms, on_host
from numflow.cuda.state.matrix_state import slot_numbers
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


class Program(OneDevice):
    """A network bound to a device.

    weights:     the network's WeightSource.
    activations: "int8": quantised matrices meet int8 activations; "f32": exact float32 arithmetic everywhere; "fp8": as
                 "int8", and more than 64 tokens meet matrices of 8-bit floats as 8-bit floats, each token with a scale
                 of its own, on cards of compute capability 8.9, 9.0 and 12.x; "nvfp4": as "fp8", and such tokens meet
                 matrices of NVFP4 and MXFP4 as 4-bit floats with scales of blocks, on cards of 12.x.
    threads:     accepted because every executor has it; a GPU has its own.
    block_size:  tokens per KV block.
    kv_type:     one of estimate.KV_TYPES or "auto" (f32 with activations "f32", else f16); kv_k, kv_v: of K or V alone.
    rows:        tokens of a batch there is room for at first; larger batches make the program grow.
    fused:       let kernels do neighbouring steps together (patterns.py); numbers may differ in their last bits.
    units:       also where blocks must own 32 neighbouring results for that (linear/unit.py).
    gpu:         a Device, or the name of one: "gpu", "simulator", or "auto": what $NUMFLOW_CUDA says, else the GPU.
    host_embeddings: keep the table of tokens' embeddings in the host's memory, as the file has it; its rows are brought
                 for each batch.
    host_kv_percent: share of the layers whose keys and values are in pinned memory of the host; what a batch reads of
                 them is copied to the device while other layers are computed (cache_host.py).
    state_type:  type of matrix states: of quant.state.STATE_TYPES, or "auto" for what the network says.
    world, device: of a plan with several devices, where they meet and which of them this is. Devices beyond the GPUs
                 there are share them, each with a stream and memory of its own.
    collectives: how the devices of a group sum and gather: "copies" from GPU to GPU, "nccl", or "auto": NCCL where it
                 is installed and each device has a card of its own. Its sums may be rounded in another order.
    progress:    called as progress("weights", done, total) while the program is made.

    Raises:
        RequestError, DeviceError: an option is out of range, or there is no such device.
        NetworkError, FormatError: a weight cannot be had.
    """

    threads, can = None, frozenset({SAMPLE, TRACE, ADAPT})  # and DECODE, where the host takes no part in a step

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
        number = device if world is None else world.numbers[device]
        self.device = open_device(gpu, number) if isinstance(gpu, str) else gpu
        if activations == "fp8" and not self.device.float8:
            raise DeviceError(f"{option('activations')} fp8 needs a GPU of compute capability 8.9, 9.0 or 12.x (RTX 40 "
                              "and 50, L40S, H100), whose tensor cores multiply 8-bit floats in kernels here; int8 "
                              "takes such matrices as float16")
        if activations == "nvfp4" and not self.device.float4:
            raise DeviceError(f"{option('activations')} nvfp4 needs a GPU of compute capability 12.x (RTX 50), whose "
                              "tensor cores multiply 4-bit floats in kernels here; int8 takes such matrices as float16")
        if world is not None:
            world.join(device, self.device, network, collectives)
        self.activations = activations
        report = progress or (lambda what, done, total: None)
        self._weights = Weights(weights, self.device, lambda done: report("weights", done, len(network.weights)))
        hosted, windows = on_host(len(network.caches), host_kv_percent), cache_windows(network)
        self._caches = {name: KVCache(self.device, cache, block_size, *kinds, index in hosted, windows.get(name, 0))
                        for index, (name, cache) in enumerate(network.caches.items())}
        plain = {name for name, cache in self._caches.items() if not cache.host and {*cache.types} <= {"f32", "f16"}}
        self._together = {entry: together(network, entry, activations, plain, units) if fused else Together()
                          for entry in network.entries}
        capacity = {"tokens": rows, "logits": 8, "routes": rows * self._routes, "sequences": 8, "table": 8}
        for cache in self._caches.values():
            cache.resize(0)
        states = {name: StateMemory(self.device, state, numbers)
                  for name, (state, numbers) in slot_numbers(network, state_type).items()}
        self._states = states
        self._rooms = Rooms(self.device, network, self._caches)
        self._graphs = Graphs(self.device)
        self._ctx = Context(network, self.device, self._weights, self._caches, capacity, activations, world,
                            device, host_embeddings, self._rooms, states)
        self._bind()
        if world is None and not (host_embeddings or hosted):
            self.can |= {DECODE}

    @classmethod
    def quantiser(cls, gpu: Device | str = "auto", device: int = 0) -> Quantiser | None:
        """A GPU's search for what weights are quantised to; the simulator leaves that to the processors, which take a
        thousandth of its time."""
        if isinstance(gpu, str) and chosen_device(gpu) == "simulator":
            return None
        return Quantiser(lambda: open_device(gpu, device) if isinstance(gpu, str) else gpu, isinstance(gpu, str))

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in device memory, and of adapters."""
        return self._weights.nbytes + self._ctx.adapters.nbytes

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels that a single token uses."""
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
        """A token for each wanted row, picked as its choice says; see executor.contract.Program."""
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
        """See executor.contract.Program: the device makes the batch of each next step, Python waits for the last."""
        end, rows = self._end(entry, "logits"), len(batch.logit_rows)
        what, choose, settings = "steps", follow, None
        if choices is not None:
            what, choose = "drawn steps", follow_drawn
            settings = {"choices": encode(choices, rows), "draws": draws(choices, steps, MOST_STEPS)}
        sizes = self._load(batch, entry, settings)
        self._last.check_ahead(batch, steps, MOST_STEPS, self._limits[entry], self.block_size)
        ctx, logits = self._ctx, self.network.outputs["logits"]
        for _ in range(steps):
            self._walk((entry, end, what), Sizes(sizes.rows, sizes.keys + steps - 1), lambda: choose(ctx, logits))
        self.device.synchronize()
        self._last.went_on(batch, steps - 1, on_copy=True)
        return ctx.batch.chosen_by_step(steps, rows)

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """The same run step by step, waiting for each; one TraceRow per step."""
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
        self.adapters = self._ctx.adapters.numbers
        if moved:  # launches hold addresses
            self._ctx.reset(self._ctx.capacity)
            self._bind()

    def bound(self, entry: str) -> list[tuple[Step, list[Call]]]:
        """The steps of an entry with their calls, as they are bound now."""
        return self._bound[entry]

    def launches(self, sizes: Sizes) -> list[Launch]:
        """Launches for a batch of these sizes, all entries one after the other."""
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
        """Caches lie elsewhere now, and rooms beside them must hold as much."""
        self._rooms.resize()
        self._bind()

    def _bind(self) -> None:
        """Bind every entry to the memory as it is now."""
        self._graphs.clear()
        self._parts: dict[tuple, list[tuple[bool, list[Call | HostCall]]]] = {}
        self._bound = {entry: bind(steps, self._ctx, self._together[entry])
                       for entry, steps in self.network.entries.items()}

    def _walk(self, what: tuple, sizes: Sizes, choose: Callable[[], Call] | None = None) -> None:
        """Run an entry up to an end, what[:2], and what chooses tokens behind it; of decode steps, the calls between
        two that the host takes part in are a graph."""
        if what not in self._parts:
            self._parts[what] = self._cut(what, choose)
        parts = self._parts[what]
        graphs = self.device.graphs and is_decode(sizes)
        if self._rooms.count:  # a graph must have both queues to their end
            graphs = graphs and sum(not by_host for by_host, _ in parts) == 1
        for number, (by_host, some) in enumerate(parts):
            if graphs and not by_host:
                self._graphs.run((*what, number), some, rounded(sizes, self._routes))
                continue
            for call in some:
                self._launch(call, sizes)

    def _cut(self, what: tuple, choose: Callable[[], Call] | None) -> list[tuple[bool, list[Call | HostCall]]]:
        """The calls of an entry up to an end, cut into those of the host and those of the device."""
        entry, end, *_ = what
        calls = [call for _, part in self._bound[entry][:end] for call in part]
        calls += [choose()] if choose else []
        parts = [(by_host, list(some)) for by_host, some in groupby(calls, lambda call: isinstance(call, HostCall))]
        if self._rooms.count:
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
        """file:line of the last kernel."""
        works = [work for call in calls for work in call.launches(sizes) if isinstance(work, Launch)]
        return works[-1].kernel.location if works else "-"

    def _load(self, batch: Batch, entry: str, settings: Mapping[str, np.ndarray] | None = None) -> Sizes:
        """Check the batch, make room for it and bring it to the device, with how tokens are drawn."""
        arrays, rows = self._checked(batch, entry), self._rows(batch)
        sequences, limits = arrays["lengths"].size, arrays["limits"]
        counts = (rows["tokens"], rows["logits"], rows["routes"], sequences)
        needed = {**rows, "sequences": sequences,
                  "table": max(array.shape[1] for array in arrays.values() if array.ndim == 2)}
        if (capacity := grown(self._ctx.capacity, needed)) is not None:
            self._ctx.reset(capacity)
            self._bind()
        arrays = {name: array for name, array in arrays.items() if name != "limits"}
        if self._ctx.by_length.width:
            arrays["frequencies"] = self._ctx.by_length.rows(limits).reshape(-1).view(np.int32)
        for name, words in (settings or {}).items():
            arrays[name] = words.reshape(-1).view(np.int32)
        self._ctx.batch.load(arrays, counts)
        self._sizes = Sizes(counts, max(ends(arrays["lengths"])[1], ends(arrays["cross_lengths"])[1]))
        return self._sizes

    def _upload(self, view: View, values: np.ndarray) -> None:
        """Bring rows to a buffer of which the view is the beginning."""
        ref, stride = self._ctx.view(view)
        padded = np.zeros((len(values), stride), np.float32)
        padded[:, :view.width] = values
        self.device.upload(ref, padded)

    def _download(self, view: View, rows: int) -> np.ndarray:
        ref, stride = self._ctx.view(view)
        ref += -4 * view.start
        whole = self.device.download(ref, 4 * rows * stride).view(np.float32).reshape(rows, stride)
        return whole[:, view.start:view.start + view.width].copy()
