"""Program on the CPU: a network's steps bound to memory and compiled kernels, run by threads outside the GIL."""

from collections.abc import Iterator, Sequence

import numpy as np

from numflow.cpu.attention.attention import multiplies_pairs
from numflow.cpu.batch import fill_header, table_fields
from numflow.cpu.bind import Bound
from numflow.cpu.context import Context, Weights
from numflow.cpu.estimate import spread_pays
from numflow.cpu.exchange.exchange import by_host
from numflow.cpu.exchange.world import World
from numflow.cpu.linear.activations import BF16, INT8, INT16, OPERANDS
from numflow.cpu.linear.linear import operand_of
from numflow.cpu.measure.clock import Stamps
from numflow.cpu.patterns import groups
from numflow.cpu.runtime.cores import default_threads
from numflow.cpu.runtime.kernel import ROW_FIELD, Kernel, compile_seconds
from numflow.cpu.runtime.processes import compile_missing
from numflow.cpu.runtime.threads import Threads, shared_threads
from numflow.cpu.sample.sample import picking
from numflow.cpu.state.cache import KVCache
from numflow.cpu.state.matrix_state import slot_bytes
from numflow.cpu.state.sequence_state import StateMemory
from numflow.cpu.steps import SeveralSteps
from numflow.decoding.choice import Choice
from numflow.errors import DeviceError
from numflow.executor.base import OneDevice, check_choice, grown, kv_types
from numflow.executor.contract import ADAPT, DECODE, MOST_STEPS, PROFILE, TRACE, WALK, Progress, TraceRow
from numflow.network.adapters.parts import AdaptedParts
from numflow.network.cost import PRODUCTS, all_floats
from numflow.network.passes.grouping import Group
from numflow.network.windows import cache_windows, windows
from numflow.ops import Batch, Network, Step, View, param

FORMS = ("compact", "fast", "auto")
_WANTED_ROWS = 8  # initial capacity for rows of outputs


