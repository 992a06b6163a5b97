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

LANES = 32  # elements that rows of buffers are a multiple of: 128 bytes


class Weights:
    """The weights of a network in device memory, each loaded once. loaded: called with their number after each."""

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
    """Everything the binders of one program share.

    device:      where the program runs.     batch: the batch in its memory (batch.py).
    caches:      KVCache by name.            activations: "int8", "fp8" or "f32" (program.py).
    world, index: where the devices of a plan meet, and which of them this is; None without a plan.
    host_embeddings: whether tables of tokens stay with the host. rooms: where its caches have theirs (cache_host.py).
    by_length:   rotary frequencies that depend on the length of a sequence.
    adapters:    matrices that rows of a batch add by adapters of their own.
    capacity:    rows of each kind there is room for; of "sequences", and of "table": blocks of a sequence.
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
        """Allocate buffers for so many rows of each kind; everything is to be bound anew."""
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
            NetworkError: it is not in the form that the network's types tell, by which steps are done together.
        """
        found, weight = self.weights.matrix(name), self.network.weights[name]
        if found.kind != (form := planned(weight)).kind or bool(found.outliers) > bool(form.outliers):
            raise NetworkError(f"matrix {name!r} is kept as {found.kind}, its types ({', '.join(weight.types)}) tell "
                               f"{form.kind}")
        return found

    @staticmethod
    def stride(width: int) -> int:
        """Elements from one row of a buffer to the next."""
        return ceil(width, LANES) * LANES

    def view(self, view: View) -> Rows:
        """Place of a view's first element, and the number of elements from one row to the next."""
        return Rows(self._buffers[view.buffer] + 4 * view.start, self.stride(self.network.buffers[view.buffer].width))

    def rows(self, view: View) -> int:
        """The field of the counts that counts the rows of a view."""
        return ROW_FIELD[self.network.buffers[view.buffer].rows]

    def room(self, view: View) -> int:
        """Rows of a view there is room for."""
        return self.capacity[self.network.buffers[view.buffer].rows]

    def scratch(self, name: str, nbytes: int) -> Ref:
        """Memory that all steps asking for this name and size share; steps run one after the other."""
        if (name, nbytes) not in self._scratch:
            self._scratch[name, nbytes] = self._alloc(nbytes)
        return self._scratch[name, nbytes]

    def operand(self, view: View, kind: str, runs: str = "all") -> Operand:
        """A view as an operand of a kind of operand.py, and the call that makes it (Call.makes).

        Kind "rows": float32 rows on 16-byte boundaries, any distance apart: mostly the view itself.

        runs: name of the runs that its calls will take part in, where the binder leaves them out of others.
        """
        whole = view.start % 4 == 0 and view.width == padded(view.width)
        x, stride = self.view(view)
        if whole and (kind == "rows" or (kind == "f32" and stride == view.width)):
            return Operand(kind, x, None, stride, ())
        kind = "f32" if kind == "rows" else kind
        x, aux = self.place(view, kind)
        made = replace(bind_operand(self, view, kind, x, aux), makes=Prepared(view, kind, runs))
        return Operand(kind, x, aux, padded(view.width), (made,))

    def place(self, view: View, kind: str) -> tuple[Ref, Ref | None]:
        """Places of a view's operand of a kind: its numbers x, and their scales and sums if it has any."""
        size, more = operand_bytes(ceil(self.room(view), 8) * 8, view.width, kind)
        x = self.scratch(f"{view} as {kind}", size + more)
        return x, x + size if more else None

    def squares(self, view: View) -> Ref:
        """f32 [rows, width / 32]: sums of squares whose norm the readers of a view take late (linear/unit.py)."""
        return self.scratch(f"squares of {view}", 4 * self.room(view) * (view.width // 32))

    def late(self, view: View, eps: float | None) -> Late:
        """The norm that a reader of a view takes late; None: nothing is late."""
        return AT_ONCE if eps is None else Late(self.squares(view), view.width // 32, eps)

    def _alloc(self, nbytes: int) -> Ref:
        self._memory.append(self.device.alloc(nbytes))
        return self._memory[-1].at()
