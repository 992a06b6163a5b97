"""The PTX interpreter of tests/cuda/ptx: planted bugs are found, correct kernels have no findings, and instructions and
fragments follow the PTX ISA. A compiler is needed only to run a Numba kernel."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.cuda.kernels import compiler_is_there
from tests.cuda.ptx.counters import Counters
from tests.cuda.ptx.findings import Checks, Fault
from tests.cuda.ptx.launch import launch, run
from tests.cuda.ptx.memory import GlobalMemory
from tests.cuda.ptx.model import CARDS, Resources, predict, resident_blocks
from tests.cuda.ptx.parse import ParseError, parse
from tests.cuda.ptx.planted import BUGS, COPY, LOAD, Bug, is_found, run_plain
from tests.cuda.ptx.planted_bulk import BULK_BUGS, BulkBug, run_bulk
from tests.cuda.ptx.planted_tensor import SCALED_BUGS, TENSOR_BUGS, ScaledBug, TensorBug, run_tensor
from tests.cuda.ptx.planted_tiles import TILE_BUGS, TileBug, run_tiles
from tests.cuda.ptx.timeline import USUAL, Latencies

FAR, MIDDLE, NEAR = USUAL


@pytest.mark.parametrize("bug", (*BUGS, *TILE_BUGS, *BULK_BUGS, *TENSOR_BUGS, *SCALED_BUGS), ids=lambda bug: bug.name)
def test_planted_bugs(bug):
    assert is_found(bug)


@pytest.mark.parametrize("load", [LOAD, COPY], ids=["plain", "copy"])
def test_a_right_kernel_is_right_in_any_order(load):
    for seed in range(4):
        right, checks = run_plain(Bug("", "", load=load), seed)
        assert right and not checks.notes, checks.notes


def test_a_right_product_of_a_warpgroup_is_right_in_any_order():
    for seed in range(6):
        right, checks = run_tiles(TileBug("", ""), seed)
        assert right and not checks.notes, checks.notes


@pytest.mark.parametrize("kind", [TensorBug, ScaledBug])
def test_a_right_product_in_tensor_memory_is_right_in_any_order(kind):
    for seed in range(6):
        right, checks = run_tensor(kind("", ""), seed)
        assert right and not checks.notes, checks.notes


def test_a_right_cluster_is_right_in_any_order():
    for seed in range(12):
        right, checks = run_bulk(BulkBug("", ""), seed)
        assert right and not checks.notes, (seed, checks.notes)


def test_what_depends_on_an_order_gives_other_results_in_others():
    assert len({run_plain(Bug("", "", barrier=""), seed)[0] for seed in range(6)}) == 2


def on_lanes(body: str, *columns, lanes: int = 32, declared: str = ".reg .b32 %r<40>; .reg .f32 %f<8>;",
             checks: Checks | None = None, width: int = 4) -> np.ndarray:
    """Run `body` on each lane: uint32 [lanes, width], the values of %r30, %r31, ...

    %r0, %r1, ... have the columns at the beginning, %r20 the lane.
    """
    memory = GlobalMemory(1 << 20)
    given = np.zeros((lanes, 4), np.uint32)
    for number, column in enumerate(columns):
        given[:, number] = np.broadcast_to(np.asarray(column), lanes).astype(np.asarray(column).dtype).view(np.uint32)
    x, y = memory.allocate(given.nbytes), memory.allocate(16 * lanes)
    x[:] = given.view(np.uint8).ravel()
    memory.mark_written(x)
    text = f""".visible .entry k(.param .u64 p_x, .param .u64 p_y) {{ .reg .pred %p<4>; .reg .b64 %rd<9>; {declared}
        ld.param.u64 %rd1, [p_x]; ld.param.u64 %rd2, [p_y]; mov.u32 %r20, %tid.x; mul.wide.u32 %rd3, %r20, 16;
        add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3; ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd4];
        mov.u32 %r30, 0; mov.u32 %r31, 0; mov.u32 %r32, 0; mov.u32 %r33, 0;
        {body}
        st.global.v4.u32 [%rd5], {{%r30, %r31, %r32, %r33}}; ret; }}"""
    found = checks or Checks()
    launch(parse(text), (1, 1, 1), lanes, [np.uint64(x.ctypes.data), np.uint64(y.ctypes.data)], memory, found)
    assert not found.notes, found.notes
    return y.view(np.uint32).reshape(lanes, 4)[:, :width]


WORDS = np.random.default_rng(1).integers(0, 2**32, (3, 32), dtype=np.uint32)
A, B, C = (row.tolist() for row in WORDS)
M = 2**32 - 1


def signed(word: int) -> int:
    return word - 2**32 if word >> 31 else word


WHOLE = {
    "prmt.b32 %r30, %r0, %r1, 0x6240;": lambda a, b, c: sum(((a | b << 32) >> 8 * n & 255) << 8 * at
                                                            for at, n in enumerate((0, 4, 2, 6))),
    "lop3.b32 %r30, %r0, %r1, %r2, 0xE8;": lambda a, b, c: a & b | a & c | b & c,
    "shf.l.wrap.b32 %r30, %r0, %r1, 11;": lambda a, b, c: (b << 32 | a) << 11 >> 32 & M,
    "shf.r.wrap.b32 %r30, %r0, %r1, 43;": lambda a, b, c: (b << 32 | a) >> 11 & M,
    "bfi.b32 %r30, %r0, %r1, 7, 9;": lambda a, b, c: b & ~(511 << 7) & M | (a & 511) << 7,
    "bfe.u32 %r30, %r0, 5, 12;": lambda a, b, c: a >> 5 & 4095,
    "bfe.s32 %r30, %r0, 5, 12;": lambda a, b, c: ((a >> 5 & 4095) - (4096 if a >> 16 & 1 else 0)) & M,
    "mul.hi.u32 %r30, %r0, %r1;": lambda a, b, c: a * b >> 32,
    "mul.hi.s32 %r30, %r0, %r1;": lambda a, b, c: signed(a) * signed(b) >> 32 & M,
    "mad.lo.s32 %r30, %r0, %r1, %r2;": lambda a, b, c: a * b + c & M,
    "shr.s32 %r30, %r0, 40;": lambda a, b, c: M if a >> 31 else 0,
    "shl.b32 %r30, %r0, 32;": lambda a, b, c: 0,
    "div.s32 %r30, %r0, 1000;": lambda a, b, c: int(signed(a) / 1000) & M,
    "rem.u32 %r30, %r0, 1000;": lambda a, b, c: a % 1000,
    "popc.b32 %r30, %r0;": lambda a, b, c: a.bit_count(),
    "clz.b32 %r30, %r0;": lambda a, b, c: 32 - a.bit_length(),
    "brev.b32 %r30, %r0;": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "min.s32 %r30, %r0, %r1;": lambda a, b, c: min(signed(a), signed(b)) & M,
    "add.cc.u32 %r31, %r0, %r1; addc.u32 %r30, 0, 0;": lambda a, b, c: a + b >> 32,
    "dp4a.u32.s32 %r30, %r0, %r1, %r2;": lambda a, b, c: sum(
        (a >> s & 255) * ((b >> s & 255) - (256 if b >> s & 128 else 0)) for s in (0, 8, 16, 24)) + c & M,
}


@pytest.mark.parametrize("body", WHOLE, ids=lambda body: body.split()[0])
def test_whole_numbers(body):
    assert on_lanes(body, *WORDS)[:, 0].tolist() == [WHOLE[body](a, b, c) for a, b, c in zip(A, B, C)]


def test_conversions():
    numbers = np.resize(np.array([0.5, 1.5, -2.5, 3e9, -3e9, np.nan, 1e-3, 65519.0], np.float32), 32)
    found = on_lanes("mov.b32 %f0, %r0; cvt.rni.s32.f32 %r30, %f0; cvt.rzi.u32.f32 %r31, %f0; "
                     "cvt.rn.f16x2.f32 %r32, %f0, %f0; cvt.rn.bf16x2.f32 %r33, %f0, %f0;", numbers)
    assert found[:8, 0].view(np.int32).tolist() == [0, 2, -2, 2**31 - 1, -2**31, 0, 0, 65519]
    assert found[:8, 1].tolist() == [0, 1, 0, 3 * 10**9, 0, 0, 0, 65519]
    low = (found[:8, 2] & 0xFFFF).astype(np.uint16).view(np.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(low, numbers[:8].astype(np.float16))
    back = (found[:8, 3] & 0xFFFF0000).view(np.float32)
    np.testing.assert_allclose(back, numbers[:8], rtol=2**-8)


@pytest.mark.parametrize(("instruction", "function", "bits"), [
    ("tanh.approx.f32", np.tanh, 11), ("ex2.approx.ftz.f32", np.exp2, 22), ("rsqrt.approx.f32", lambda x: x**-0.5, 22),
    ("rcp.approx.ftz.f32", lambda x: 1 / x, 23)])
def test_approximations_err_as_documented(instruction, function, bits):
    """At least the documented error, so that an error bound that fails on a GPU fails here too."""
    x = np.linspace(0.1, 0.9, 256, dtype=np.float32)
    body = f"mov.b32 %f0, %r0; {instruction} %f1, %f0; mov.b32 %r30, %f1;"
    exact = function(x.astype(np.float64))
    rough = on_lanes(body, x, lanes=256)[:, 0].copy().view(np.float32)
    worst = np.abs(rough / exact - 1).max()
    assert 2.0**-(bits + 2) < worst <= 2.0**-bits * 1.3
    fine = on_lanes(body, x, lanes=256, checks=Checks(approximate=False))[:, 0].copy().view(np.float32)
    assert np.abs(fine / exact - 1).max() < 2e-7


def test_shuffles_and_votes():
    lane = np.arange(32)
    found = on_lanes("shfl.sync.bfly.b32 %r30, %r20, 5, 31, -1; shfl.sync.idx.b32 %r31, %r20, 3, 0x181f, -1; "
                     "shfl.sync.down.b32 %r32|%p1, %r20, 4, 31, -1; setp.lt.u32 %p2, %r20, 7; "
                     "vote.sync.ballot.b32 %r33, %p2, -1;")
    assert found[:, 0].tolist() == (lane ^ 5).tolist()
    assert found[:, 1].tolist() == (lane // 8 * 8 + 3).tolist()
    assert found[:, 2].tolist() == np.where(lane + 4 < 32, lane + 4, lane).tolist()
    assert (found[:, 3] == 127).all()


@pytest.mark.parametrize(("kind", "depth"), [("f16", 8), ("f16", 16), ("bf16", 16), ("s8", 32)])
def test_fragments_of_tensor_cores(kind, depth):
    """D = A B + C in the layouts of the PTX ISA, computed here lane by lane."""
    rng, per = np.random.default_rng(2), 4 if kind == "s8" else 2
    a, b = (rng.integers(-9, 9, shape) for shape in ((16, depth), (depth, 8)))

    def words(numbers):                                        # of a fragment: [lanes, registers, per]
        if kind == "s8":
            return numbers.astype(np.int8).view(np.uint32)[..., 0]
        bits = numbers.astype(np.float16).view(np.uint16) if kind == "f16" else (
            numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return np.ascontiguousarray(bits).view(np.uint32)[..., 0]

    of_a, of_b, step = depth // per // 2, depth // per // 4, 4 * per
    group, inside = np.divmod(np.arange(32), 4)
    left = words(np.stack([[[a[g + 8 * (r & 1), per * i + e + step * (r >> 1)] for e in range(per)]
                            for r in range(of_a)] for g, i in zip(group, inside)]))
    right = words(np.stack([[[b[per * i + e + step * r, g] for e in range(per)] for r in range(of_b)]
                            for g, i in zip(group, inside)]))
    memory, checks = GlobalMemory(1 << 20), Checks()
    given = np.zeros((32, 8), np.uint32)
    given[:, :of_a], given[:, 4:4 + of_b] = left, right
    x, y = memory.allocate(given.nbytes), memory.allocate(512)
    x[:] = given.view(np.uint8).ravel()
    memory.mark_written(x)
    d, c, number = ("%r", "s32", "%r39") if kind == "s8" else ("%f", "f32", "%f39")
    regs = [f"{{{', '.join(f'%r{at + n}' for n in range(count))}}}" for at, count in ((0, of_a), (4, of_b))]
    out = ", ".join(f"{d}{10 + n}" for n in range(4))
    one = "mov.u32 %r39, 1;" if kind == "s8" else "mov.f32 %f39, 0f3F800000;"
    text = f""".visible .entry k(.param .u64 p_x, .param .u64 p_y) {{ .reg .b32 %r<40>; .reg .f32 %f<40>;
        .reg .b64 %rd<9>; ld.param.u64 %rd1, [p_x]; ld.param.u64 %rd2, [p_y]; mov.u32 %r20, %tid.x;
        mul.wide.u32 %rd3, %r20, 32; add.s64 %rd4, %rd1, %rd3; mul.wide.u32 %rd5, %r20, 16; add.s64 %rd6, %rd2, %rd5;
        ld.global.v4.u32 {{%r0, %r1, %r2, %r3}}, [%rd4]; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd4+16]; {one}
        mma.sync.aligned.m16n8k{depth}.row.col.{c}.{kind}.{kind}.{c} {{{out}}}, {regs[0]}, {regs[1]},
            {{{', '.join([number] * 4)}}};
        st.global.v4.{c} [%rd6], {{{out}}}; ret; }}"""
    launch(parse(text), (1, 1, 1), 32, [np.uint64(x.ctypes.data), np.uint64(y.ctypes.data)], memory, checks)
    found = y.view(np.int32 if kind == "s8" else np.float32).reshape(32, 4)
    expected = a @ b + 1
    for lane, (g, i) in enumerate(zip(group, inside)):
        wanted = [expected[g + 8 * (n >> 1), 2 * i + (n & 1)] for n in range(4)]
        assert found[lane].tolist() == wanted
    assert not checks.notes


def test_halves_of_a_word_may_have_different_writers():
    """Warps that write adjacent 16-bit halves do not race; warps that write the same half do."""
    def write(place):
        memory, checks = GlobalMemory(1 << 20), Checks()
        y = memory.allocate(512)
        text = f""".visible .entry k(.param .u64 p_y) {{ .reg .b32 %r<9>; .reg .b16 %rs<4>; .reg .b64 %rd<9>;
            ld.param.u64 %rd1, [p_y]; mov.u32 %r1, %tid.x; {place} mul.wide.u32 %rd2, %r2, 2; add.s64 %rd3, %rd1, %rd2;
            mov.u16 %rs1, 7; st.global.u16 [%rd3], %rs1; ret; }}"""
        launch(parse(text), (1, 1, 1), 64, [np.uint64(y.ctypes.data)], memory, checks)
        return checks.notes

    halves = "shl.b32 %r2, %r1, 1; and.b32 %r2, %r2, 63; shr.u32 %r3, %r1, 5; add.s32 %r2, %r2, %r3;"
    assert not write(halves)
    assert write("and.b32 %r2, %r1, 31;")


def test_counters():
    def counted(**change):
        checks = Checks(counted=True)
        bug = Bug("", "", **change)
        memory = GlobalMemory(1 << 20)
        x, y = memory.allocate(512), memory.allocate(512)
        memory.mark_written(x)
        launch(parse(bug.text), (1, 1, 1), 128, [np.uint64(y.ctypes.data), np.uint64(x.ctypes.data)], memory, checks)
        return checks.counters["turned"]

    plain = counted()
    assert (plain.warps, plain.sectors_per_request(), plain.ways(), plain.touched) == (4, 4, 1, 1024)
    apart = counted(load="and.b32 %r14, %r1, 15; mul.wide.u32 %rd6, %r14, 32; add.s64 %rd4, %rd2, %rd6; " + LOAD)
    assert apart.sectors_per_request() == 16
    banked = counted(load="and.b32 %r13, %r1, 3; shl.b32 %r13, %r13, 7; add.s32 %r6, %r5, %r13; " + LOAD)
    assert banked.ways("write") == 4


def clocks(body: str, threads: int = 32, blocks: int = 1, latencies: Latencies = USUAL) -> float:
    """Cycles of all blocks of a kernel that runs `body`; %rd1 points to 4 KB of memory."""
    memory, checks = GlobalMemory(1 << 20), Checks(counted=True, latencies=latencies)
    x = memory.allocate(4096)
    memory.mark_written(x)
    text = f""".visible .entry k(.param .u64 p_x) {{ .reg .b32 %r<20>; .reg .pred %p<3>; .reg .b64 %rd<9>;
        .shared .align 16 .b8 tile[2048]; ld.param.u64 %rd1, [p_x]; mov.u32 %r19, %tid.x; {body} ret; }}"""
    launch(parse(text), (blocks, 1, 1), threads, [np.uint64(x.ctypes.data)], memory, checks)
    return checks.counters["k"].clocks


LOADS = tuple(f"ld.global.u32 %r{n}, [%rd1+{128 * n}];" for n in range(3))


def test_a_block_waits_for_what_it_reads():
    """Independent loads overlap, dependent loads do not; a sector that was accessed before has a shorter latency."""
    nothing = clocks("")
    assert nothing < 20
    assert clocks(LOADS[0]) < 20                                                  # the result is not used
    one = clocks(LOADS[0] + "add.u32 %r8, %r0, 1;")
    assert FAR < one < FAR + 20
    assert one < clocks("".join(LOADS) + "add.u32 %r8, %r0, %r1; add.u32 %r8, %r8, %r2;") < one + 10
    used = [load + f"add.u32 %r8, %r{n}, 1;" for n, load in enumerate(LOADS)]
    assert one <= clocks(used[0] + used[1]) < one + 10                             # the second load is scheduled early
    assert 2 * FAR < clocks(used[0] + "bra $on; $on: " + used[1]) < 2 * FAR + 20
    assert 4 * MIDDLE < clocks(used[0], blocks=4) < 4 * MIDDLE + 60                # all blocks read one sector
    after = "and.b32 %r0, %r0, 0; cvt.u64.u32 %rd2, %r0; add.s64 %rd1, %rd1, %rd2;"
    assert 2 * FAR < clocks(LOADS[0] + after + LOADS[1] + "add.u32 %r8, %r1, 1;") < 2 * FAR + 30
    passing = [load.replace("global", "global.nc.L1::no_allocate.L2::128B").replace("+128", "+96") for load in LOADS]
    assert FAR + MIDDLE < clocks(passing[0] + after + passing[1] + "add.u32 %r8, %r1, 1;") < FAR + MIDDLE + 30
    assert FAR + NEAR < clocks(LOADS[0] + after + LOADS[0] + "add.u32 %r8, %r0, 1;") < FAR + NEAR + 30


def test_a_block_waits_for_copies_and_at_barriers():
    copy = "mov.u32 %r5, tile; cp.async.cg.shared.global [%r5{0}], [%rd1{0}], 16; cp.async.commit_group;"
    first, second = copy.format(""), copy.format("+512")
    assert clocks(first + second) < 30
    assert FAR < clocks(first + second + "cp.async.wait_group 1;") < FAR + 30
    late = LOADS[2] + "add.u32 %r8, %r2, 1; bra $late; $late: "                   # a wait between the two groups
    assert 2 * FAR < clocks(first + late + second + "cp.async.wait_group 0;") < 2 * FAR + 40
    assert clocks(first + late + second + "cp.async.wait_group 1;") < FAR + 40
    alone = "setp.ge.u32 %p1, %r19, 32; @%p1 bra $on; " + LOADS[0] + "add.u32 %r8, %r0, 1; $on: "
    assert FAR < clocks(alone + "bar.sync 0; " + "add.u32 %r9, %r19, 1; " * 50, 64) < FAR + 100
    assert clocks(alone + "bar.sync 0; " + LOADS[1] + "add.u32 %r8, %r1, 1;", 64) > 2 * FAR


def test_the_time_of_a_launch():
    """Occupancy, waves of blocks, and which of two limits applies, computed by hand."""
    card, has = CARDS["H200"], Resources(64, 0, 128)
    assert resident_blocks(card, has) == 8                     # 8192 registers each
    assert resident_blocks(card, Resources(32, 100 << 10, 128)) == 2
    slow = Counters(blocks=10, touched=10 << 10, clocks=10 * 16000.0)
    few = predict(card, has, slow, 132 * 8)
    assert few.bound_by == "waiting" and few.waiting == pytest.approx(16000 / 1.75e9)
    assert few.in_flight == pytest.approx(8 * 1024 / 16000 * 800, abs=1)      # of 8 blocks of 1 KB each
    assert predict(card, has, slow, 132 * 16).waiting == pytest.approx(2 * few.waiting)
    quick = predict(card, has, Counters(blocks=10, touched=10 << 20, clocks=10 * 1600.0), 132 * 8)
    assert quick.bound_by == "memory" and quick.memory == pytest.approx(132 * 8 * (1 << 20) / 4.3e12)
    assert quick.seconds == pytest.approx(quick.memory + 0.7e-6 + 800 / 1.75e9) and 0.9 < quick.share(card) < 1


def test_the_time_of_a_launch_that_is_there_before_its_turn():
    """Prefetches and work before griddepcontrol.wait overlap with the previous kernel, on GPUs with dependent
    launch."""
    card, has = CARDS["H200"], Resources(64, 0, 128)
    at_once = {"blocks": 10, "touched": 10 << 20, "clocks": 10 * 1600.0}
    plain, few, many = (predict(card, has, Counters(**at_once, prefetched=nbytes), 132 * 8)
                        for nbytes in (0, 1000, 10 << 20))
    assert plain.memory - few.memory == pytest.approx(100 * 132 * 8 / 4.3e12) and few.latency == MIDDLE / card.clock
    assert plain.memory - many.memory == pytest.approx(0.7e-6)                # limited by the length of the boundary
    old = replace(card, dependent=None)
    without = predict(old, has, Counters(**at_once, prefetched=1000), 132 * 8)
    assert without.seconds == pytest.approx(plain.seconds + 0.6e-6)
    waits = {"blocks": 10, "touched": 10 << 10, "clocks": 10 * 16000.0, "early_clocks": 10 * 1000.0}
    assert predict(card, has, Counters(**waits), 132 * 16).waiting == pytest.approx(31000 / 1.75e9)
    assert predict(old, has, Counters(**waits), 132 * 16).waiting == pytest.approx(32000 / 1.75e9)


def test_each_gpu_has_latencies_of_its_own():
    """A first load takes as long as the GPU's DRAM, a load of another block's sector as long as its L2."""
    slow, use = Latencies(1100, 570), LOADS[0] + "add.u32 %r8, %r0, 1;"
    assert 1100 < clocks(use, latencies=slow) < 1120
    assert 4 * 570 < clocks(use, blocks=4, latencies=slow) < 4 * 570 + 60


def test_products_of_each_instruction_take_their_time():
    """A B200 multiplies bytes twice, and 4-bit floats four times, as fast as float16."""
    card, has = CARDS["B200"], Resources(168, 100 << 10, 288)
    full = card.multiprocessors * card.clock * card.pairs              # float16 multiplications a second
    for name, pairs in (("tcgen05 of bytes", 2), ("tcgen05 of fours", 4), ("mma", card.sync)):
        found = predict(card, has, Counters(blocks=1, products=Counter({name: full * pairs})), 1)
        assert found.tensor == pytest.approx(1) and found.bound_by == "tensor"


def test_what_is_asked_for_early_comes_from_the_second_cache():
    use, wait = LOADS[0] + "add.u32 %r8, %r0, 1;", "griddepcontrol.wait;"
    assert MIDDLE < clocks("prefetch.global.L2 [%rd1];" + wait + use) < MIDDLE + 30
    assert FAR < clocks("prefetch.global.L2 [%rd1+128];" + wait + use) < FAR + 30


@pytest.mark.parametrize(("text", "message"), [
    ("nothing", "no .entry"), (".visible .entry k() { .reg .b32 %r<3>; frobnicate.b32 %r1, %r2; ret; }", "frobnicate"),
    (".visible .entry k() { .reg .b32 %r<3>; bar.sync 1, 64; ret; }", "names or counts")])
def test_what_is_not_known_is_said(text, message):
    with pytest.raises((ParseError, Fault), match=message):
        launch(parse(text), (1, 1, 1), 64, [], GlobalMemory(1 << 20), Checks())


@pytest.mark.slow
@pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda")
def test_kernels_of_numba():
    """An ordinary Numba kernel: a correct one, then one that accesses one element too many."""
    from numba import cuda

    def saxpy(y, x, factor):
        at = cuda.grid(1)
        if at < y.shape[0]:
            y[at] += factor * x[at]

    def too_far(y, x, factor):
        y[cuda.grid(1)] = factor * x[cuda.grid(1)]

    x, y = np.arange(100, dtype=np.float32), np.ones(100, np.float32)
    checks = run(saxpy, 2, 64, y, x, np.float32(2))
    np.testing.assert_array_equal(y, 2 * x + 1)
    assert not checks.notes
    with pytest.raises(Fault, match="outside global memory: at 400 of the 400 bytes"):
        run(too_far, 2, 64, y, x, np.float32(2))
