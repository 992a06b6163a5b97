"""Matrices of adapters in memory, and the tables by which kernels find them.

Each step has a table of entries, int64 [adapters, experts, 5]: the address of A, that of B, the rank, the addresses of
two vectors or 0. Where an adapter changes nothing, the rank is 0 and there is no vector. Ranks are multiples of 4:

    A     f32 [r][K]           zeros below its own rows; of a look-up [V][r]
    B     f32 [N / 16][r][16]  rows 16 t .. 16 t + 15 side by side, zeros beyond N
    bias  f32 [N / 16][16]
    scale f32 [N / 16][16]     of the base's product
"""

from dataclasses import dataclass

import numpy as np

from numflow.cpu.memory.buffers import aligned
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.ops import ADAPTING, Network, Step

A, B, RANK, BIAS, SCALE = range(5)
FIELDS, TILE, RANKS = 5, 16, 4
_FEWEST = 4  # adapters there is room for at first


@dataclass(frozen=True)
class _Packed:
    """The matrices of an AdaptedPart, as kernels read them."""

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None
    scale: np.ndarray | None
    rank: int

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + sum(v.nbytes for v in (self.bias, self.scale) if v is not None)

    def entry(self) -> tuple[int, ...]:
        """The words of the table."""
        vectors = (0 if vector is None else vector.ctypes.data for vector in (self.bias, self.scale))
        return self.a.ctypes.data, self.b.ctypes.data, self.rank, *vectors


class AdapterTables:
    """The tables of a program, by the part of each step, and what they point to.

    numbers: of adapters there is room for. ranks: the largest of any adapter.
    """

    def __init__(self, network: Network):
        steps = [step for steps in network.entries.values() for step in steps if step.op in ADAPTING]
        self._experts = {step.params["part"]: _experts(network, step) for step in steps}
        self._rows = {step.params["part"] for step in steps if step.op == "adapt_rows"}
        self.numbers, self.ranks = _FEWEST if steps else 0, RANKS
        self._packed: dict[int, dict[str, list[_Packed | None]]] = {}
        self._tables = {part: self._empty(part) for part in self._experts}

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(one.nbytes for own in self._packed.values() for some in own.values() for one in some if one)

    def table(self, part: str) -> np.ndarray:
        """Entries of a step."""
        return self._tables[part]

    def put(self, number: int, parts: AdaptedParts | None) -> bool:
        """Let adapter `number` have these matrices. Returns whether tables have moved or ranks have grown, so that
        steps have to be bound anew."""
        moved = number >= self.numbers
        if moved:
            self.numbers = max(number + 1, 2 * self.numbers)
            old, self._tables = self._tables, {part: self._empty(part) for part in self._experts}
            for part, table in old.items():
                self._tables[part][:len(table)] = table
        for table in self._tables.values():
            table[number] = 0
        self._packed.pop(number, None)
        own = self._packed.setdefault(number, {}) if parts else {}
        for part, some in ((part, some) for part, some in (parts or {}).items() if part in self._tables):
            own[part] = [None if one is None else _packed(one, part in self._rows) for one in some]
            for expert, packed in enumerate(own[part]):
                if packed is not None:
                    self._tables[part][number, expert] = packed.entry()
        most = max((one.rank for some in own.values() for one in some if one), default=0)
        moved, self.ranks = moved or most > self.ranks, max(most, self.ranks)
        return moved

    def _empty(self, part: str) -> np.ndarray:
        return np.zeros((self.numbers, self._experts[part], FIELDS), np.int64)


def _experts(network: Network, step: Step) -> int:
    """Matrices that the part of a step has."""
    if len(step.inputs) < 3:
        return 1
    return network.weights[step.params["part"]].groups


def _packed(part: AdaptedPart, rows: bool) -> _Packed:
    """rows: A is looked up by rows."""
    rank = part.b.shape[1]
    ranks, tiles = -(-rank // RANKS) * RANKS, -(-len(part.b) // TILE)
    a = aligned((len(part.a), ranks) if rows else (ranks, part.a.shape[1]), np.float32)
    a[:] = 0
    a[:len(part.a), :part.a.shape[1]] = part.a
    b = aligned((tiles, ranks, TILE), np.float32)
    b[:] = 0
    b[:, :rank] = _tiles(part.b, tiles).transpose(0, 2, 1)
    return _Packed(a, b, _vector(part.bias, tiles), _vector(part.scale, tiles), ranks)


def _vector(values: np.ndarray | None, tiles: int) -> np.ndarray | None:
    if values is None:
        return None
    vector = aligned((tiles, TILE), np.float32)
    vector[:] = _tiles(values[:, None], tiles)[..., 0]
    return vector


def _tiles(values: np.ndarray, tiles: int) -> np.ndarray:
    """[N, r] as [tiles, 16, r], zeros beyond N."""
    whole = np.zeros((tiles * TILE, values.shape[1]), np.float32)
    whole[:len(values)] = values
    return whole.reshape(tiles, TILE, -1)
