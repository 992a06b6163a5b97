"""A correct kernel with tcgen05, and planted bugs, as in planted.py: python -m tests.cuda.ptx.planted.

A block of 128 threads copies a tile of 128 x 64 bytes and one of 16 x 64 bytes to shared memory, with the 64-byte
swizzle. It multiplies the first tile, of E4M3 floats, by the transpose of the second one in two products of 32 bytes,
the second of which accumulates. y[16 * thread + i] is column i of the thread's lane. A second kernel multiplies tiles
of 4-bit floats with scales of blocks.
"""

import numpy as np

from .findings import Checks
from .launch import launch
from .memory import GlobalMemory
from .parse import parse
from .planted_tiles import PartsBug
from .warps import READERS

_MMA = "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r10], %rd{}, %rd{}, %r11, %p{};"
PARTS = {"make": "mbarrier.init.shared::cta.b64 [%r3], 1; fence.mbarrier_init.release.cluster;",
         "allocate": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 32;",
         "relinquish": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
         "show": "fence.proxy.async;", "before": "tcgen05.fence::before_thread_sync;", "barrier": "bar.sync 0;",
         "after": "tcgen05.fence::after_thread_sync;", "start": "setp.ne.u32 %p1, %r1, 0; @%p1 bra $started;",
         "kind": "mov.u32 %r11, 134479888;",       # 128 rows, 16 columns, E4M3, float32 results
         "first": _MMA.format(6, 7, 3), "second": _MMA.format(8, 9, 4),
         "commit": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];", "between": "",
         "wait": "$again: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r3], 0; @!%p5 bra $again;",
         "see": "tcgen05.fence::after_thread_sync;",
         "lane": "and.b32 %r12, %r1, 96; shl.b32 %r13, %r12, 16; add.s32 %r14, %r10, %r13;",
         "loaded": "tcgen05.wait::ld.sync.aligned;",
         "load": "tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r14];",
         "freeing": "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;",
         "free": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;"}
_REGISTERS = ", ".join(f"%f{i}" for i in range(16))
_COPY = """ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%rd4]; shr.u32 %r15, %r5, 3; and.b32 %r15, %r15, 48;
xor.b32 %r16, %r5, %r15; add.s32 %r17, %r2, %r16; st.shared.v4.u32 [%r17], {%r20, %r21, %r22, %r23};
add.s32 %r5, %r5, 2048; add.s64 %rd4, %rd4, 2048;
"""
# A matrix descriptor: address / 16, 512 bytes between groups of 8 rows (1 << 37), version (1 << 46), swizzle (1 << 63).
TEXT = """
.visible .entry multiplied(.param .u64 p_y, .param .u64 p_x)
{
.reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<20>;
.shared .align 1024 .b8 tiles[10240]; .shared .align 8 .b8 counts[16];
ld.param.u64 %rd1, [p_y]; ld.param.u64 %rd2, [p_x]; mov.u32 %r1, %tid.x;
mov.u32 %r2, tiles; mov.u32 %r3, counts; add.s32 %r4, %r3, 8;
shl.b32 %r5, %r1, 4; cvt.u64.u32 %rd3, %r5; add.s64 %rd4, %rd2, %rd3;
COPY
setp.ne.u32 %p1, %r1, 0; @%p1 bra $made;
MAKE
$made:
setp.ge.u32 %p2, %r1, 32; @%p2 bra $allocated;
ALLOCATE RELINQUISH
$allocated:
SHOW BEFORE BARRIER AFTER
ld.shared.u32 %r10, [%r4];
cvt.u64.u32 %rd5, %r2; shr.u64 %rd5, %rd5, 4; add.s64 %rd6, %rd5, -9223301530671644672; add.s64 %rd7, %rd6, 512;
add.s64 %rd8, %rd6, 2; add.s64 %rd9, %rd7, 2; setp.ne.u32 %p3, %r1, %r1; setp.eq.u32 %p4, %r1, %r1;
START
KIND FIRST SECOND COMMIT
$started:
BETWEEN WAIT SEE LANE LOAD LOADED
mul.wide.u32 %rd10, %r1, 64; add.s64 %rd11, %rd1, %rd10;
st.global.v4.f32 [%rd11], {%f0, %f1, %f2, %f3}; st.global.v4.f32 [%rd11+16], {%f4, %f5, %f6, %f7};
st.global.v4.f32 [%rd11+32], {%f8, %f9, %f10, %f11}; st.global.v4.f32 [%rd11+48], {%f12, %f13, %f14, %f15};
FREEING
@%p2 bra $freed;
FREE
$freed:
ret;
}
""".replace("COPY", _COPY * 5)


