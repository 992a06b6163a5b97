"""Matrices of adapters in memory, the tables by which kernels find them, and the rows of a batch by their adapters.

Each step has a table of entries, int64 [adapters, experts, 7]: the address of A, that of B, the rank, the addresses of
two vectors or 0, whether A and B are float16, and a factor as float64 bits. Where an adapter changes nothing, the rank
is 0 and there is no vector. Ranks are multiples of 4:

    A     [r / 4][K / 16][4][16]  zeros below its own rows and beyond K; of a look-up f32 [V][r]
    B     [N / 16][r][16]         rows 16 t .. 16 t + 15 side by side, zeros beyond N
    bias  f32 [N / 16][16]
    scale f32 [N / 16][16]        of the base's product

A and B are float16, times a power of two for each matrix, by which its largest number is close to float16's largest.
The product of both powers is the factor of A x. Programs that compute exactly have them as float32, unless float16
changes no number, as of adapters that were published in float16 or bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numflow.cpu.memory.arena import Arena
from numflow.cpu.memory.buffers import aligned
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.ops import ADAPTING, Network, Step

A, B, RANK, BIAS, SCALE, HALF, FACTOR = range(7)
FIELDS, TILE, RANKS = 7, 16, 4
TILE_WORDS = 1 + 4   # of a tile of rows: the adapter, and up to four rows, -1 for none
_FEWEST = 4          # adapters there is room for at first
_CHUNK = 4 << 20     # bytes of memory that an adapter asks for at a time
_FARTHEST = 40       # power of two by which a matrix may be scaled


@dataclass(frozen=True)
class _Packed:
    """The matrices of an AdaptedPart, as kernels read them."""

    a: np.ndarray
    b: np.ndarray
    bias: np.ndarray | None
    scale: np.ndarray | None
    rank: int
    factor: float

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + sum(v.nbytes for v in (self.bias, self.scale) if v is not None)

    def entry(self) -> tuple[int, ...]:
        """The words of the table."""
        vectors = (0 if vector is None else vector.ctypes.data for vector in (self.bias, self.scale))
        return (self.a.ctypes.data, self.b.ctypes.data, self.rank, *vectors, self.b.dtype == np.float16,
                int(np.float64(self.factor).view(np.int64)))


class AdapterTables:
    """The tables of a program, by the part of each step, and what they point to.

    exact: keep every number of adapters as it is.
    numbers: of adapters there is room for. ranks: the largest of any adapter. inputs: the views x of `adapt`.
    tiles: of the rows of a batch, and of its wanted rows: int64 [2], how many tiles, and the address of `row_tiles`.
    """

    def __init__(self, network: Network, exact: bool):
        steps = [step for steps in network.entries.values() for step in steps if step.op in ADAPTING]
        self._experts = {step.params["part"]: _experts(network, step) for step in steps}
        self._exact = exact
        self.inputs = {step.inputs[0] for step in steps if step.op == "adapt"}
        self._rows = {step.params["part"] for step in steps if step.op == "adapt_rows"}
        self.numbers, self.ranks = _FEWEST if steps else 0, RANKS
        self._packed: dict[int, dict[str, list[_Packed | None]]] = {}
        self._tables = {part: self._empty(part) for part in self._experts}
        self.tiles = aligned(2, np.int64), aligned(2, np.int64)
        self._rows_of: list[np.ndarray] = []

    def batch(self, adapters: Sequence[np.ndarray]) -> None:
        """Let `tiles` be those of a batch. adapters: of its rows, and of its wanted rows."""
        self._rows_of = [row_tiles(numbers) for numbers in adapters] if self._tables else []
        for tiles, found in zip(self.tiles, self._rows_of, strict=False):
            tiles[:] = len(found), found.ctypes.data

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
        own, arena = self._packed.setdefault(number, {}) if parts else {}, Arena(_CHUNK)
        for part, some in ((part, some) for part, some in (parts or {}).items() if part in self._tables):
            own[part] = [None if one is None else _packed(one, part in self._rows, self._exact, arena) for one in some]
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


def row_tiles(adapters: np.ndarray) -> np.ndarray:
    """The rows of each adapter in tiles of up to four: i32 [tiles, 5], the adapter and its rows, -1 for none.

    adapters: i32 [rows], -1 for none.
    """
    order = np.argsort(adapters, kind="stable")
    order = order[adapters[order] >= 0]
    numbers, counts = np.unique(adapters[order], return_counts=True)
    tiles = -(-counts // (TILE_WORDS - 1))
    place = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)  # among its adapter's
    found = np.full((tiles.sum(), TILE_WORDS), -1, np.int32)
    found[:, 0] = np.repeat(numbers, tiles)
    found[np.repeat(np.cumsum(tiles) - tiles, counts) + place // (TILE_WORDS - 1), 1 + place % (TILE_WORDS - 1)] = order
    return found


def _packed(part: AdaptedPart, rows: bool, exact: bool, arena: Arena) -> _Packed:
    """rows: A is looked up by rows."""
    rank = part.b.shape[1]
    ranks, tiles = -(-rank // RANKS) * RANKS, -(-len(part.b) // TILE)
    halves = None if rows else _halves(part.a, part.b, exact)
    a, b, factor = halves or (part.a, part.b, 1.0)
    if rows:
        own = _zeros(arena, (len(a), ranks), a.dtype)
        own[:, :rank] = a
    else:
        columns = -(-a.shape[1] // TILE)
        whole = np.zeros((ranks, columns * TILE), a.dtype)
        whole[:rank, :a.shape[1]] = a
        own = _zeros(arena, (ranks // RANKS, columns, RANKS, TILE), a.dtype)
        own[:] = whole.reshape(ranks // RANKS, RANKS, columns, TILE).transpose(0, 2, 1, 3)
    turned = _zeros(arena, (tiles, ranks, TILE), b.dtype)
    turned[:, :rank] = _tiles(b, tiles).transpose(0, 2, 1)
    return _Packed(own, turned, _vector(part.bias, tiles), _vector(part.scale, tiles), ranks, factor)


def _zeros(arena: Arena, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    return arena.zeros(size).view(dtype).reshape(shape)


def _halves(a: np.ndarray, b: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Both as float16, and the factor of their product; None where numbers are too large or small, or, if they have to
    be exact, would change."""
    found = []
    for values in (a, b):
        most = np.abs(values).max(initial=0)
        power = int(np.frexp(most)[1]) - 15 if np.isfinite(most) else _FARTHEST + 1
        if abs(power) > _FARTHEST:
            return None
        scaled = np.ldexp(values, -power).astype(np.float16)
        if exact and not np.array_equal(np.ldexp(scaled.astype(np.float32), power), values):
            return None
        found.append((scaled, power))
    return found[0][0], found[1][0], 2.0 ** (found[0][1] + found[1][1])


def _vector(values: np.ndarray | None, tiles: int) -> np.ndarray | None:
    if values is None:
        return None
    vector = aligned((tiles, TILE), np.float32)
    vector[:] = _tiles(values[:, None], tiles)[..., 0]
    return vector


def _tiles(values: np.ndarray, tiles: int) -> np.ndarray:
    """[N, r] as [tiles, 16, r], zeros beyond N."""
    whole = np.zeros((tiles * TILE, values.shape[1]), values.dtype)
    whole[:len(values)] = values
    return whole.reshape(tiles, TILE, -1)
