"""Matrices of adapters in memory, the tables with which kernels find them, and the rows of a batch grouped by adapter.

Each step has a table of entries, int64 [adapters, experts, 7]: address of A, address of B, rank, addresses of bias and
scale or 0, whether A and B are float16, and a factor as float64 bits. If an adapter does not change the step's product,
the rank is 0 and there are no vectors. Ranks are padded to multiples of 4:

    A     [r / 4][K / 16][4][16]  padded with zeros; for a look-up of rows f32 [V][r]
    B     [N / 16][r][16]         rows 16 t .. 16 t + 15 interleaved, padded with zeros
    bias  f32 [N / 16][16]
    scale f32 [N / 16][16]        of the base's product

A and B are float16 times a power of two per matrix, which brings its largest element close to the largest float16. The
product of both powers is the factor of A x. Programs with exact arithmetic have A and B as float32, unless float16
represents all elements exactly, as with adapters that were published in float16 or bfloat16.
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
TILE_WORDS = 1 + 4   # words of a tile of rows: the adapter, and up to four rows, -1 for none
_FEWEST = 4          # initial capacity in adapters
_CHUNK = 4 << 20     # bytes of memory that an adapter allocates at a time
_FARTHEST = 40       # largest exponent of the power of two by which a matrix may be scaled


@dataclass(frozen=True)
class _Packed:
    """The matrices of an AdaptedPart in the layout of the kernels."""

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
        """The entry in the table."""
        vectors = (0 if vector is None else vector.ctypes.data for vector in (self.bias, self.scale))
        return (self.a.ctypes.data, self.b.ctypes.data, self.rank, *vectors, self.b.dtype == np.float16,
                int(np.float64(self.factor).view(np.int64)))


class AdapterTables:
    """The tables of a program, by the part of each step, and the matrices that they point to.

    exact:   whether elements of adapters must not be rounded.
    numbers: capacity in adapters. ranks: largest rank of all adapters. inputs: the views x of `adapt` steps.
    tiles:   for the rows of a batch, and for its wanted rows: int64 [2], number of tiles and address of `row_tiles`.
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
        """Set `tiles` for a batch. adapters: adapter index of each row, and of each wanted row."""
        self._rows_of = [row_tiles(indices) for indices in adapters] if self._tables else []
        for tiles, words in zip(self.tiles, self._rows_of, strict=False):
            tiles[:] = len(words), words.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrices.nbytes for adapter in self._packed.values() for experts in adapter.values()
                   for matrices in experts if matrices)

    def table(self, part: str) -> np.ndarray:
        """Entries of the part of a step."""
        return self._tables[part]

    def put(self, number: int, parts: AdaptedParts | None) -> bool:
        """Set the matrices of adapter `number`. Returns whether tables have moved or ranks have grown, so that steps
        must be bound again."""
        moved = number >= self.numbers
        if moved:
            self.numbers = max(number + 1, 2 * self.numbers)
            old, self._tables = self._tables, {part: self._empty(part) for part in self._experts}
            for part, table in old.items():
                self._tables[part][:len(table)] = table
        for table in self._tables.values():
            table[number] = 0
        self._packed.pop(number, None)
        adapter, arena = self._packed.setdefault(number, {}) if parts else {}, Arena(_CHUNK)
        for part, experts in ((part, experts) for part, experts in (parts or {}).items() if part in self._tables):
            adapter[part] = [None if matrices is None else _packed(matrices, part in self._rows, self._exact, arena)
                             for matrices in experts]
            for expert, packed in enumerate(adapter[part]):
                if packed is not None:
                    self._tables[part][number, expert] = packed.entry()
        largest = max((packed.rank for experts in adapter.values() for packed in experts if packed), default=0)
        moved, self.ranks = moved or largest > self.ranks, max(largest, self.ranks)
        return moved

    def _empty(self, part: str) -> np.ndarray:
        return np.zeros((self.numbers, self._experts[part], FIELDS), np.int64)


def _experts(network: Network, step: Step) -> int:
    """Number of matrices (experts) of the part of a step."""
    if len(step.inputs) < 3:
        return 1
    return network.weights[step.params["part"]].groups


def row_tiles(adapters: np.ndarray) -> np.ndarray:
    """Tiles of up to four rows of an adapter: i32 [tiles, 5], the adapter and its rows, -1 for none.

    adapters: i32 [rows], -1 for none.
    """
    order = np.argsort(adapters, kind="stable")
    order = order[adapters[order] >= 0]
    used, counts = np.unique(adapters[order], return_counts=True)
    tiles = -(-counts // (TILE_WORDS - 1))
    index = np.arange(order.size) - np.repeat(np.cumsum(counts) - counts, counts)  # among the rows of its adapter
    words = np.full((tiles.sum(), TILE_WORDS), -1, np.int32)
    words[:, 0] = np.repeat(used, tiles)
    words[np.repeat(np.cumsum(tiles) - tiles, counts) + index // (TILE_WORDS - 1), 1 + index % (TILE_WORDS - 1)] = order
    return words


def _packed(part: AdaptedPart, rows: bool, exact: bool, arena: Arena) -> _Packed:
    """Pack the matrices of a part. rows: whether A is looked up by rows."""
    rank = part.b.shape[1]
    ranks, tiles = -(-rank // RANKS) * RANKS, -(-len(part.b) // TILE)
    halves = None if rows else _halves(part.a, part.b, exact)
    a, b, factor = halves or (part.a, part.b, 1.0)
    if rows:
        packed_a = _zeros(arena, (len(a), ranks), a.dtype)
        packed_a[:, :rank] = a
    else:
        columns = -(-a.shape[1] // TILE)
        padded = np.zeros((ranks, columns * TILE), a.dtype)
        padded[:rank, :a.shape[1]] = a
        packed_a = _zeros(arena, (ranks // RANKS, columns, RANKS, TILE), a.dtype)
        packed_a[:] = padded.reshape(ranks // RANKS, RANKS, columns, TILE).transpose(0, 2, 1, 3)
    packed_b = _zeros(arena, (tiles, ranks, TILE), b.dtype)
    packed_b[:, :rank] = _tiles(b, tiles).transpose(0, 2, 1)
    return _Packed(packed_a, packed_b, _vector(part.bias, tiles), _vector(part.scale, tiles), ranks, factor)


def _zeros(arena: Arena, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    return arena.zeros(size).view(dtype).reshape(shape)


def _halves(a: np.ndarray, b: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Both as float16, and the factor of their product; None if elements are too large or too small, or, with `exact`,
    would be rounded."""
    halves = []
    for values in (a, b):
        largest = np.abs(values).max(initial=0)
        power = int(np.frexp(largest)[1]) - 15 if np.isfinite(largest) else _FARTHEST + 1
        if abs(power) > _FARTHEST:
            return None
        scaled = np.ldexp(values, -power).astype(np.float16)
        if exact and not np.array_equal(np.ldexp(scaled.astype(np.float32), power), values):
            return None
        halves.append((scaled, power))
    return halves[0][0], halves[1][0], 2.0 ** (halves[0][1] + halves[1][1])


def _vector(values: np.ndarray | None, tiles: int) -> np.ndarray | None:
    if values is None:
        return None
    vector = aligned((tiles, TILE), np.float32)
    vector[:] = _tiles(values[:, None], tiles)[..., 0]
    return vector


def _tiles(values: np.ndarray, tiles: int) -> np.ndarray:
    """[N, r] as [tiles, 16, r], padded with zeros."""
    padded = np.zeros((tiles * TILE, values.shape[1]), values.dtype)
    padded[:len(values)] = values
    return padded.reshape(tiles, TILE, -1)