class TensorBug(PartsBug):
    """A bug in the kernel above."""

    kernel, parts = TEXT, PARTS


def _bug(name: str, found: str, **changed: str) -> TensorBug:
    """A bug whose parts are replaced; an @ in a replacement stands for the correct part."""
    return TensorBug(name, found, tuple((part, text.replace("@@", PARTS[part])) for part, text in changed.items()))


TENSOR_BUGS = (
    _bug("columns that are loaded without a wait", "loaded before the products into it are complete", wait=""),
    _bug("a wait without a fence", "without tcgen05.fence::after_thread_sync", see=""),
    _bug("products that are not committed", "wait for ever", commit=""),
    _bug("a commit before the last product", "products are never committed", second="", commit="@@" + PARTS["second"]),
    _bug("a commit that nobody waits for", "threads exit without waiting for the phase of a tcgen05.commit",
         second="@@" + PARTS["commit"]),
    _bug("a first product that accumulates", "added to tensor memory that is not written", first=PARTS[
        "first"].replace("%p3", "%p4")),
    _bug("a tile without a proxy fence", "without a fence.proxy.async", show=""),
    _bug("a tile that other warps are still writing", "race on shared memory between warps",
         barrier="bar.warp.sync -1;"),
    _bug("a tile that is overwritten before the products are complete", "shared memory is written while tcgen05.mma",
         between="bar.sync 0; xor.b32 %r18, %r17, 512; st.shared.u32 [%r17], %r1;"),
    _bug("products of several lanes", "several lanes of a warp execute tcgen05.mma",
         start="setp.ge.u32 %p1, %r1, 2; @%p1 bra $started;", make="mbarrier.init.shared::cta.b64 [%r3], 2; "
         "fence.mbarrier_init.release.cluster;"),
    _bug("columns that are not allocated", "columns 512 .. 527 of tensor memory are not allocated",
         lane="@@ add.s32 %r14, %r14, 32;"),
    _bug("no allocation", "are not allocated", allocate="st.shared.u32 [%r4], 0;"),
    _bug("an allocation of a wrong size", "48 columns of tensor memory cannot be allocated",
         allocate=PARTS["allocate"].replace("32;", "48;")),
    _bug("an allocation after the permit was relinquished", "after tcgen05.relinquish_alloc_permit",
         relinquish="@@" + PARTS["allocate"]),
    _bug("lanes of another warp", "warp 1 accesses tensor memory from lane 0", lane="mov.u32 %r14, %r10;"),
    _bug("lanes of a warp with different addresses", "different addresses of tensor memory",
         lane="@@ add.s32 %r14, %r14, %r1;"),
    _bug("a load that part of a warp skips", "lanes of a warp diverge",
         load="setp.ge.u32 %p6, %r1, 100; @%p6 bra $skip; @@ $skip: "),
    _bug("registers that are used before the wait", "used before tcgen05.wait::ld", loaded=""),
    _bug("tensor memory that is not freed", "before they free tensor memory", free=""),
    _bug("tensor memory that is freed while others load it", "freed while other warps may load it", freeing=""),
    _bug("tensor memory that is freed without fences", "freed while other warps may load it", freeing="bar.sync 0;"),
    _bug("columns that are overwritten while others load them", "overwritten while other warps may load it",
         freeing="@%p1 bra $again2;" + PARTS["first"] + PARTS["commit"] + "$again2: $poll: mbarrier.try_wait.parity."
         "shared::cta.b64 %p5, [%r3], 1; @!%p5 bra $poll; @@"),
    _bug("an instruction descriptor of 64 rows", "that does not fit", kind="mov.u32 %r11, 67371024;"),
    _bug("an instruction descriptor of float16 results", "that does not fit", kind="mov.u32 %r11, 134479872;"),
    _bug("a matrix descriptor without its version", "that does not fit",
         kind="@@ add.s64 %rd6, %rd6, -70368744177664;"),
    _bug("a matrix descriptor of wgmma", "that does not fit",
         kind="@@ add.s64 %rd6, %rd6, -70368744177664; and.b64 %rd6, %rd6, 9223372036854775807;"),
    _bug("a tile that is not aligned to its swizzle pattern", "within the pattern of its swizzle",
         kind="@@ add.s64 %rd6, %rd6, 8;"),
    _bug("a tile beyond the end of shared memory", "bytes of shared memory", kind="@@ add.s64 %rd7, %rd7, 128;"),
    _bug("a product of 128 rows in lane 32", "in lane 32 of tensor memory", kind="@@ add.s32 %r10, %r10, 2097152;"),
)


