"""A correct kernel with a cluster and bulk copies, and planted bugs: python -m tests.cuda.ptx.planted.

A cluster of two blocks of 64 threads processes three tiles of 512 bytes. Each block copies one half of a tile to both
blocks by a multicast bulk copy; then block b writes the reversed tile k, y[k, b, i] = x[k, 63 - i], in words of 8
bytes. All tiles use the same buffer. The mbarrier `full` completes a phase when the bytes have arrived; the four warps
arrive at the mbarrier `free` when they have read the buffer.
"""

from dataclasses import dataclass

import numpy as np

from .findings import Checks
from .launch import launch
from .memory import GlobalMemory
from .parse import parse
from .planted_tiles import PartsBug

TILES, BYTES = 3, 512
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_ARRIVE = "mapa.shared::cluster.u32 %r16, %r5, {0}; mbarrier.arrive.shared::cluster.b64 _, [%r16];"
CLUSTER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
PARTS = {"make": "mbarrier.init.shared::cta.b64 [%r4], 1; mbarrier.init.shared::cta.b64 [%r5], 4;",
         "show": "fence.mbarrier_init.release.cluster;", "begin": CLUSTER, "end": CLUSTER,
         "free": "$again: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r5], %r11; @!%p4 bra $again;",
         "expect": "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 512;",
         "copy": f"{_BULK}.multicast::cluster [%r7], [%rd4], 256, [%r4], %rs1;", "before": "",
         "full": "$wait: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], %r12; @!%p5 bra $wait;",
         "done": "@%p2 bra $next; " + _ARRIVE.format(0) + _ARRIVE.format(1) + "$next: "}
TEXT = """
.visible .entry brought(.param .u64 p_y, .param .u64 p_x)
{
.reg .pred %p<8>; .reg .b16 %rs<4>; .reg .b32 %r<30>; .reg .b64 %rd<12>;
.shared .align 16 .b8 tile[512]; .shared .align 8 .b8 counts[16];
ld.param.u64 %rd1, [p_y]; ld.param.u64 %rd2, [p_x];
mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, tile; mov.u32 %r4, counts; add.s32 %r5, %r4, 8;
shl.b32 %r6, %r2, 8; add.s32 %r7, %r3, %r6; cvt.u64.u32 %rd3, %r6; add.s64 %rd4, %rd2, %rd3; mov.u16 %rs1, 3;
setp.ne.u32 %p1, %r1, 0; and.b32 %r8, %r1, 31; setp.ne.u32 %p2, %r8, 0;
shl.b32 %r13, %r1, 3; sub.s32 %r14, 504, %r13; add.s32 %r15, %r3, %r14;
mad.lo.s32 %r17, %r2, 512, %r13; cvt.u64.u32 %rd5, %r17; add.s64 %rd6, %rd1, %rd5;
@%p1 bra $made;
MAKE SHOW
$made:
BEGIN
mov.u32 %r9, 0;
$turn:
@%p1 bra $asked;
setp.eq.u32 %p3, %r9, 0; @%p3 bra $first;
add.s32 %r10, %r9, 1; and.b32 %r11, %r10, 1;
FREE
$first:
EXPECT
COPY
$asked:
and.b32 %r12, %r9, 1;
FULL
BEFORE
ld.shared.v2.u32 {%r20, %r21}, [%r15]; st.global.v2.u32 [%rd6], {%r20, %r21};
bar.warp.sync -1;
DONE
add.s32 %r9, %r9, 1; add.s64 %rd4, %rd4, 512; add.s64 %rd6, %rd6, 1024;
setp.lt.u32 %p6, %r9, 3; @%p6 bra $turn;
END
ret;
}
"""
_ONE_WARP = "setp.ge.u32 %p7, %r1, {}; @%p7 bra $on; {} $on: "


@dataclass(frozen=True)
class BulkBug(PartsBug):
    """A bug in the kernel above. blocks: of the launch."""

    kernel, parts = TEXT, PARTS
    blocks: int = 2


def _copy(name: str, found: str, old: str, new: str) -> BulkBug:
    return BulkBug(name, found, (("copy", PARTS["copy"].replace(old, new)),))


