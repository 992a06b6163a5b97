"""Thread block clusters, mbarriers, and bulk copies to shared memory by the TMA unit (sm_90).

The blocks of a cluster are adjacent in x and run at the same time, each on a multiprocessor of its own; the launch says
how many. One thread starts a bulk copy, which runs asynchronously. Threads wait for it at an mbarrier in shared memory,
here called a count (two u32 words at an even index). An mbarrier has phases. A phase is complete when the expected
number of threads have arrived and all bytes that they announced have been copied. The parity of the phases alternates:
0, 1, 0, 1, ...

    begin_count(memory, at, 1); show_counts(); sync_cluster()
    if thread == 0:
        expect_bytes(memory, at, 4096)
        copy_bulk(memory, to, source, index, 4096, at)
    wait_turn(memory, at, 0)

The simulator runs one block at a time and has clusters of one block. A copy arrives when a thread waits for it, and
must have been started by then: a block barrier must separate the two.
"""

from numflow.cuda.lang.intrinsic import asm, builtin
from numflow.cuda.lang.intrinsics import aligned
from numflow.cuda.lang.kernel import device
from numflow.cuda.lang.scalar import u32
from numflow.cuda.lang.simulator import NOW, Count, SimulatorError, wait


@asm((u32,), (), "mov.u32 $0, %cluster_ctarank;")
def cluster_rank() -> int:
    """u32: index of the block in its cluster."""
    return 0


@asm((u32,), (), "mov.u32 $0, %cluster_nctarank;")
def cluster_size() -> int:
    """u32: blocks of the cluster; 1 for a launch without clusters."""
    return 1


@asm((), (), "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "effect", "memory",
     "convergent")
def sync_cluster() -> None:
    """Barrier of all threads of the cluster."""
    wait("block")


@builtin("count_begin")
def begin_count(shared, at: int, arrivals: int) -> None:
    """Initialise an mbarrier at shared[at] with the number of arrivals of a phase. One thread calls it."""
    if at % 2:
        raise SimulatorError(f"a count at the odd place {at}")
    NOW.thread.block.counts[shared.at(at, 2)] = Count(arrivals)


@asm((), (), "fence.mbarrier_init.release.cluster;", "effect", "memory")
def show_counts() -> None:
    """Make the mbarriers that this thread has initialised visible to other blocks and bulk copies; before sync_cluster.
    """


@builtin("count_expect")
def expect_bytes(shared, at: int, nbytes: int) -> None:
    """Arrive at an mbarrier of this block, and add `nbytes` to the bytes that its phase waits for."""
    count = _count(shared, at)
    count.expected += nbytes
    count.arrive()


@builtin("count_arrive")
def arrive_at(shared, at: int, rank: int) -> None:
    """Arrive at the mbarrier with this index in the block of the cluster with this rank.

    The waiting thread may then start a bulk copy into memory that this thread has finished reading. Ordinary stores of
    other blocks are not ordered by it.
    """
    if rank != 0:
        raise SimulatorError(f"block {rank} of a cluster of one")
    _count(shared, at).arrive()


@builtin("count_over")
def turn_is_over(shared, at: int, turn: int) -> int:
    """u32: 1 if the latest phase with this parity, 0 or 1, is complete. The instruction may wait for a while."""
    if not _count(shared, at).is_over(turn):
        raise SimulatorError(f"a thread waits for turn {turn} of the count at {at}, for which not all have arrived, or "
                             "not all bytes are on their way")
    return 1


@device
def wait_turn(shared, at, turn):
    """Wait until the phase with this parity is complete."""
    while turn_is_over(shared, at, turn) == 0:
        pass


@builtin("bulk_copy")
def copy_bulk(shared, at: int, source, index: int, nbytes: int, count: int) -> None:
    """Start a copy of nbytes from source[index] to shared[at], both u32 pointers. The bytes count for the mbarrier at
    shared[count]. Addresses and nbytes are multiples of 16 bytes."""
    words = nbytes // 4
    if nbytes <= 0 or nbytes % 16:
        raise SimulatorError(f"a bulk copy of {nbytes} bytes")
    begin, to = aligned(source, index, 4), aligned(shared, at, 4)
    source.at(index, words)
    shared.at(at, words)
    _count(shared, count).send(shared.array, to, source.array[begin:begin + words].copy())


@builtin("bulk_share")
def share_bulk(shared, at: int, source, index: int, nbytes: int, count: int, blocks: int) -> None:
    """copy_bulk by multicast to the same address in several blocks of the cluster: those whose bits are set in
    `blocks`. The bytes count for the mbarrier of each of them."""
    if blocks != 1:
        raise SimulatorError(f"blocks {blocks:b} of a cluster of one")
    copy_bulk(shared, at, source, index, nbytes, count)


def _count(shared, at: int) -> Count:
    counts, place = NOW.thread.block.counts, shared.at(at, 2)
    if place not in counts:
        raise SimulatorError(f"no count was made at {at}")
    return counts[place]
