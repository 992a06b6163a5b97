"""A roofline model with occupancy and latency: the predicted time of a launch on a GPU.

    time = boundary + max(waiting, latency + max(memory, issue, L1, L2, banks, tensor cores))

boundary: time from the end of one kernel to the first instruction of the next; with programmatic dependent launch, to
the end of the next kernel's griddepcontrol.wait. Prefetches before that wait overlap with the boundary: as many bytes
as the bandwidth moves in that time are subtracted from `memory`, and the first load comes from L2. The cycles of a
multiprocessor's first blocks before the wait take no time.

memory: bytes accessed at the GPU's bandwidth; bytes are scaled from the blocks that were counted to the whole grid, but
at most the size of the allocations. issue: 4 instructions a cycle. L1: all sectors at 128 bytes a cycle. L2: bytes of
copies and of loads that bypass L1. banks: one pass of shared memory a cycle. tensor cores: float16 multiplications at
the GPU's rate, of which mma.sync reaches only a part on Hopper. waiting: the cycles of a block that is alone on a
multiprocessor (timeline.py), times the number of rounds of blocks; the occupancy, how many blocks run at once, follows
from registers, shared memory and threads. If waiting is the limit, too few bytes are in flight: by Little's law, bytes
in flight = throughput times latency.

No GPU has confirmed these predictions: ptxas reorders instructions, the content of L2 is not modelled, and warps of a
multiprocessor slow each other down more than a maximum of two times says.
"""

import math
from dataclasses import dataclass

from .counters import Counters
from .timeline import USUAL, Latencies


@dataclass(frozen=True)
class Card:
    """The limits of a GPU, and of one of its multiprocessors.

    clock: Hz. bandwidth: bytes a second that a copy kernel reaches. latencies: of loads, in cycles.
    boundary: seconds between two kernels of a graph. dependent: the same with programmatic dependent launch, None if
    the GPU does not have it. Both are assumptions: 1.3 us for kernels of a graph; for the end of a wait, little more
    than a round trip through L2.
    issue: instructions a cycle. l1: bytes a cycle of L1. registers, shared, threads, blocks: of a multiprocessor.
    pairs: float16 multiplications of the tensor cores in a cycle, with float32 accumulation. sync: the part of it that
    mma.sync reaches (0.62 on Hopper, by published measurements). fours: multiplications of 4-bit floats that take as
    long as one of float16. l2: bytes a second of L2; for Hopper, those that published kernels without clusters move:
    610 TFLOP/s with tiles of 128 x 256, 480 with 128 x 128.

    B200: 148 multiprocessors, 2.25 PFLOP/s at 1.86 GHz and 7.7 TB/s by the data sheet; asynchronous copies reach 6.6
    TB/s in published measurements. A published kernel without clusters reaches 1050 TFLOP/s, which is 12 TB/s of L2 if
    its tiles are 128 x 256. A load from the other die takes some 300 cycles longer; a warp waits for the slowest of its
    lines, so both latencies include them. mma.sync is assumed to be as fast as on Hopper, for want of a measurement.
    """

    name: str
    multiprocessors: int
    clock: float
    bandwidth: float
    latencies: Latencies = USUAL
    boundary: float = 1.3e-6
    dependent: float | None = None
    issue: int = 4
    l1: int = 128
    registers: int = 65536
    shared: int = 227 << 10
    threads: int = 2048
    blocks: int = 32
    pairs: int = 2048
    sync: float = 1.0
    fours: int = 4
    l2: float = 4.5e12


CARDS = {card.name: card for card in (
    Card("H200", 132, 1.75e9, 4.3e12, dependent=0.7e-6, sync=0.62, l2=7.2e12),
    Card("H100", 132, 1.75e9, 3.0e12, dependent=0.7e-6, sync=0.62, l2=7.2e12),
    Card("A100", 108, 1.41e9, 1.75e12, shared=163 << 10, pairs=1024),
    Card("RTX 4090", 128, 2.5e9, 0.93e12, shared=99 << 10, threads=1536, blocks=24, pairs=256),
    Card("RTX 5090", 170, 2.4e9, 1.66e12, dependent=0.7e-6, shared=99 << 10, threads=1536, blocks=24, pairs=256,
         fours=8, l2=7.0e12),
    Card("B200", 148, 1.86e9, 6.6e12, Latencies(1100, 570), dependent=0.7e-6, pairs=4096, sync=0.31, l2=12e12))}