BULK_BUGS = (
    BulkBug("a tile that is read without waiting for its phase", "before the mbarrier phase", (("full", ""),)),
    BulkBug("a wait that polls only once", "before the mbarrier phase",
            (("full", PARTS["full"].replace("@!%p5 bra $wait;", "")),)),
    BulkBug("a wait for the wrong parity", "wait for ever",
            (("full", "xor.b32 %r12, %r12, 1;" + PARTS["full"]),)),
    BulkBug("a tile that is overwritten while it is read", "may still be in use", (("free", ""),)),
    BulkBug("a buffer that is released before it is read", "may still be in use",
            (("before", PARTS["done"]), ("done", ""))),
    BulkBug("a copy over another copy", "overlaps another that may be in flight",
            (("expect", PARTS["expect"].replace("512", "1024")), ("copy", 2 * PARTS["copy"]))),
    BulkBug("bytes that never come", "lacks 0 arrivals and 16 bytes",
            (("expect", PARTS["expect"].replace("512", "528")),)),
    BulkBug("arrivals that never come", "lacks 4 arrivals and 0 bytes",
            (("done", PARTS["done"].replace(_ARRIVE.format(1), "")),)),
    BulkBug("arrivals at the own block only", "wait for ever",
            (("done", PARTS["done"].replace(_ARRIVE.format(0), "").replace("%r5, 1", "%r5, %r2")),)),
    BulkBug("one arrival too many", "lacks -1 arrivals",
            (("expect", 2 * PARTS["expect"].replace("512", "256")),)),
    BulkBug("a phase that completes too early", "may still be in use",
            (("make", PARTS["make"].replace("[%r5], 4", "[%r5], 3")),)),
    BulkBug("mbarriers without fence.mbarrier_init", "without fence.mbarrier_init", (("show", ""),)),
    BulkBug("no cluster barrier after initialisation", "without synchronisation with its initialisation",
            (("begin", ""),)),
    BulkBug("a block barrier where a cluster barrier is needed", "without synchronisation with its initialisation",
            (("begin", "bar.sync 0;"),)),
    BulkBug("a block that exits before remote accesses to it", "may exit before a remote access", (("end", ""),)),
    BulkBug("a copy that nobody waits for", "blocks exit while bulk copies to them are in flight",
            (("end", "@%p1 bra $out;" + PARTS["copy"].replace("[%rd4]", "[%rd2]") + "$out: " + CLUSTER),)),
    BulkBug("a cluster barrier that part of a warp skips", "lanes of a warp diverge",
            (("end", _ONE_WARP.format(40, CLUSTER)),)),
    BulkBug("a cluster barrier in one warp, a block barrier in another", "for ever at barrier.cluster.wait",
            (("end", _ONE_WARP.format(32, "bar.sync 0;") + CLUSTER),)),
    BulkBug("a cluster barrier without its wait", "between barrier.cluster.arrive and wait",
            (("end", CLUSTER.partition(" barrier.cluster.wait")[0]),)),
    BulkBug("an arrival where no mbarrier is", "no mbarrier was made",
            (("expect", PARTS["expect"].replace("%r4", "%r3")),)),
    BulkBug("an mbarrier of a block outside the cluster", "that the cluster of 2 does not have",
            (("done", PARTS["done"].replace("%r5, 1", "%r5, 2")),)),
    BulkBug("a misaligned mbarrier", "misaligned mbarrier",
            (("make", PARTS["make"].replace("[%r4]", "[%r4+4]")),)),
    BulkBug("a copy before griddepcontrol.wait", "accessed before griddepcontrol.wait",
            (("end", CLUSTER + "griddepcontrol.wait;"),)),
    BulkBug("a grid that is not whole clusters", "are not whole clusters of 2", blocks=3),
    _copy("a copy whose size is no multiple of 16", "a bulk copy of 250 bytes", "256", "250"),
    _copy("a misaligned source", "misaligned global read", "[%rd4]", "[%rd4+8]"),
    _copy("a misaligned destination", "misaligned mbarrier or bulk copy", "[%r7]", "[%r7+8]"),
    _copy("a copy beyond shared memory", "bytes of shared memory", "256", "512"),
    _copy("a copy from beyond an allocation", "outside global memory", "[%rd4]", "[%rd4+1024]"),
    _copy("a multicast to blocks outside the cluster", "to blocks 111 of a cluster of 2", f"{_BULK}.",
          f"mov.u16 %rs1, 7; {_BULK}."),
)


def run_bulk(bug: BulkBug, seed: int = 0) -> tuple[bool, Checks]:
    """Run the kernel: whether the result is correct, and the findings.

    Raises:
        Fault: the machine stopped the kernel.
    """
    memory, checks = GlobalMemory(1 << 20), Checks(steps=4000)
    x, y = memory.allocate(TILES * BYTES), memory.allocate(2 * TILES * BYTES)
    words = np.random.default_rng(1).integers(0, 1 << 63, (TILES, BYTES // 8), dtype=np.uint64)
    x[:] = words.view(np.uint8).ravel()
    memory.mark_written(x)
    addresses = [np.uint64(array.ctypes.data) for array in (y, x)]
    launch(parse(bug.text), (bug.blocks, 1, 1), 64, addresses, memory, checks, seed=seed, cluster=2)
    expected = np.repeat(words[:, None, ::-1], 2, 1)
    return bool((y.view(np.uint64).reshape(expected.shape) == expected).all()), checks
