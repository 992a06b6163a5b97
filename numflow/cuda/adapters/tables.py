"""Matrices of LoRA adapters in device memory, and the tables with which kernels find them.

One float32 arena has all matrices. Each step has a table u32 [adapters, experts, 4] of entries: offset of the expert's
matrices in the arena, rank, flags of the vectors that follow (BIAS | SCALE), unused. If an adapter does not change the
expert, rank and flags are 0. The matrices of an entry are contiguous:

    A     [r][K]   for a table look-up [V][r]
    B     [r][N]
    bias  [N]
    scale [N]      multiplies the base model's product
"""

from collections.abc import Sequence

import numpy as np

from numflow.cuda.device.device import Device, Ref, within_reach
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.ops import ADAPTING, Network, Step

BIAS, SCALE = 1, 2
_FEWEST, _RANKS, _ENTRY = 4, 4, 16  # initial capacity in adapters; granularity of ranks; bytes of an entry


class AdapterTables:
    """The tables of a program, by the part (weight) of each step, and the arena with the matrices.

    capacity: adapters that the tables have room for. ranks: for each part, the largest rank, rounded up to a multiple
    of 4.
    """

    def __init__(self, network: Network, device: Device):
        steps = [step for steps in network.entries.values() for step in steps if step.op in ADAPTING]
        self._experts = {step.params["part"]: _experts(network, step) for step in steps}
        self._device, self.capacity, self.ranks = device, 0, dict.fromkeys(self._experts, _RANKS)
        self._arena, self._tables = device.alloc(_ENTRY), device.alloc(_ENTRY)
        self._entries: dict[str, np.ndarray] = {}
        self._spans: dict[int, tuple[int, int]] = {}  # for each adapter: first element in the arena, number of elements
        if steps:
            self._grow(_FEWEST)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return 4 * sum(size for _, size in self._spans.values())

    @property
    def arena(self) -> Ref:
        """Address of the arena."""
        return self._arena.at()

    def table(self, part: str) -> tuple[Ref, int]:
        """Address of a part's entries, and its number of experts."""
        before = sum(experts for other, experts in self._before(part))
        return self._tables.at(_ENTRY * self.capacity * before), self._experts[part]

    def put(self, number: int, parts: AdaptedParts | None) -> bool:
        """Store the matrices of adapter `number`; None removes them.

        Returns whether memory moved or a rank grew, in which case steps must be bound again.
        """
        moved = number >= self.capacity
        if moved:
            self._grow(max(number + 1, 2 * self.capacity))
        for entries in self._entries.values():
            entries[number] = 0
        self._spans.pop(number, None)
        own_parts = {part: of_experts for part, of_experts in (parts or {}).items() if part in self._experts}
        arrays: list[np.ndarray] = []
        size = sum(_size(adapted) for of_experts in own_parts.values() for adapted in of_experts)
        begin, moved = self._reserve(number, size, moved)
        for part, of_experts in own_parts.items():
            largest_rank = max((adapted.b.shape[1] for adapted in of_experts if adapted), default=0)
            moved |= largest_rank > self.ranks[part]
            self.ranks[part] = max(self.ranks[part], -(-largest_rank // _RANKS) * _RANKS)
            for expert, adapted in enumerate(of_experts):
                if adapted is not None:
                    vectors = BIAS * (adapted.bias is not None) + SCALE * (adapted.scale is not None)
                    self._entries[part][number, expert] = begin, adapted.b.shape[1], vectors, 0
                    arrays += _flat(adapted)
                    begin += _size(adapted)
        if arrays:
            self._device.upload(self._arena.at(4 * self._spans[number][0]), np.concatenate(arrays))
        self._upload()
        return moved

    def _before(self, part: str) -> list[tuple[str, int]]:
        """The parts whose tables come before this part's."""
        every = list(self._experts.items())
        return every[:[name for name, _ in every].index(part)]

    def _grow(self, capacity: int) -> None:
        old, self._entries = self._entries, {part: np.zeros((capacity, experts, 4), np.uint32)
                                             for part, experts in self._experts.items()}
        for part, entries in old.items():
            self._entries[part][:len(entries)] = entries
        self._device.free(self._tables)
        self.capacity = capacity
        self._tables = self._device.alloc(_ENTRY * capacity * sum(self._experts.values()))
        self._upload()

    def _upload(self) -> None:
        if self._entries:
            entries = [part.reshape(-1) for part in self._entries.values()]
            self._device.upload(self._tables.at(), np.concatenate(entries))

    def _reserve(self, number: int, size: int, moved: bool) -> tuple[int, bool]:
        """Reserve `size` elements of the arena, first fit. Returns their offset, and whether memory moved."""
        if not size:
            return 0, moved
        begin = 0
        for first, count in sorted(self._spans.values()):
            if first - begin >= size:
                break
            begin = first + count
        if 4 * (begin + size) > self._arena.nbytes:
            more = within_reach("adapters", 4 * max(begin + size, self._arena.nbytes // 4 * 3 // 2))
            old, self._arena = self._arena, self._device.alloc(more)
            self._device.copy(self._arena.at(), old.at(), old.nbytes)
            self._device.free(old)
            moved = True
        self._spans[number] = begin, size
        return begin, moved


def _experts(network: Network, step: Step) -> int:
    """Number of matrices of a step's part: experts, or 1."""
    return network.weights[step.params["part"]].groups if len(step.inputs) == 3 else 1


def _size(part: AdaptedPart | None) -> int:
    return 0 if part is None else sum(each.size for each in (part.a, part.b, part.bias, part.scale) if each is not None)


def _flat(part: AdaptedPart) -> Sequence[np.ndarray]:
    """The matrices of a part in the layout of the arena."""
    vectors = (vector for vector in (part.bias, part.scale) if vector is not None)
    return [np.asarray(each, np.float32).reshape(-1) for each in (part.a, part.b.T, *vectors)]