# The same kernel with 4-bit floats and NVFP4 scales: 128 scale words for each tile follow the tiles. Columns 16 .. 19
# and 20 .. 23 of tensor memory have the scales of both products.
_COPIES = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10+16], %rd12; ", \
    "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10+20], %rd13; "
_SCALED = ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r10], %rd{}, %rd{}, %r11, [%r10+16], "
           "[%r10+20], %p{};")
SCALED_PARTS = PARTS | {
    "kind": "mov.u32 %r11, 134481024; add.s64 %rd12, %rd5, 70403103916608; add.s64 %rd13, %rd12, 32;",
    "first": "".join(_COPIES) + _SCALED.format(6, 7, 3), "second": _SCALED.format(8, 9, 4)}
_OTHER = "setp.ne.u32 %p6, %r1, 64; @%p6 bra $other; ld.shared.u32 %r10, [%r4]; cvt.u64.u32 %rd5, %r2; " \
    "shr.u64 %rd5, %rd5, 4;" + SCALED_PARTS["kind"] + _COPIES[0] + "$other: "


class ScaledBug(TensorBug):
    """A bug in this kernel."""

    parts = SCALED_PARTS


def _scaled(name: str, found: str, **changed: str) -> ScaledBug:
    return ScaledBug(name, found, tuple((part, text.replace("@@", SCALED_PARTS[part]))
                                        for part, text in changed.items()))


SCALED_BUGS = (
    _scaled("scales that are not copied", "scales in tensor memory are read before they are written",
            first=SCALED_PARTS["first"].replace(_COPIES[1], "")),
    _scaled("scales that are overwritten while a product may read them", "while a product may read scales",
            second="@@" + _COPIES[0]),
    _scaled("scales that another thread copies", "before another thread's copies are complete", after="@@" + _OTHER,
            first=SCALED_PARTS["first"].replace(_COPIES[0], "")),
    _scaled("a copy of scales without a proxy fence", "without a fence.proxy.async", show="",
            first="".join(_COPIES) + PARTS["first"], second=PARTS["second"], kind="@@" + PARTS["kind"]),
    _scaled("a copy of scales with a swizzle", "no such tcgen05",
            kind="@@ add.s64 %rd13, %rd13, -9223372036854775808;"),
    _scaled("a copy to columns that are not allocated", "512 .. 515 of tensor memory are not allocated",
            first="@@ tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10+32], %rd13;"),
    _scaled("an instruction descriptor of scales that are powers of two", "that does not fit",
            kind="@@ add.s32 %r11, %r11, 8388608;"),
    _scaled("scales in lane 32", "scales in lane 32 of tensor memory",
            second=SCALED_PARTS["second"].replace("[%r10+20]", "[%r10+2097172]")),
)


def run_tensor(bug: TensorBug, seed: int = 0) -> tuple[bool, Checks]:
    """Run the kernel: whether the result is correct, and the findings.

    Raises:
        Fault: the machine stopped the kernel.
    """
    memory, checks = GlobalMemory(1 << 20), Checks(steps=2000)
    x, y = memory.allocate(10240), memory.allocate(128 * 64)
    x[:] = np.random.default_rng(1).integers(0, 120, 10240, np.uint8)
    memory.mark_written(x)
    addresses = [np.uint64(array.ctypes.data) for array in (y, x)]
    launch(parse(bug.text.replace("REGISTERS", _REGISTERS)), (1, 1, 1), 128, addresses, memory, checks, seed=seed)
    kind = "e2m1" if isinstance(bug, ScaledBug) else "e4m3"
    a, b = (READERS[kind](tile.view(np.uint32)).reshape(len(tile) // 64, 2, -1)
            for tile in (x[:8192], x[8192:9216]))
    if isinstance(bug, ScaledBug):   # the kernel has copied the scales with the swizzle of tiles
        at = np.arange(9216, 10240)
        scales = READERS["e4m3"](np.ascontiguousarray(x[at ^ (at >> 3 & 48)]))
        scales = scales.reshape(2, 32, 4, 4).transpose(0, 2, 1, 3)
        a, b = (side * np.repeat(own.reshape(128, 4)[:len(side)], 16, 1)[:, None] for side, own in zip((a, b), scales))
    expected = a[:, 0] @ b[:, 0].T + a[:, 1] @ b[:, 1].T
    return bool(np.allclose(y.view(np.float32).reshape(128, 16), expected, rtol=1e-5)), checks
