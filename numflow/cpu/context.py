"""Context of the binders of ops while a network is bound: addresses, packed weights, shared scratch memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from numflow.cpu.adapters.tables import AdapterTables
from numflow.cpu.estimate import planned
from numflow.cpu.exchange.world import World
from numflow.cpu.linear.activations import NAMES, Operand, bind_operand, operand_bytes
from numflow.cpu.linear.operands import bind_made
from numflow.cpu.memory.buffers import Buffers, aligned
from numflow.cpu.runtime.kernel import HEADER_FIELDS, ROW_FIELD, Scratch
from numflow.cpu.state.cache import KVCache
from numflow.cpu.state.sequence_state import StateMemory
from numflow.cpu.weights.layout import Packed
from numflow.cpu.weights.pack import pack
from numflow.cpu.weights.prepared import Prepared
from numflow.errors import NetworkError
from numflow.network.by_length import ByLength
from numflow.network.windows import windows
from numflow.ops import Network, Step, View


class Weights:
    """The weights of a network in the program's memory: matrices packed, all others float32; each loaded once.

    source: the network's WeightSource. loaded: called with the number of weights in memory after each.
    beside: those of another program, which has some of the same matrices in memory already.
    """

    def __init__(self, source, n_threads: int, loaded: Callable[[int], None], beside: "Weights | None" = None):
        self._source, self._n_threads, self._loaded, self._beside = source, n_threads, loaded, beside
        self._theirs: set[str] = set()  # matrices that are the other program's
        self._prepared = Prepared.open(source, n_threads)
        self.matrices: dict[str, Packed] = {}
        self.vectors: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        own = sum(matrix.nbytes for name, matrix in self.matrices.items() if name not in self._theirs)
        return own + sum(v.nbytes for v in self.vectors.values())

    def packed(self, name: str) -> Packed:
        """A matrix in the layout of `linear`."""
        if name not in self.matrices:
            found = self._beside.same(self._source, name) if self._beside is not None else None
            if found is not None:
                self._theirs.add(name)
            elif self._prepared is not None:
                found = self._prepared.take(name)
            self.matrices[name] = found or pack(self._source.raw(name), self._n_threads)
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.matrices[name]

    def same(self, source, name: str) -> Packed | None:
        """A matrix that is, number for number, weight `name` of another source; None: there is none."""
        wanted = _origin(source, name)
        return None if wanted is None else next((matrix for own, matrix in self.matrices.items()
                                                 if _origin(self._source, own) == wanted), None)

    def keep(self) -> None:
        """All are loaded: what had to be packed may be kept for the next start (prepared.py)."""
        if self._prepared is not None:
            self._prepared.keep(self.matrices)

    def vector(self, name: str) -> np.ndarray:
        """A weight as C-contiguous float32."""
        if name not in self.vectors:
            self.vectors[name] = np.ascontiguousarray(self._source.f32(name), np.float32)
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.vectors[name]


def _origin(source, name: str) -> tuple | None:
    """Stored tensors that a weight is as a whole, and what is done to them; None if it is made of chosen rows."""
    weight = source.network.weights[name]
    if weight.constant is not None or any(part.rows is not None for part in weight.parts):
        return None
    stored = tuple((source.checkpoint.tensors[part.tensor].read, replace(part, tensor="")) for part in weight.parts)
    return stored, replace(weight, name="", parts=())


class Context:
    """Everything the binders of one program share.

    header:      address of the batch header.
    activations: "int8", "int16", "bf16" or "f32", what matrices are multiplied with (activations.py: OPERANDS).
    caches:      KVCache by name. states: StateMemory by name.
    world, device: where the devices of a plan meet, and which of them this is; None without a plan.
    by_length:   rotary frequencies that depend on the length of a sequence.
    exact:       whether no number of adapters may be rounded.
    adapters:    matrices that rows of a batch add by adapters of their own.
    """

    def __init__(self, network: Network, weights: Weights, caches: dict[str, KVCache], capacity: dict[str, int],
                 activations: str, n_threads: int, world: World | None = None, device: int = 0,
                 states: dict[str, StateMemory] | None = None, exact: bool = True):
        self.network, self.weights, self.caches, self.states = network, weights, caches, states or {}
        self.activations, self.n_threads, self.world, self.device = activations, n_threads, world, device
        self.by_length, self.adapters = ByLength(network, weights.vector), AdapterTables(network, exact)
        self.header_fields = aligned(HEADER_FIELDS + 2 * len(windows(network)), np.int64)
        self.header = self.header_fields.ctypes.data
        self.vector = weights.vector
        self.reset(capacity)

    def reset(self, capacity: dict[str, int]) -> None:
        """Allocate buffers for so many rows of each kind; everything is to be bound anew."""
        self.capacity, self.buffers = capacity, Buffers(self.network, capacity)
        self._scratch: dict[tuple[str, int], np.ndarray] = {}

    def packed(self, name: str) -> Packed:
        """A matrix in the layout of `linear`.

        Raises:
            NetworkError: it is not in the form that the network's types tell, by which steps are grouped.
        """
        found, form = self.weights.packed(name), planned(self.network.weights[name])
        if (found.kind, found.outliers is None) != (form.kind, form.outliers is None):
            types = ", ".join(self.network.weights[name].types)
            raise NetworkError(f"matrix {name!r} is packed as {found.kind}, its types ({types}) tell {form.kind}")
        return found

    def view(self, view: View) -> tuple[int, int]:
        """Address of a view's first element, and elements from one row to the next."""
        return self.buffers.address(view), self.buffers.stride(view)

    def strided(self, name: str, view: View) -> dict[str, Any]:
        """The same as values of the slots `name` and `name`_stride."""
        address, stride = self.view(view)
        return {name: address, f"{name}_stride": stride}

    def state_slots(self, name: str, state: str) -> dict[str, Any]:
        """A state as values of the slots `name` and `name`_stride: where its address stands, bytes of a slot."""
        memory = self.states[state]
        return {name: memory.addresses, f"{name}_stride": memory.stride}

    def rows(self, view: View) -> int:
        """The header field that counts the rows of a view."""
        return ROW_FIELD[self.network.buffers[view.buffer].rows]

    def room(self, view: View) -> int:
        """Rows of a view there is room for."""
        return self.capacity[self.network.buffers[view.buffer].rows]

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """Zeroed memory that all steps asking for this name and size share; steps run one after the other."""
        return Scratch(name, self._scratch.setdefault((name, nbytes), aligned(nbytes, np.uint8)))

    def operand(self, view: View, kind: int, maker: Step | None = None) -> Operand:
        """A view as an operand, and the call that makes it (Call.makes).

        maker: the step that computes the view, to be done while the operand is made.
        """
        x_bytes, aux_bytes = operand_bytes(self.room(view), view.width, kind)
        x = self.scratch(f"{view} as {NAMES[kind]}", x_bytes + aux_bytes)
        aux = x._replace(array=x.array[x_bytes:]) if aux_bytes else 0
        if maker is not None:
            call = bind_made(maker, self, x, aux, kind)
        else:
            call = bind_operand(self.header, self.rows(view), *self.view(view), view.width, x, aux, kind)
        read = aux._replace(written=False) if isinstance(aux, Scratch) else aux
        return Operand(x._replace(written=False), read, (replace(call, makes=(view, kind)),))
