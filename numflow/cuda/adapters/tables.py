"""Matrices of adapters in device memory, and the tables by which kernels find them.

One arena of float32 holds them all. Each step has a table u32 [adapters, experts, 4]: where in the arena the matrices
of an expert begin, their rank, which vectors follow (BIAS | SCALE), nothing. Where an adapter changes nothing, rank and
vectors are 0. One after the other:

    A     [r][K]   of a look-up [V][r]
    B     [r][N]
    bias  [N]
    scale [N]      of the base's product
"""

from collections.abc import Sequence

import numpy as np

from numflow.cuda.device.device import Device, Ref, within_reach
from numflow.network.adapters.parts import AdaptedPart, AdaptedParts
from numflow.ops import ADAPTING, Network, Step

BIAS, SCALE = 1, 2
_FEWEST, _RANKS, _ENTRY = 4, 4, 16  # adapters, and ranks, that there is room for at first; bytes of an entry


class AdapterTables:
    """The tables of a program, by the part of each step, and what they point to.

    numbers: of adapters there is room for. ranks: by part the largest of any adapter, up to a multiple of 4.
    """

    def __init__(self, network: Network, device: Device):
        steps = [step for steps in network.entries.values() for step in steps if step.op in ADAPTING]
        self._experts = {step.params["part"]: _experts(network, step) for step in steps}
        self._device, self.numbers, self.ranks = device, 0, dict.fromkeys(self._experts, _RANKS)
        self._arena, self._tables = device.alloc(_ENTRY), device.alloc(_ENTRY)
        self._entries: dict[str, np.ndarray] = {}
        self._spans: dict[int, tuple[int, int]] = {}  # of each adapter: its first number in the arena, how many
        if steps:
            self._more_numbers(_FEWEST)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return 4 * sum(size for _, size in self._spans.values())

    @property
    def arena(self) -> Ref:
        """Place of all matrices."""
        return self._arena.at()

    def table(self, part: str) -> tuple[Ref, int]:
        """Entries of a step, and how many experts it has."""
        before = sum(experts for other, experts in self._before(part))
        return self._tables.at(_ENTRY * self.numbers * before), self._experts[part]

    def put(self, number: int, parts: AdaptedParts | None) -> bool:
        """Let adapter `number` have these matrices. Returns whether memory has moved or ranks have grown, so that
        steps have to be bound anew."""
        moved = number >= self.numbers
        if moved:
            self._more_numbers(max(number + 1, 2 * self.numbers))
        for entries in self._entries.values():
            entries[number] = 0
        self._spans.pop(number, None)
        mine = {part: some for part, some in (parts or {}).items() if part in self._experts}
        arrays: list[np.ndarray] = []
        begin, moved = self._room(number, sum(_size(one) for some in mine.values() for one in some), moved)
        for part, some in mine.items():
            most = max((one.b.shape[1] for one in some if one), default=0)
            moved |= most > self.ranks[part]
            self.ranks[part] = max(self.ranks[part], -(-most // _RANKS) * _RANKS)
            for expert, one in enumerate(some):
                if one is not None:
                    vectors = BIAS * (one.bias is not None) + SCALE * (one.scale is not None)
                    self._entries[part][number, expert] = begin, one.b.shape[1], vectors, 0
                    arrays += _flat(one)
                    begin += _size(one)
        if arrays:
            self._device.upload(self._arena.at(4 * self._spans[number][0]), np.concatenate(arrays))
        self._upload()
        return moved

    def _before(self, part: str) -> list[tuple[str, int]]:
        """The parts whose tables come first."""
        every = list(self._experts.items())
        return every[:[name for name, _ in every].index(part)]

    def _more_numbers(self, numbers: int) -> None:
        old, self._entries = self._entries, {part: np.zeros((numbers, experts, 4), np.uint32)
                                             for part, experts in self._experts.items()}
        for part, entries in old.items():
            self._entries[part][:len(entries)] = entries
        self._device.free(self._tables)
        self.numbers = numbers
        self._tables = self._device.alloc(_ENTRY * numbers * sum(self._experts.values()))
        self._upload()

    def _upload(self) -> None:
        if self._entries:
            self._device.upload(self._tables.at(), np.concatenate([own.reshape(-1) for own in self._entries.values()]))

    def _room(self, number: int, size: int, moved: bool) -> tuple[int, bool]:
        """Take the first room for so many numbers: where it begins, and whether the arena is another one now."""
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
    """Matrices that the part of a step has."""
    return network.weights[step.params["part"]].groups if len(step.inputs) == 3 else 1


def _size(part: AdaptedPart | None) -> int:
    return 0 if part is None else sum(each.size for each in (part.a, part.b, part.bias, part.scale) if each is not None)


def _flat(part: AdaptedPart) -> Sequence[np.ndarray]:
    """Its matrices as the arena has them."""
    vectors = (vector for vector in (part.bias, part.scale) if vector is not None)
    return [np.asarray(each, np.float32).reshape(-1) for each in (part.a, part.b.T, *vectors)]
