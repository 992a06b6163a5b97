"""Context of the binders of ops: addresses of views, packed weights, shared scratch memory."""

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
    """The weights of a network in memory: matrices packed, all others float32; each is loaded once, on first use.

    source: the network's WeightSource.
    loaded: called with the number of weights in memory after each.
    beside: weights of another program, whose equal matrices are shared.
    spread: grid types have a code per weight.
    """

    def __init__(self, source, n_threads: int, loaded: Callable[[int], None], beside: "Weights | None" = None,
                 spread: bool = False):
        self._source, self._n_threads, self._loaded, self._beside = source, n_threads, loaded, beside
        self._shared: set[str] = set()  # matrices that belong to the other program
        self._prepared, self.spread = Prepared.open(source, n_threads, spread), spread
        self.matrices: dict[str, Packed] = {}
        self.vectors: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        matrix_bytes = sum(matrix.nbytes for name, matrix in self.matrices.items() if name not in self._shared)
        return matrix_bytes + sum(v.nbytes for v in self.vectors.values())

    def packed(self, name: str) -> Packed:
        """A matrix in the layout of `linear`."""
        if name not in self.matrices:
            matrix = self._beside.same(self._source, name) if self._beside is not None else None
            if matrix is not None:
                self._shared.add(name)
            elif self._prepared is not None:
                matrix = self._prepared.take(name)
            self.matrices[name] = matrix or pack(self._source.raw(name), self._n_threads, self.spread)
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.matrices[name]

    def same(self, source, name: str) -> Packed | None:
        """A matrix that has the same origin as weight `name` of another source, or None."""
        wanted = _origin(source, name)
        return None if wanted is None else next((matrix for candidate, matrix in self.matrices.items()
                                                 if _origin(self._source, candidate) == wanted), None)

    def keep(self) -> None:
        """Store packed matrices on disk for the next start (prepared.py); called when all weights are loaded."""
        if self._prepared is not None:
            self._prepared.keep(self.matrices)

    def vector(self, name: str) -> np.ndarray:
        """A weight as C-contiguous float32."""
        if name not in self.vectors:
            self.vectors[name] = np.ascontiguousarray(self._source.f32(name), np.float32)
            self._loaded(len(self.matrices) + len(self.vectors))
        return self.vectors[name]


def _origin(source, name: str) -> tuple | None:
    """Stored tensors of a weight and how the weight is made of them; None if it has only some of their rows."""
    weight = source.network.weights[name]
    if weight.constant is not None or any(part.rows is not None for part in weight.parts):
        return None
    stored = tuple((source.checkpoint.tensors[part.tensor].read, replace(part, tensor="")) for part in weight.parts)
    return stored, replace(weight, name="", parts=())


class Context:
    """Everything that the binders of one program share.

    header:      address of the batch header.
    activations: key of activations.OPERANDS: "int8", "int16", "auto", "bf16" or "f32".
    caches:      KVCache by name. states: StateMemory by name.
    world, device: the world of a plan's devices and this device's index; None without a plan.
    by_length:   rotary frequencies that depend on the length of a sequence.
    exact:       whether matrices of adapters stay float32, without rounding.
    adapters:    matrices of the adapters of sequences.
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
        """Allocate buffers for the given number of rows of each kind; all steps must be bound again."""
        self.capacity, self.buffers = capacity, Buffers(self.network, capacity)
        self._scratch: dict[tuple[str, int], np.ndarray] = {}

    def packed(self, name: str) -> Packed:
        """A matrix in the layout of `linear`.

        Raises:
            NetworkError: its scheme is not the one that the network's types imply, which decided the groups of steps.
        """
        packed, plan = self.weights.packed(name), planned(self.network.weights[name], self.weights.spread)
        if (packed.kind, packed.outliers is None) != (plan.kind, plan.outliers is None):
            types = ", ".join(self.network.weights[name].types)
            raise NetworkError(f"matrix {name!r} is packed as {packed.kind}, its types ({types}) tell {plan.kind}")
        return packed

    def view(self, view: View) -> tuple[int, int]:
        """Address of a view's first element, and its row stride in elements."""
        return self.buffers.address(view), self.buffers.stride(view)

    def strided(self, name: str, view: View) -> dict[str, Any]:
        """The same, as values of the slots `name` and `name`_stride."""
        address, stride = self.view(view)
        return {name: address, f"{name}_stride": stride}

    def state_slots(self, name: str, state: str) -> dict[str, Any]:
        """A state as values of the slots `name` and `name`_stride: the array with its address, bytes of a slot."""
        memory = self.states[state]
        return {name: memory.addresses, f"{name}_stride": memory.stride}

    def rows(self, view: View) -> int:
        """The header field that counts the rows of a view."""
        return ROW_FIELD[self.network.buffers[view.buffer].rows]

    def max_rows(self, view: View) -> int:
        """Capacity in rows of a view."""
        return self.capacity[self.network.buffers[view.buffer].rows]

    def scratch(self, name: str, nbytes: int) -> Scratch:
        """Zeroed memory shared by all steps that ask for this name and size; dependent steps have a barrier between."""
        return Scratch(name, self._scratch.setdefault((name, nbytes), aligned(nbytes, np.uint8)))

    def operand(self, view: View, kind: int, maker: Step | None = None) -> Operand:
        """A view as an operand, with the call that makes it (Call.makes).

        maker: the step that computes the view, if it is fused with the making of the operand.
        """
        x_bytes, aux_bytes = operand_bytes(self.max_rows(view), view.width, kind)
        x = self.scratch(f"{view} as {NAMES[kind]}", x_bytes + aux_bytes)
        aux = x._replace(array=x.array[x_bytes:]) if aux_bytes else 0
        if maker is not None:
            call = bind_made(maker, self, x, aux, kind)
        else:
            call = bind_operand(self.header, self.rows(view), *self.view(view), view.width, x, aux, kind)
        read = aux._replace(written=False) if isinstance(aux, Scratch) else aux
        return Operand(x._replace(written=False), read, (replace(call, makes=(view, kind)),))