@dataclass(frozen=True)
class Resources:
    """Resource usage as ptxas reports it: registers per thread, bytes of shared memory and threads of a block."""

    registers: int
    shared: int
    threads: int


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a launch: seconds for each limit.

    memory, issue, l1, l2, banks, tensor, waiting: see above. boundary: before the kernel starts.
    latency: of its first load. resident: warps that fit on a multiprocessor. in_flight: average bytes in flight of a
    multiprocessor if waiting is the limit. bytes: moved. pairs: float16 multiplications on tensor cores.
    """

    memory: float
    issue: float
    l1: float
    l2: float
    banks: float
    tensor: float
    waiting: float
    boundary: float
    latency: float
    resident: int
    in_flight: int
    bytes: float
    pairs: float

    @property
    def seconds(self) -> float:
        """The predicted time of the launch."""
        return self.boundary + max(self.waiting, self.latency + max(self._limits.values()))

    @property
    def bound_by(self) -> str:
        """The name of the limit that determines the time."""
        largest = max(self._limits, key=self._limits.get)
        return "waiting" if self.waiting > self.latency + self._limits[largest] else largest

    @property
    def _limits(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("memory", "issue", "l1", "l2", "banks", "tensor")}

    def share(self, card: Card) -> float:
        """The fraction of the GPU's bandwidth that the launch reaches."""
        return self.bytes / card.bandwidth / self.seconds


def resident_blocks(card: Card, resources: Resources) -> int:
    """Occupancy: the number of blocks that fit on a multiprocessor at once."""
    warps = -(-resources.threads // 32)
    by_registers = card.registers // (-(-max(resources.registers, 1) * 32 // 256) * 256 * warps)
    by_shared = card.shared // (resources.shared + 1024)
    return min(by_registers, by_shared, card.threads // resources.threads, card.blocks)


def _products(counters: Counters, card: Card) -> float:
    """Tensor-core work, in float16 multiplications of wgmma or tcgen05 that take as long: bytes count half, 4-bit
    floats 1 / fours, mma more."""
    products = counters.products
    synchronous = products["mma"] + products["mma of bytes"] / 2 + products["mma of fours"] / card.fours
    bytes_ = products["wgmma of bytes"] + products["tcgen05 of bytes"]
    return products["wgmma"] + bytes_ / 2 + products["tcgen05 of fours"] / card.fours + synchronous / card.sync


def predict(card: Card, resources: Resources, counters: Counters, blocks: int) -> Prediction:
    """Predict a launch of `blocks` blocks from the counters of some of them."""
    scale = blocks / max(counters.blocks, 1)
    clocks = card.multiprocessors * card.clock
    resident = resident_blocks(card, resources)
    waves = max(blocks / (card.multiprocessors * resident), 1)      # waves of blocks
    of_block = max(counters.blocks, 1) * card.clock
    waiting = (waves * counters.clocks - (0 if card.dependent is None else counters.early_clocks)) / of_block
    bytes_moved = min(counters.touched * scale, counters.allocated or math.inf)
    boundary, memory = card.boundary if card.dependent is None else card.dependent, bytes_moved / card.bandwidth
    latency = card.latencies.far / card.clock
    if counters.prefetched and card.dependent is not None:
        prefetched = counters.prefetched * min(scale, card.multiprocessors * resident / max(counters.blocks, 1))
        memory -= min(prefetched / card.bandwidth, boundary)
        latency = card.latencies.middle / card.clock
    return Prediction(
        memory=memory, issue=scale * counters.instructions / (card.issue * clocks),
        l1=scale * 32 * counters.passes("global") / (card.l1 * clocks),
        l2=scale * counters.l2_bytes / card.l2, banks=scale * counters.passes("shared") / clocks,
        tensor=scale * _products(counters, card) / (card.pairs * clocks),
        waiting=waiting, boundary=boundary, latency=latency,
        pairs=scale * sum(counters.products.values()), resident=resident * -(-resources.threads // 32),
        bytes=bytes_moved,
        in_flight=int(bytes_moved / card.multiprocessors / max(waiting, latency) * latency))
