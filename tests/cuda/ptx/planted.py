"""A correct kernel, and planted bugs. Each bug must be found, with the text that its row says.

    python -m tests.cuda.ptx.planted

The kernel rotates float32 by way of shared memory: y[128 b + i] = x[128 b + (i + 32) % 128], with 128 threads a block.
So each warp reads values that another warp wrote.
"""

import sys
from dataclasses import dataclass

import numpy as np

from .findings import Checks, Fault
from .launch import launch
from .memory import GlobalMemory
from .parse import parse
from .planted_bulk import BULK_BUGS, BulkBug, run_bulk
from .planted_tensor import SCALED_BUGS, TENSOR_BUGS, ScaledBug, TensorBug, run_tensor
from .planted_tiles import TILE_BUGS, TileBug, run_tiles

BLOCKS = 3
LOAD = "ld.global.f32 %f1, [%rd4]; st.shared.f32 [%r6], %f1;"
BARRIER = "bar.sync 0;"
READ = "ld.shared.f32 %f2, [%r8];"
WRITE = "st.global.f32 [%rd5], %f2;"
# An alternative to LOAD: the first warp copies by cp.async, 16 bytes a lane.
COPY = """setp.ge.u32 %p1, %r1, 32; @%p1 bra $copied;
mul.wide.u32 %rd6, %r2, 512; mul.wide.u32 %rd7, %r1, 16; add.s64 %rd8, %rd2, %rd6; add.s64 %rd9, %rd8, %rd7;
shl.b32 %r9, %r1, 4; add.s32 %r10, %r5, %r9;
cp.async.cg.shared.global [%r10], [%rd9], 16; cp.async.commit_group; cp.async.wait_group 0;
$copied: """
TEXT = """
.visible .entry turned(.param .u64 p_y, .param .u64 p_x)
{
.reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<16>; .reg .f32 %f<8>;
.shared .align 16 .b8 tile[512];
ld.param.u64 %rd1, [p_y]; ld.param.u64 %rd2, [p_x];
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 128, %r1;
mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3;
shl.b32 %r4, %r1, 2; mov.u32 %r5, tile; add.s32 %r6, %r5, %r4;
LOAD
BARRIER
add.s32 %r7, %r4, 128; and.b32 %r7, %r7, 511; add.s32 %r8, %r5, %r7;
READ
WRITE
ret;
}
"""


@dataclass(frozen=True)
class Bug:
    """A bug: replacements of parts of the correct kernel, and a part of the finding's text."""

    name: str
    found: str
    load: str = LOAD
    barrier: str = BARRIER
    read: str = READ
    write: str = WRITE
    blocks: int = BLOCKS
    freed: bool = False

    @property
    def text(self) -> str:
        """PTX of the kernel with the bug."""
        text = TEXT
        for name in ("load", "barrier", "read", "write"):
            text = text.replace(name.upper(), getattr(self, name))
        return text


