"""Blocks of a cluster and the copy engine (TMA), which brings kilobytes to the shared memory of all of them (sm_90).

A cluster is blocks side by side that run at the same time, each on a multiprocessor of its own; a launch says how many.
A bulk copy is begun by one thread and runs in the background. Who waits for it, waits at a count in shared memory (an
mbarrier; here two words of u32 memory at an even place): it has turns, and a turn is over once as many threads as were
named have arrived and as many bytes as they said have come. Turns are called 0, 1, 0, 1 and so on.

    begin_count(memory, at, 1); show_counts(); sync_cluster()
    if thread == 0:
        expect_bytes(memory, at, 4096)
        copy_bulk(memory, to, source, index, 4096, at)
    wait_turn(memory, at, 0)

The simulator runs one block at a time and has clusters of one. Copies land there when somebody waits for them, and must
have been begun by then: a barrier of the block, at the latest, stands between.
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
    """u32: blocks of a cluster; 1 where the launch names none."""
    return 1


@asm((), (), "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "effect", "memory",
     "convergent")
def sync_cluster() -> None:
    """sync_block for all blocks of the cluster."""
    wait("block")


@builtin("count_begin")
def begin_count(shared, at: int, arrivals: int) -> None:
    """Make a count at shared[at], whose turns are over when so many have arrived; one thread does."""
    if at % 2:
        raise SimulatorError(f"a count at the odd place {at}")
    NOW.thread.block.counts[shared.at(at, 2)] = Count(arrivals)


@asm((), (), "fence.mbarrier_init.release.cluster;", "effect", "memory")
def show_counts() -> None:
    """Let other blocks and the copy engine see counts that this thread has made; before sync_cluster."""


@builtin("count_expect")
def expect_bytes(shared, at: int, nbytes: int) -> None:
    """Arrive at a count of this block, whose turn is not over before so many bytes have come."""
    count = _count(shared, at)
    count.expected += nbytes
    count.arrive()


@builtin("count_arrive")
def arrive_at(shared, at: int, rank: int) -> None:
    """Arrive at the count that is at this place in a block of the cluster. Who waits there may give memory that this
    thread knows to be free to the copy engine; plain stores of other blocks are not in order by it."""
    if rank != 0:
        raise SimulatorError(f"block {rank} of a cluster of one")
    _count(shared, at).arrive()


@builtin("count_over")
def turn_is_over(shared, at: int, turn: int) -> int:
    """u32: 1 if the last turn of this number, 0 or 1, is over; may wait for it a while."""
    if not _count(shared, at).is_over(turn):
        raise SimulatorError(f"a thread waits for turn {turn} of the count at {at}, for which not all have arrived, or "
                             "not all bytes are on their way")
    return 1


@device
def wait_turn(shared, at, turn):
    """Wait until a turn of a count is over."""
    while turn_is_over(shared, at, turn) == 0:
        pass


@builtin("bulk_copy")
def copy_bulk(shared, at: int, source, index: int, nbytes: int, count: int) -> None:
    """nbytes from source[index] to shared[at], both u32 pointers, in the background; the count at shared[count] hears
    of it. Places and bytes are multiples of 16 bytes."""
    words = nbytes // 4
    if nbytes <= 0 or nbytes % 16:
        raise SimulatorError(f"a bulk copy of {nbytes} bytes")
    begin, to = aligned(source, index, 4), aligned(shared, at, 4)
    source.at(index, words)
    shared.at(at, words)
    _count(shared, count).send(shared.array, to, source.array[begin:begin + words].copy())


@builtin("bulk_share")
def share_bulk(shared, at: int, source, index: int, nbytes: int, count: int, blocks: int) -> None:
    """copy_bulk to the same place of several blocks of the cluster, those whose bits are set, each of which has its own
    count told."""
    if blocks != 1:
        raise SimulatorError(f"blocks {blocks:b} of a cluster of one")
    copy_bulk(shared, at, source, index, nbytes, count)


def _count(shared, at: int) -> Count:
    counts, place = NOW.thread.block.counts, shared.at(at, 2)
    if place not in counts:
        raise SimulatorError(f"no count was made at {at}")
    return counts[place]