class Program(OneDevice):
    """A network bound to the CPU.

    weights:     the network's WeightSource.
    activations: "int8": quantised matrices are multiplied with int8 activations. "int16": with pairs of int8, much
                 closer to float32 arithmetic. "auto": with pairs of int8 in products of wanted rows only, at no cost
                 for prompts, else with int8. "bf16": float matrices are multiplied with bfloat16 activations, both
                 rounded, and quantised matrices with pairs of int8. "f32": with float32 activations.
    threads:     None: one per physical core this process may use.
    block_size:  tokens per KV block, a multiple of 64.
    kv_k, kv_v:  types of cached keys and values, of quant.kv.KV_TYPES, or "auto": f32 with activations "f32", and if
                 all weights are floats and activations are not bf16; f16 with "int16", and for keys that are values
                 too; else bf16.
    state_type:  type of matrix states, of quant.state.STATE_TYPES, or "auto": the network's choice.
    iq:          "compact": weights of GGML's grid types (IQ1, IQ2, IQ3) are as large as in the file. "fast": they have
                 a code per weight, which takes more memory. "auto": "fast" if estimate.spread_pays. Results have the
                 same bits.
    rows:        initial capacity in tokens of a batch; larger batches make the program grow.
    fused:       fuse neighbouring steps (patterns.py); the results have the same bits.
    progress:    called as progress("weights" or "kernels", done, total) while the program is made.
    beside:      a program whose packed matrices are shared where this network has the same ones; its `iq` counts.
    world, device: the world of a plan's devices and this device's index; the program then has threads of its own.

    Raises:
        RequestError, DeviceError: an option is out of range.
        NetworkError, FormatError: a weight cannot be read.
    """

    can = frozenset({DECODE, TRACE, WALK, PROFILE, ADAPT})

    def __init__(self, network: Network, weights, activations: str = "int8", threads: int | None = None,
                 block_size: int = 64, kv_k: str = "auto", kv_v: str = "auto", rows: int = 512,
                 fused: bool = True, progress: Progress | None = None, world: World | None = None, device: int = 0,
                 state_type: str = "auto", iq: str = "auto", beside: "Program | None" = None):
        check_choice("activations", activations, OPERANDS)
        check_choice("iq", iq, FORMS)
        exact = activations == "f32" or (activations != "bf16" and all_floats(network))
        auto = "f32" if exact else "f16" if activations == "int16" else "bf16"
        kv = kv_types(auto, kv_k, kv_v)
        super().__init__(network, block_size)
        self._progress = progress or (lambda what, done, total: None)
        threads, self._world = default_threads() if threads is None else threads, world
        self.pool: Threads = shared_threads(threads) if world is None else Threads(threads)
        n_threads, compiling = self.pool.n_threads, compile_seconds["compiled"]
        self.activations, self.threads = activations, n_threads
        self._alone = world is None  # else devices wait for all threads of each other, so none may be left out
        self._groups = {entry: groups(network, entry, activations) if fused else () for entry in network.entries}
        report = lambda done: self._progress("weights", done, len(network.weights))  # noqa: E731
        shared = None if beside is None else beside._weights
        spread = shared.spread if shared is not None else iq == "fast" or (iq == "auto" and spread_pays(
            network, 1 if world is None else len(world.threads)))
        self._weights: Weights = Weights(weights, n_threads, report, shared, spread)
        window_of, self._tables = cache_windows(network), table_fields(windows(network))
        # Keys that are values too are transposed to float32, so pairs of bfloat16 do not help them.
        prefix_kv = kv_types("f16" if auto == "bf16" else auto, kv_k, kv_v)
        caches = {name: KVCache(cache, block_size, *(prefix_kv if cache.prefix else kv), window_of.get(name, 0),
                                self._tables[window_of.get(name, 0)]) for name, cache in network.caches.items()}
        states = {state.name: StateMemory(state, nbytes) for state, nbytes in slot_bytes(network, state_type).items()}
        self._caches, self._states = caches, states
        capacity = {"tokens": rows, "logits": _WANTED_ROWS, "routes": rows * self._routes}
        self._ctx = Context(network, self._weights, caches, capacity, activations, n_threads, world, device,
                            states, exact)
        self._bind()
        self._weights.keep()
        self.compile_s = compile_seconds["compiled"] - compiling

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights and adapters in memory."""
        return self._weights.nbytes + self._ctx.adapters.nbytes

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels the program uses."""
        return sorted({call.kernel.name for bound in self._bound.values() for call in bound.calls})

    def run(self, batch: Batch, entry: str = "main", output: str | None = "logits",
            wanted: bool = True) -> np.ndarray | None:
        """Run `entry` on the batch, up to the step that completes `output`; see executor.contract.Program.

        The whole table runs in one walk, interrupted only by exchanges with devices of other processes or hosts.
        """
        rows = self._table_rows(entry, output)
        self._load(self._checked(batch, entry), self._given(batch, entry))
        bound, begin = self._bound[entry], 0
        for at, step in bound.by_host:
            if at < rows:
                self.pool.run(bound.table[begin:at], at - begin, self._alone)
                by_host(step, self._ctx)
                begin = at
        self.pool.run(bound.table[begin:], rows - begin, self._alone)
        if self._world is not None and self._world.aborted:
            raise DeviceError("the run was broken off: another device failed")
        return self.result(output) if wanted and output is not None else None

    def decode(self, batch: Batch, steps: int, choices: Sequence[Choice] | None = None,
               entry: str = "main") -> np.ndarray:
        """See executor.contract.Program: the steps are one walk."""
        rows, end, arrays = len(batch.logit_rows), self._table_rows(entry, "logits"), self._checked(batch, entry)
        self._last.check_ahead(batch, steps, MOST_STEPS, self._limits[entry], self.block_size)
        self._load(arrays)
        if entry not in self._several:
            self._several[entry] = SeveralSteps(self._bound[entry].table[:end], self._ctx)
        table = self._several[entry].table(steps, choices, rows)
        self.pool.run(table, len(table), self._alone)
        self._last.went_on(batch, steps - 1)
        return self._several[entry].picked(steps, choices is not None, rows)

    def prepare(self, arrays: dict[str, np.ndarray], entry: str = "main", output: str | None = "logits",
                given: Sequence[tuple[View, np.ndarray]] = ()) -> None:
        """Everything of a run except the walk, which the pool's threads then do themselves (exchange/lockstep.py).

        arrays: of a checked batch (network.batch.checked); they must live until the walk is done. given: input rows of
        the batch; rows of buffers that this program lacks are ignored.
        """
        rows = self._table_rows(entry, output)
        self._load(arrays, [pair for pair in given if pair[0].buffer in self.network.buffers])
        self.pool.hold(self._bound[entry].table, rows)

    def result(self, output: str) -> np.ndarray:
        """Output of the last run, as `run` returns it."""
        view = self.network.outputs[output]
        rows = int(self._ctx.header_fields[self._ctx.rows(view)])
        return self._ctx.buffers.columns(view, rows).copy()

    def trace(self, batch: Batch, entry: str = "main") -> list[TraceRow]:
        """Run with a barrier and a time stamp after every step; one TraceRow per step."""
        self._end(entry, None)
        self._load(self._checked(batch, entry), self._given(batch, entry))
        bound = self._bound[entry]
        stamps = Stamps(bound.table, bound.ends)
        self.pool.run(stamps.table, len(stamps.table))
        return [TraceRow(index, step.label, step.op, self._shapes(step, batch), kernel.location, microseconds,
                         bound.done_by.get(index))
                for index, ((step, _), kernel, microseconds) in enumerate(
                    zip(bound.steps, bound.kernels, stamps.microseconds.tolist(), strict=True))]

    def walk(self, batch: Batch, entry: str = "main", first: int = 0,
             given: tuple[View, np.ndarray] | None = None) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Run step by step; of fused steps the outputs of the last one. See executor.contract.Program."""
        self._end(entry, None)
        self._load(self._checked(batch, entry), self._given(batch, entry))
        rows, bound = self._rows(batch), self._bound[entry]
        if given is not None:
            self._ctx.buffers.columns(given[0], len(given[1]))[:] = given[1]
        roots = [bound.done_by.get(index, index) for index in range(len(bound.ends))]
        last = {root: index for index, root in enumerate(roots)}
        begin = bound.ends[first - 1] if first else 0
        for index, (step, _) in enumerate(bound.steps[first:], first):
            self.pool.run(bound.table[begin:bound.ends[index]], bound.ends[index] - begin)
            begin = bound.ends[index]
            if last[roots[index]] == index:
                yield index, [self._ctx.buffers.columns(view, rows[self.network.buffers[view.buffer].rows]).copy()
                              for view in step.outputs]

    def weight_bytes(self, name: str) -> int:
        """See executor.contract.Program."""
        weights = self._weights.matrices if name in self._weights.matrices else self._weights.vectors
        return weights[name].nbytes

    def arithmetic(self, step: Step) -> str:
        """See executor.contract.Program."""
        if step.op == "attention":
            return "bf16" if multiplies_pairs(self._ctx.caches[param(step, "cache")], self._ctx.activations) else "f32"
        matrix = self._weights.matrices.get(step.weights.get("weight", ""))
        if matrix is None or step.op not in PRODUCTS:
            return "f32"
        return {INT8: "int8", INT16: "int8", BF16: "bf16"}.get(operand_of(matrix, self._ctx.activations), "f32")

    def set_adapter(self, number: int, parts: AdaptedParts | None) -> None:
        """See executor.contract.Program."""
        self._end("main", None)
        self._last.forget()
        moved = self._ctx.adapters.put(number, parts)
        self.adapters = self._ctx.adapters.numbers
        if moved:  # arguments of kernels hold the old addresses
            self._ctx.reset(self._ctx.capacity)
            self._bind()

    def groups(self, entry: str = "main") -> tuple[Group, ...]:
        """See executor.contract.Program."""
        self._end(entry, None)
        return self._groups[entry]

    def _drop(self) -> None:
        self._bound.clear()
        del self._ctx, self._weights, self.pool

    def _bind(self) -> None:
        """Bind every entry to the current buffers."""
        self._loaded: dict[str, np.ndarray] | None = None  # arrays that the header points to
        self._several: dict[str, SeveralSteps] = {}
        self._bound = {entry: Bound(steps, self._ctx, self._groups[entry])
                       for entry, steps in self.network.entries.items()}
        picked = [picking()] if "logits" in self.network.outputs else []
        wanted = dict.fromkeys([*(call.kernel for bound in self._bound.values() for call in bound.calls), *picked])
        ready: set[Kernel] = set()

        def is_ready(kernel: Kernel) -> None:
            ready.add(kernel)
            self._progress("kernels", len(ready), len(wanted))

        compile_missing(wanted, self.pool.n_threads, is_ready)
        for bound in self._bound.values():
            bound.compile(is_ready)
        for kernel in picked:
            kernel.prepare()
            is_ready(kernel)

    def _table_rows(self, entry: str, output: str | None) -> int:
        """Table rows to walk."""
        steps = self._end(entry, output)
        return self._bound[entry].ends[steps - 1] if steps else 0

    def _load(self, arrays: dict[str, np.ndarray], given: Sequence[tuple[View, np.ndarray]] = ()) -> None:
        """Grow for a batch if needed and fill the header with the addresses of its arrays, whose content may change
        later.

        given: input rows of the batch.
        """
        if arrays is not self._loaded:
            self._fill(arrays)
        for view, rows in given:
            self._ctx.buffers.columns(view, len(rows))[:] = rows

    def _fill(self, arrays: dict[str, np.ndarray]) -> None:
        self._frequencies = self._ctx.by_length.rows(arrays["limits"])  # kept alive: the header has the address
        fill_header(self._ctx.header_fields, arrays, self._frequencies, self._routes, self._tables)
        self._ctx.adapters.batch((arrays["adapters"], arrays["wanted_adapters"]))
        needed = {rows: int(self._ctx.header_fields[field]) for rows, field in ROW_FIELD.items()}
        if (capacity := grown(self._ctx.capacity, needed)) is not None:
            self._ctx.reset(capacity)
            self._bind()
        self._loaded = arrays
