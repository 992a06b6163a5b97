"""A correct kernel with wgmma, and planted bugs, as in planted.py: python -m tests.cuda.ptx.planted.

A warpgroup copies a tile of 64 x 16 float16 and a tile of 8 x 16 to shared memory, each as two blocks of 8 columns with
rows of 16 bytes, and multiplies the first by the transpose of the second. y[4 * thread + i] is accumulator i.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .findings import Checks
from .launch import launch
from .memory import GlobalMemory
from .parse import parse

PARTS = {"copy": "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4]; st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};",
         "show": "fence.proxy.async;", "barrier": "bar.sync 0;", "hand": "wgmma.fence.sync.aligned;",
         "product": "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd6, %rd7, "
                    "1, 1, 1, 0, 0;",
         "send": "wgmma.commit_group.sync.aligned;", "wait": "wgmma.wait_group.sync.aligned 0;", "behind": ""}
# A matrix descriptor has address / 16, the offset of the next 8 columns / 16 << 16, and of the next 8 rows / 16 << 32.
TEXT = """
.visible .entry product(.param .u64 p_y, .param .u64 p_x)
{
.reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<16>; .reg .f32 %f<8>;
.shared .align 1024 .b8 tiles[2304];
ld.param.u64 %rd1, [p_y]; ld.param.u64 %rd2, [p_x]; mov.u32 %r1, %tid.x;
mov.u32 %r2, tiles; shl.b32 %r8, %r1, 4; add.s32 %r3, %r2, %r8; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd2, %rd3;
COPY
setp.ge.u32 %p1, %r1, 16; @%p1 bra $copied;
add.s32 %r3, %r3, 2048; add.s64 %rd4, %rd4, 2048;
COPY
$copied:
SHOW BARRIER
mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
cvt.u64.u32 %rd5, %r2; shr.u64 %rd5, %rd5, 4; add.s64 %rd6, %rd5, 34363932672; add.s64 %rd7, %rd5, 34360262784;
HAND
PRODUCT
SEND
WAIT
BEHIND
mul.wide.u32 %rd8, %r1, 16; add.s64 %rd9, %rd1, %rd8; st.global.v4.f32 [%rd9], {%f1, %f2, %f3, %f4};
ret;
}
"""
_THREE_WARPS = "setp.ge.u32 %p2, %r1, 96; @%p2 bra $on; {} $on: "


@dataclass(frozen=True)
class PartsBug:
    """A bug: replacements of named parts of a correct kernel, and a part of the finding's text.

    kernel: PTX with the names of parts in capitals. parts: the text of each part in the correct kernel.
    """

    kernel: ClassVar[str]
    parts: ClassVar[dict[str, str]]
    name: str
    found: str
    changed: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """PTX of the kernel with the bug."""
        text = self.kernel
        for name, part in (self.parts | dict(self.changed)).items():
            text = text.replace(name.upper(), part)
        return text


class TileBug(PartsBug):
    """A bug in the kernel above."""

    kernel, parts = TEXT, PARTS


TILE_BUGS = (
    TileBug("a tile without a proxy fence", "without a fence.proxy.async", (("show", ""),)),
    TileBug("a tile that other warps are still writing", "race on shared memory between warps", (("barrier", ""),)),
    TileBug("accumulators without wgmma.fence", "accumulators are written after wgmma.fence", (("hand", ""),)),
    TileBug("accumulators that are written after wgmma.fence", "accumulators are written after wgmma.fence",
            (("hand", PARTS["hand"] + "mov.f32 %f2, 0f3F800000;"),)),
    TileBug("accumulators read without a wait", "used before wgmma.wait_group", (("wait", ""),)),
    TileBug("a product that is not committed", "used before wgmma.wait_group", (("send", ""),)),
    TileBug("a wait for an earlier group", "used before wgmma.wait_group",
            (("wait", PARTS["wait"].replace(" 0", " 1")),)),
    TileBug("accumulators written while the product is pending", "used before wgmma.wait_group",
            (("send", PARTS["send"] + "mov.f32 %f3, 0f00000000;"),)),
    TileBug("a tile that is overwritten while it is read", "race on shared memory between warps",
            (("send", PARTS["send"] + "bar.sync 0; xor.b32 %r9, %r8, 512; st.shared.u32 [%r9], %r1;"),
             ("wait", "bar.sync 0;" + PARTS["wait"]))),
    TileBug("a warp of the warpgroup that takes no part", "not all warps of a warpgroup",
            (("product", _THREE_WARPS.format(PARTS["hand"] + PARTS["product"] + PARTS["send"] + PARTS["wait"])),
             ("hand", ""), ("send", ""), ("wait", ""))),
    TileBug("a product that only part of a warp executes", "lanes of a warp diverge",
            (("product", _THREE_WARPS.replace("96", "100").format(PARTS["product"])),)),
    TileBug("lanes with different descriptors", "describe different tiles",
            (("hand", PARTS["hand"] + "cvt.u64.u32 %rd10, %r1; add.s64 %rd6, %rd6, %rd10;"),)),
    TileBug("a tile that is not aligned to its swizzle pattern", "within the pattern of its swizzle",
            (("hand", PARTS["hand"] + "add.s64 %rd6, %rd6, -9223372036854775800;"),)),
    TileBug("a tile beyond the end of shared memory", "bytes of shared memory",
            (("hand", PARTS["hand"] + "add.s64 %rd7, %rd7, 120;"),)),
)


def run_tiles(bug: TileBug, seed: int = 0) -> tuple[bool, Checks]:
    """Run the kernel: whether the result is correct, and the findings.

    Raises:
        Fault: the machine stopped the kernel.
    """
    memory, checks = GlobalMemory(1 << 20), Checks(steps=2000)
    x, y = memory.allocate(2304), memory.allocate(128 * 16)
    a, b = (np.random.default_rng(1).integers(-8, 8, (rows, 16)).astype(np.float16) for rows in (64, 8))
    x[:] = np.concatenate([tile.reshape(-1, 2, 8).transpose(1, 0, 2).ravel() for tile in (a, b)]).view(np.uint8)
    memory.mark_written(x)
    addresses = [np.uint64(array.ctypes.data) for array in (y, x)]
    launch(parse(bug.text), (1, 1, 1), 128, addresses, memory, checks, seed=seed)
    product = a.astype(np.float32) @ b.T.astype(np.float32)
    warp, lane, part = np.arange(128)[:, None] // 32, np.arange(128)[:, None] % 32, np.arange(4)
    expected = product[16 * warp + lane // 4 + 8 * (part >> 1), 2 * (lane % 4) + (part & 1)]
    return bool((y.view(np.float32).reshape(128, 4) == expected).all()), checks