_FIRST_WARPS = "setp.lt.u32 %p2, %r1, {}; @%p2 bra $on; {} $on: "
BUGS = (
    Bug("no barrier", "race on shared memory between warps", barrier=""),
    Bug("a warp barrier where a block barrier is needed", "race on shared memory between warps",
        barrier="bar.warp.sync -1;"),
    Bug("a block barrier that half of the warps skip", "after warps of the block have exited",
        barrier=_FIRST_WARPS.format(64, "bar.sync 0; bar.sync 0; bra $out;") + "bar.sync 0; $out: "),
    Bug("warps that wait at two different barriers", "different barriers",
        barrier=_FIRST_WARPS.format(64, "bar.sync 0; bra $out;") + "bar.sync 0; $out: "),
    Bug("a block barrier that part of a warp skips", "lanes of a warp diverge",
        barrier=_FIRST_WARPS.format(40, "bar.sync 0;")),
    Bug("a shuffle in divergent code", "lanes of a warp diverge",
        barrier="bar.sync 0;" + _FIRST_WARPS.format(40, "shfl.sync.bfly.b32 %r11, %r1, 1, 31, -1;")),
    Bug("a shuffle under a predicate", "part of a warp", barrier="bar.sync 0; setp.lt.u32 %p2, %r1, 40; "
        "@%p2 shfl.sync.bfly.b32 %r11, %r1, 1, 31, -1;"),
    Bug("lanes that exchange data without a warp barrier", "race on shared memory between lanes",
        read="st.shared.f32 [%r8], %f1; xor.b32 %r11, %r8, 4; ld.shared.f32 %f2, [%r11];"),
    Bug("one block too many", "outside global memory", blocks=BLOCKS + 1),
    Bug("a read one element too far", "outside global memory", load=LOAD.replace("[%rd4]", "[%rd4+4]")),
    Bug("a write one element too far", "outside global memory", write="st.global.f32 [%rd5+4], %f2;"),
    Bug("shared memory overrun", "bytes of shared memory", load=LOAD.replace("[%r6]", "[%r6+4]")),
    Bug("a misaligned read", "misaligned global read", load=LOAD.replace("[%rd4]", "[%rd4+2]")),
    Bug("a misaligned write of 8 bytes", "misaligned global write", write="st.global.v2.f32 [%rd5], {%f2, %f2};"),
    Bug("a misaligned read of shared memory", "misaligned shared read", read="ld.shared.v2.f32 {%f2, %f3}, [%r8];"),
    Bug("a misaligned copy", "misaligned global read", load=COPY.replace("[%rd9], 16", "[%rd9+8], 16")),
    Bug("a copy that nobody waits for", "before a copy into it has landed",
        load=COPY.replace("cp.async.wait_group 0;", "")),
    Bug("a wait for an earlier group of copies", "before a copy into it has landed",
        load=COPY.replace("wait_group 0", "wait_group 1")),
    Bug("freed memory", "was freed", freed=True),
    Bug("uninitialised global memory", "global memory is read before", load=LOAD.replace("[%rd4]", "[%rd5]")),
    Bug("uninitialised shared memory", "shared memory is read before", load=""),
    Bug("an uninitialised register", "a register is read before", load=LOAD.replace(", %f1;", ", %f7;")),
    Bug("a register that only some lanes wrote", "a register is read before",
        load="setp.lt.u32 %p3, %r1, 64; @%p3 ld.global.f32 %f1, [%rd4]; st.shared.f32 [%r6], %f1;"),
    Bug("lanes that write different values to one address", "different values to one place",
        write="and.b64 %rd10, %rd5, -128; st.global.f32 [%rd10], %f2;"),
    Bug("blocks that write to one address", "race on global memory between blocks",
        write="cvt.u64.u32 %rd10, %r4; add.s64 %rd11, %rd1, %rd10; st.global.f32 [%rd11], %f2;"),
    Bug("a block that reads what another block writes", "race on global memory between blocks",
        write=WRITE + "ld.global.f32 %f3, [%rd1]; st.global.f32 [%rd5], %f3;"),
    Bug("warps that exchange data through global memory without a barrier", "race on global memory between warps",
        write="st.global.f32 [%rd5], %f2; xor.b32 %r12, %r3, 64; mul.wide.u32 %rd10, %r12, 4; add.s64 %rd11, %rd1, "
        "%rd10; ld.global.f32 %f3, [%rd11];"),
    Bug("a global read before griddepcontrol.wait", "accessed before griddepcontrol.wait",
        barrier=BARRIER + " griddepcontrol.wait;"),
    Bug("threads that exit without griddepcontrol.wait", "exit without griddepcontrol.wait",
        load=_FIRST_WARPS.format(64, "griddepcontrol.wait;") + LOAD.replace("ld.global", "ld.global.nc")),
    Bug("an atomic and an ordinary read", "race on shared memory between warps",
        read="atom.shared.add.u32 %r13, [tile], 1; ld.shared.f32 %f2, [tile];"),
    Bug("an endless loop", "does not end", read="$again: bra $again;" + READ),
)


def run_plain(bug: Bug, seed: int = 0) -> tuple[bool, Checks]:
    """Run the kernel: whether the result is correct, and the findings.

    Raises:
        Fault: the machine stopped the kernel.
    """
    memory, checks = GlobalMemory(1 << 20), Checks(steps=2000)
    x, y = memory.allocate(512 * BLOCKS), memory.allocate(512 * BLOCKS)
    x.view(np.float32)[:] = np.arange(128 * BLOCKS)
    memory.mark_written(x)
    if bug.freed:
        memory.free(x)
    addresses = [np.uint64(array.ctypes.data) for array in (y, x)]
    launch(parse(bug.text), (bug.blocks, 1, 1), 128, addresses, memory, checks, seed=seed)
    expected = np.roll(x.view(np.float32).reshape(-1, 128), -32, 1).ravel()
    return bool((y.view(np.float32) == expected).all()), checks


RUN = {Bug: run_plain, TileBug: run_tiles, BulkBug: run_bulk, TensorBug: run_tensor,
       ScaledBug: run_tensor}        # by the kind of a bug


def is_found(bug: Bug | TileBug | BulkBug | TensorBug, seed: int = 0) -> bool:
    """Whether the machine reports the bug with the expected text."""
    try:
        _, checks = RUN[type(bug)](bug, seed)
    except Fault as fault:
        return bug.found in str(fault)
    return any(bug.found in note for note in checks.notes)


def main() -> int:
    """Run all bugs and the correct kernels. The exit status is 1 if a bug is missed or a correct kernel is reported."""
    bugs = (*BUGS, *TILE_BUGS, *BULK_BUGS, *TENSOR_BUGS, *SCALED_BUGS)
    missed = [bug.name for bug in bugs if not is_found(bug)]
    found = len(bugs) - len(missed)
    for right, checks in (run(kind("", "")) for kind, run in RUN.items()):
        if not right or checks.notes:
            missed.append(f"false positives for a correct kernel: {dict(checks.notes)}")
    print(*missed, sep="\n", end="\n" * bool(missed))
    print(f"{len(bugs)} planted bugs, {found} found")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
