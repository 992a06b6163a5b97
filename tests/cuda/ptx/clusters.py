"""Instructions on mbarriers, bulk copies and clusters. Binders as in effects.py; the state is in bulk.py."""

import numpy as np

from .bulk import PIECE, REMOTE
from .effects import effect
from .findings import Fault
from .operands import address, wide
from .parse import Kernel
from .races import READ
from .values import value

MBARRIER_OPCODES = "mbarrier", "mapa"


def has_bulk(kernel: Kernel) -> bool:
    """Whether a kernel has mbarriers or cluster barriers."""
    return any(step.opcode in MBARRIER_OPCODES or "cluster" in step.parts for step in kernel.instructions)


def _offsets(machine, step, addresses, lanes, size: int, remote: bool) -> np.ndarray:
    """Offsets in the shared memory of all blocks, for addresses of these lanes that may be in other blocks (remote)."""
    addresses = np.broadcast_to(addresses, machine.n)[lanes]
    rank, cluster = addresses >> REMOTE, machine.grid.cluster
    own = machine.block[lanes]
    if (rank > (cluster if remote else 0)).any():
        raise Fault(f"an address in a block that the cluster of {cluster} does not have: {step.text}")
    block = np.where(rank > 0, own // cluster * cluster + rank - 1, own)
    return machine.shared.offsets(addresses & (1 << REMOTE) - 1, size, block, "mbarrier or bulk copy")


@value("mapa")
def _map(step):
    """mapa: the address of the same shared-memory location in another block of the cluster."""
    place, rank = wide(step.operands[1], "u32"), wide(step.operands[2], "u32")
    return lambda machine: (place(machine) & np.uint32((1 << REMOTE) - 1)
                            | (rank(machine) + np.uint32(1)) << np.uint32(REMOTE))


@effect("mbarrier")
def _mbarrier(step):
    if {"try_wait", "test_wait"} & set(step.parts):
        return _wait(step)
    arrives, remote = "arrive" in step.parts, "shared_cluster" in step.parts
    at = address(step.operands[arrives])
    number = wide(step.operands[-1], "u32") if "init" in step.parts or "expect_tx" in step.parts else None
    if not arrives and "init" not in step.parts:
        raise Fault(f"no such mbarrier here: {step.text}")

    def run(machine, mask):
        lanes = machine.lanes(mask)
        places = _offsets(machine, step, at(machine), lanes, 8, remote)
        numbers = number(machine)[lanes].tolist() if number else [0] * lanes.size
        for place, lane, given in zip(places.tolist(), lanes.tolist(), numbers):
            if arrives:
                machine.bulk.arrive(step, place, lane, given)
            else:
                machine.bulk.init(place, lane, given)
    return run


def _wait(step):
    """try_wait, test_wait: True once the phase is complete. The scheduler runs them then, and once before."""
    if "parity" not in step.parts:
        raise Fault(f"no such mbarrier here: {step.text}")
    to, asked = step.operands[0], phase_of(step)

    def run(machine, mask):
        lanes = machine.lanes(mask)
        over, places = asked(machine, lanes)
        machine.bulk.learn_phases(places[over], lanes[over])
        machine.bulk.polled[lanes] = ~over
        result = np.zeros(machine.n, bool)
        result[lanes] = over
        machine.put(to, result, mask)
    return run


def phase_of(step):
    """function(machine, lanes) -> whether the phases that they wait for are complete, and offsets of the mbarriers."""
    at, parity = address(step.operands[1]), wide(step.operands[2], "u32")

    def asked(machine, lanes):
        places = _offsets(machine, step, at(machine), lanes, 8, False)
        return machine.bulk.is_complete(step, places, parity(machine)[lanes], lanes), places
    return asked


@effect("bulk")
def _bulk_copy(step):
    """cp.async.bulk from global memory to this block, or by multicast to the blocks of a mask."""
    if step.parts[:4] != ("async", "bulk", "shared_cluster", "global") \
            or "mbarrier_complete_tx_bytes" not in step.parts:
        raise Fault(f"no such copy here: {step.text}")
    to, source, tell = (address(step.operands[at]) for at in (0, 1, 3))
    size = wide(step.operands[2], "u32")
    blocks = wide(step.operands[4], "u16") if "multicast_cluster" in step.parts else None

    def run(machine, mask):
        lanes, cluster = machine.lanes(mask), machine.grid.cluster
        if not lanes.size:
            return
        sizes = size(machine)[lanes]
        if (sizes % PIECE).any() or not sizes.all():
            raise Fault(f"a bulk copy of {int(sizes[(sizes % PIECE != 0) | (sizes == 0)][0])} bytes: {step.text}")
        places = _offsets(machine, step, to(machine), lanes, PIECE, True)
        counts = _offsets(machine, step, tell(machine), lanes, 8, True)
        begins = np.broadcast_to(source(machine), machine.n)[lanes]
        masks = blocks(machine)[lanes] if blocks else np.zeros(lanes.size, np.uint16)
        pitch = machine.shared.pitch
        for lane, nbytes, place, count, begin, wanted in zip(*(part.tolist() for part in (
                lanes, sizes, places, counts, begins, masks))):
            if place % pitch + nbytes > machine.shared.limit:
                raise Fault(f"a bulk copy of {nbytes} bytes at {place % pitch} of {machine.shared.limit} bytes of "
                            "shared memory")
            if wanted >> cluster:
                raise Fault(f"a bulk copy to blocks {wanted:b} of a cluster of {cluster}: {step.text}")
            data = _read(machine, step, begin, nbytes, lane)
            first = lane // machine.grid.threads // cluster * cluster
            ranks = [first + rank for rank in range(cluster) if wanted >> rank & 1] if blocks else [place // pitch]
            latency, places = _measure(machine, begin, nbytes, lane, len(ranks)), (place % pitch, count % pitch)
            targets, mbarriers = ([pitch * rank + at for rank in ranks] for at in places)
            machine.bulk.start_copy(step, targets, mbarriers, data, lane, latency)
    return run


def _read(machine, step, begin: int, nbytes: int, lane: int) -> np.ndarray:
    """Read global memory for a bulk copy of a lane, with the checks of an ordinary read."""
    memory, lanes = machine.memory, np.full(nbytes // PIECE, lane, np.int32)
    offset, _ = memory.offsets(begin + PIECE * np.arange(nbytes // PIECE), PIECE, "global read")
    if machine.not_waited is not None and machine.not_waited[lane]:
        machine.note(f"global memory is accessed before griddepcontrol.wait: {step.text}")
    machine._log(machine.log_global, step, offset, PIECE, READ, lanes)
    at = int(offset[0])
    if machine.checks.unwritten and not memory.written[at:at + nbytes].all():
        machine.note(f"global memory is read before it is written: {step.text}")
    return memory.bytes[at:at + nbytes].copy()


def _measure(machine, begin: int, nbytes: int, lane: int, blocks: int) -> float:
    """Count a bulk copy: once for L2, and once for the shared memory of each destination block. Returns its latency."""
    if not machine.counters:
        return 0.0
    sectors = np.arange(begin - machine.memory.base >> 5, -(-(begin - machine.memory.base + nbytes) // 32))
    machine.counters.l2_bytes += 32 * sectors.size
    machine.counters.of("global", "read").add(1, blocks * sectors.size, blocks * nbytes // 32, nbytes)
    machine.counters.of("shared", "write").add(blocks, blocks * -(-nbytes // 128), blocks * -(-nbytes // 128), nbytes)
    machine._sectors.setdefault("read", []).append(sectors)
    return machine.timeline.bring(32 * sectors, lane)


@effect("cluster")
def _cluster_barrier(step):
    """barrier.cluster.arrive and barrier.cluster.wait."""
    comes = "arrive" in step.parts

    def run(machine, mask):
        machine.whole_warps(mask)
        (machine.bulk.cluster_arrive if comes else machine.bulk.cluster_wait)(mask)
    return run

