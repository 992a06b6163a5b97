"""Context of the binders of ops while a network is bound: device memory, weights, operands, scratch."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import numpy as np

from numflow.cuda.adapters.tables import AdapterTables
from numflow.cuda.batch import BatchMemory
from numflow.cuda.device.call import ROW_FIELD, Prepared, ceil
from numflow.cuda.device.device import Device, Memory, Ref
from numflow.cuda.estimate import planned
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.linear.parameters import AT_ONCE, Late
from numflow.cuda.state.cache import KVCache
from numflow.cuda.state.sequence_state import StateMemory
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.operand import Operand, bind_operand, operand_bytes, padded
from numflow.cuda.weights.pack import upload
from numflow.errors import NetworkError
from numflow.network.by_length import ByLength
from numflow.network.windows import windows
from numflow.ops import Network, View

LANES = 32  # rows of buffers are padded to a multiple of this many elements, 128 bytes


class Weights:
    """The weights of a network in device memory, each loaded on first use. loaded: called with the count so far."""

    def __init__(self, source, device: Device, loaded: Callable[[int], None]):
        self._source, self._device, self._loaded = source, device, loaded
        self.raw, self.f32 = source.raw, source.f32
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Memory] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(m.nbytes for m in self.matrices.values()) + sum(v.nbytes for v in self.vectors.values())

    def matrix(self, name: str) -> Matrix:
        """A matrix in the layout of `linear`."""
        if name not in self.matrices:
            self.matrices[name] = upload(self._source.raw(name), self._device)
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.matrices[name]

    def vector(self, name: str) -> Ref:
        """A weight as C-contiguous float32."""
        if name not in self.vectors:
            array = np.ascontiguousarray(self._source.f32(name), np.float32)
            memory = self._device.alloc(array.nbytes)
            self._device.upload(memory.at(), array)
            self.vectors[name] = memory
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.vectors[name].at()


class Context:
    """The shared context of all binders of one program.

    device:      of the program.             batch: the batch in device memory (batch.py).
    caches:      KVCache by name.            activations: "int8", "fp8" or "f32" (program.py).
    world, index: the World of a plan with several devices, and the index of this device; None without a plan.
    host_embeddings: whether embedding tables stay in host memory. kv_buffers: device buffers of KV caches that are in
                 host memory (cache_host.py).
    by_length:   rotary frequencies that depend on the length of a sequence.
    adapters:    LoRA matrices of the adapters that rows of a batch may use.
    capacity:    rows of each kind that buffers are allocated for; "sequences"; "table": blocks of a sequence.
    """

    def __init__(self, network: Network, device: Device, weights: Weights, caches: dict[str, KVCache],
                 capacity: dict[str, int], activations: str, world=None, index: int = 0,
                 host_embeddings: bool = False, kv_buffers=None, states: Mapping[str, StateMemory] | None = None):
        self.network, self.device, self.weights, self.caches = network, device, weights, caches
        self.states = states or {}
        self.activations, self.world, self.index = activations, world, index
        self.host_embeddings, self.kv_buffers = host_embeddings, kv_buffers
        self.by_length, self.adapters = ByLength(network, weights.f32), AdapterTables(network, device)
        self.vector = weights.vector
        self._memory: list[Memory] = []
        self.spare: dict[Hashable, deque] = defaultdict(deque)  # memory of exchanged values (exchange.py)
        self.reset(capacity)

    def reset(self, capacity: dict[str, int]) -> None:
        """Allocate buffers for `capacity` rows of each kind. All steps must be bound again afterwards."""
        for memory in self._memory:
            self.device.free(memory)
        if self._memory:
            self.batch.free()
        self._memory, self.capacity = [], capacity
        self.batch = BatchMemory(self.device, capacity, self.by_length.width, windows(self.network))
        self._buffers = {buffer.name: self._alloc(4 * capacity[buffer.rows] * self.stride(buffer.width))
                         for buffer in self.network.buffers.values()}
        self._scratch: dict[tuple[str, int], Ref] = {}

    def matrix(self, name: str) -> Matrix:
        """A matrix in the layout of `linear`.

        Raises:
            NetworkError: its kind is not the one that the network's types imply, which decided the fusion of steps.
        """
        found, weight = self.weights.matrix(name), self.network.weights[name]
        if found.kind != (plan := planned(weight)).kind or bool(found.outliers) > bool(plan.outliers):
            raise NetworkError(f"matrix {name!r} is stored as {found.kind}, its types ({', '.join(weight.types)}) "
                               f"imply {plan.kind}")
        return found

    @staticmethod
    def stride(width: int) -> int:
        """Elements from one row of a buffer to the next."""
        return ceil(width, LANES) * LANES

    def view(self, view: View) -> Rows:
        """Address of a view's first element, and the elements from one row to the next."""
        return Rows(self._buffers[view.buffer] + 4 * view.start, self.stride(self.network.buffers[view.buffer].width))

    def rows(self, view: View) -> int:
        """Index into `counts` of the number of rows of a view."""
        return ROW_FIELD[self.network.buffers[view.buffer].rows]

    def room(self, view: View) -> int:
        """Number of rows that a view's buffer is allocated for."""
        return self.capacity[self.network.buffers[view.buffer].rows]

    def scratch(self, name: str, nbytes: int) -> Ref:
        """Scratch memory, shared by all steps that ask for the same name and size. Steps run one after the other."""
        if (name, nbytes) not in self._scratch:
            self._scratch[name, nbytes] = self._alloc(nbytes)
        return self._scratch[name, nbytes]

    def operand(self, view: View, kind: str, runs: str = "all") -> Operand:
        """A view as a matrix operand of a kind of operand.py, and the call that makes the operand (Call.makes).

        kind "rows": float32 rows aligned to 16 bytes, with any stride. That is usually the view itself, without a call.
        runs: name of the runs in which the calls take part; the binder leaves them out of other runs.
        """
        is_padded = view.start % 4 == 0 and view.width == padded(view.width)
        x, stride = self.view(view)
        if is_padded and (kind == "rows" or (kind == "f32" and stride == view.width)):
            return Operand(kind, x, None, stride, ())
        kind = "f32" if kind == "rows" else kind
        x, aux = self.place(view, kind)
        call = replace(bind_operand(self, view, kind, x, aux), makes=Prepared(view, kind, runs))
        return Operand(kind, x, aux, padded(view.width), (call,))

    def place(self, view: View, kind: str) -> tuple[Ref, Ref | None]:
        """Addresses of a view's operand of a kind: its elements, and its scales and sums (None if it has none)."""
        size, aux_size = operand_bytes(ceil(self.room(view), 8) * 8, view.width, kind)
        x = self.scratch(f"{view} as {kind}", size + aux_size)
        return x, x + size if aux_size else None

    def squares(self, view: View) -> Ref:
        """f32 [rows, width / 32]: sums of squares, from which readers of a view compute its norm's scale
        (linear/unit.py)."""
        return self.scratch(f"squares of {view}", 4 * self.room(view) * (view.width // 32))

    def late(self, view: View, eps: float | None) -> Late:
        """The norm whose scale a reader of a view applies itself; eps None: the view is normalised already."""
        return AT_ONCE if eps is None else Late(self.squares(view), view.width // 32, eps)

    def _alloc(self, nbytes: int) -> Ref:
        self._memory.append(self.device.alloc(nbytes))
        return self._memory[-1].at()
