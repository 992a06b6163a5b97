"""The Python twins of intrinsics, against NumPy and against the PTX ISA."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.lang import arithmetic, float4, float8
from numflow.cuda.lang import intrinsics as i
from numflow.cuda.lang.intrinsic import ALL, SharedArray
from numflow.cuda.lang.kernel import REGISTRY, kernel
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.simulator import SimulatedPointer, SimulatorError
from numflow.quant.hub_types import TABLES

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")


def run(made, grid, *args, seed=0):
    """Run a kernel with NumPy arrays and scalars as arguments; return the arrays afterwards."""
    del REGISTRY[made.name]
    device, memories = Simulated(seed=seed), []
    values = []
    for value in args:
        if isinstance(value, np.ndarray):
            memories.append((device.alloc(value.nbytes), value.dtype))
            device.upload(memories[-1][0].at(), value)
            value = memories[-1][0].at()
        values.append(value)
    device.launch(Launch(made, (*grid, 1, 1)[:3], tuple(values)))
    return [device.download(memory.at(), memory.nbytes).view(dtype) for memory, dtype in memories]


@pytest.mark.parametrize("seed", range(3))
def test_dot_products_of_bytes(seed):
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-128, 128, (2, 4), dtype=np.int8)
    words = [int(v.view(np.uint32)[0]) for v in (a, b)]
    assert arithmetic.dp4a(*words, 7) == 7 + int(a.astype(int) @ b.astype(int))
    assert arithmetic.dp4a_us(*words, -7) == -7 + int(a.view(np.uint8).astype(int) @ b.astype(int))


def test_bytes_are_permuted():
    a, b = 0x03020100, 0x87068504
    assert arithmetic.prmt(a, b, 0x3210) == a
    assert arithmetic.prmt(a, b, 0x7654) == b
    assert arithmetic.prmt(a, b, 0x0246) == 0x00020406
    assert arithmetic.prmt(a, b, 0x080D) == 0x000000FF  # the signs of bytes 0 and 5


def test_halves():
    assert arithmetic.pack_halves(1.0, -2.0) == 0xC0003C00
    pairs = (1.0, -2.0), (1.0625, 1.1875), (500.0, -1e-3), (464.0, float("nan"))  # 9/8 is odd, the smallest 2^-9
    assert [float8.pack_e4m3(*pair) for pair in pairs] == [0xC038, 0x3A38, 0x817E, 0x7F7E]
    assert arithmetic.low_half(0xC0003C00) == 1.0
    assert arithmetic.high_half(0xC0003C00) == -2.0
    assert arithmetic.half_to_float(arithmetic.float_to_half(0.1)) == np.float32(np.float16(0.1))
    assert arithmetic.pack_bfloats(1.0, 1.00390625) == 0x3F803F80  # ties to even
    assert arithmetic.round_to_int(2.5) == 2
    assert arithmetic.round_to_int(float("nan")) == 0


def test_rounding_down():
    for value, expected in ((2.5, 2), (-2.5, -3), (-0.0, 0), (1e20, 2**31 - 1), (-np.inf, -2**31), (np.nan, 0)):
        assert arithmetic.floor_to_int(f32(value)) == expected
    for value in (0, 0.49999997, 0.99999994, 1, 7.5, 2**21 + 0.75, 2**22 - 0.5):
        assert arithmetic.floor_exactly(f32(value)) == np.floor(value)


def test_integers_wrap():
    assert u32(-1) == 0xFFFFFFFF
    assert i32(0x80000000) == -0x80000000


def _bfloats(x):
    """The bits of small integers as bfloat16."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _e4m3(x):
    return float8.e4m3_code(x).astype(np.uint8)


def _e5m2(x):
    return (x.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)


@pytest.mark.parametrize(("op", "left", "right", "k"), [
    (arithmetic.mma_f16, np.float16, np.float16, 16), (arithmetic.mma_bf16, _bfloats, _bfloats, 16),
    (float8.mma_e4m3, _e4m3, _e4m3, 32), (float8.mma_e5m2, _e5m2, _e4m3, 32)])
def test_matrices_of_a_warp(op, left, right, k):
    """mma fragments in the layout of the PTX ISA, built here element by element."""
    rng = np.random.default_rng(0)
    numbers = rng.integers(-5, 6, (16, k)), rng.integers(-5, 6, (k, 8))
    a, b = left(numbers[0]), right(numbers[1])
    per_word = 4 // a.itemsize
    words_a, words_b = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        for half in range(2):
            columns = slice(t * per_word + half * k // 2, (t + 1) * per_word + half * k // 2)
            words_a[lane, 2 * half] = a[group, columns].copy().view(np.uint32)[0]
            words_a[lane, 2 * half + 1] = a[group + 8, columns].copy().view(np.uint32)[0]
            words_b[lane, half] = b[columns, group].copy().view(np.uint32)[0]

    @kernel("mma_probe", 32)
    def _probe(y: f32.ptr, a: u32.ptr, b: u32.ptr):
        lane = i.lane_index()
        a0, a1, a2, a3 = i.load4(a, 4 * lane)
        b0, b1 = i.load2(b, 2 * lane)
        c0, c1, c2, c3 = op(a0, a1, a2, a3, b0, b1, f32(1), f32(0), f32(0), f32(0))
        row, column = lane // 4, lane % 4 * 2
        y[row * 8 + column], y[row * 8 + column + 1] = f32(c0), f32(c1)
        y[(row + 8) * 8 + column], y[(row + 8) * 8 + column + 1] = f32(c2), f32(c3)

    y = run(_probe, (1,), np.zeros(128, np.float32), words_a.ravel(), words_b.ravel(), seed=2)[0].reshape(16, 8)
    expected = (numbers[0] @ numbers[1]).astype(np.float32)
    expected[:8, ::2] += 1
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("other", range(4))
@pytest.mark.parametrize("op", [float4.mma_nvfp4, float4.mma_mxfp4])
def test_matrices_of_a_warp_with_scales(op, other, pair):
    """Scales come from the selected lanes only: the other lanes have other values."""
    rng, blocks = np.random.default_rng(other), 4 if op is float4.mma_nvfp4 else 2
    codes = rng.integers(0, 16, (24, 64)).astype(np.uint32)
    stored = rng.integers(0x30, 0x48, (24, blocks)) if blocks == 4 else rng.integers(125, 130, (24, blocks))
    scales = TABLES["e4m3"][stored] if blocks == 4 else 2.0 ** (stored - 127)
    numbers = float4.E2M1[codes & 7] * (1 - 2.0 * (codes >> 3)) * np.repeat(scales, 64 // blocks, 1)
    packed = (codes.reshape(24, 8, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(2, dtype=np.uint32)
    own = np.pad(stored, ((0, 0), (0, 4 - blocks))).astype(np.uint8).view(np.uint32)[:, 0]
    words, by_lane = np.zeros((32, 8), np.uint32), np.full((32, 2), 0x7F7F7F7F, np.uint32)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        words[lane, :6] = (packed[group, t], packed[group + 8, t], packed[group, t + 4], packed[group + 8, t + 4],
                           packed[16 + group, t], packed[16 + group, t + 4])
        if t // 2 == pair:
            by_lane[lane, 0] = own[group + 8 * (t % 2)]
        if t == other:
            by_lane[lane, 1] = own[16 + group]

    @kernel("mma_scaled_probe", 32)
    def _probe(y: f32.ptr, words: u32.ptr, scales: u32.ptr):
        lane = i.lane_index()
        a0, a1, a2, a3 = i.load4(words, 8 * lane)
        b0, b1, _, _ = i.load4(words, 8 * lane + 4)
        left, right = i.load2(scales, 2 * lane)
        c0, c1, c2, c3 = op(a0, a1, a2, a3, b0, b1, f32(1), f32(0), f32(0), f32(0), left, pair, right, other)
        row, column = lane // 4, lane % 4 * 2
        y[row * 8 + column], y[row * 8 + column + 1] = f32(c0), f32(c1)
        y[(row + 8) * 8 + column], y[(row + 8) * 8 + column + 1] = f32(c2), f32(c3)

    y = run(_probe, (1,), np.zeros(128, np.float32), words.ravel(), by_lane.ravel(), seed=2)[0].reshape(16, 8)
    expected = (numbers[:16] @ numbers[16:].T).astype(np.float32)
    expected[:8, ::2] += 1
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_floats_of_4_bits():
    """Ties go to the even code; values above 6, and NaN, become 6."""
    numbers = 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 7.0
    assert float4.pack_e2m1(*numbers) == 0x76E44A20
    assert float4.pack_e2m1(*[float("nan")] * 8) == 0x77777777
    assert float4.e2m1_values(np.array([0x76E44A20], np.uint32)).tolist() == [[0, 1, -1, 2, 2, -4, 4, 6]]


def test_loading_matrices():
    """Row r of matrix m is at word 4 * (8 m + r); lane l gets word l % 4 of row l // 4 of each matrix."""
    memory = SharedArray(u32, 128)

    @kernel("ldmatrix_probe", 32)
    def _probe(y: u32.ptr):
        lane, shared = i.lane_index(), memory()
        for j in range(4):
            shared[4 * lane + j] = u32(4 * lane + j)
        i.sync_warp()
        a, b, c, d = arithmetic.load_matrices(shared, 4 * lane)
        i.store4(y, 4 * lane, a, b, c, d)

    y = run(_probe, (1,), np.zeros(128, np.uint32), seed=1)[0].reshape(32, 4)
    for lane in range(32):
        assert y[lane].tolist() == [4 * (8 * m + lane // 4) + lane % 4 for m in range(4)]


def test_transposed_matrices():
    """Element (r, c) of matrix m is 100 m + 8 r + c; a lane gets (2 t, g) and (2 t + 1, g) of each."""
    memory = SharedArray(u32, 128)

    @kernel("ldmatrix_trans_probe", 32)
    def _probe(y: u32.ptr, x: u32.ptr):
        lane, shared = i.lane_index(), memory()
        for j in range(4):
            shared[4 * lane + j] = x[4 * lane + j]
        i.sync_warp()
        a, b, c, d = arithmetic.load_columns(shared, 4 * lane)
        i.store4(y, 8 * lane, a, b, c, d)
        a, b, c, d = arithmetic.load_matrices(shared, 4 * lane)
        i.store4(y, 8 * lane + 4, arithmetic.transpose_matrix(a), arithmetic.transpose_matrix(b),
                 arithmetic.transpose_matrix(c), arithmetic.transpose_matrix(d))

    x = (100 * np.arange(4)[:, None] + np.arange(64)).astype(np.uint16)
    y = run(_probe, (1,), np.zeros(256, np.uint32), x.reshape(-1).view(np.uint32), seed=3)[0].reshape(32, 8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        expected = [100 * m + 16 * t + g | (100 * m + 16 * t + 8 + g) << 16 for m in range(4)]
        assert y[lane].tolist() == 2 * expected


def test_shuffles_and_ballots():
    @kernel("shuffle_probe", 64)
    def _probe(y: i32.ptr, z: u32.ptr):
        t = i.thread_index()
        y[t] = i.shuffle_xor(t, 5) + 100 * i.shuffle(t, 3)
        z[t] = i.ballot(i.lane_index() % 3 == 0)

    y, z = run(_probe, (1,), np.zeros(64, np.int32), np.zeros(64, np.uint32), seed=4)
    lanes = np.arange(64)
    np.testing.assert_array_equal(y, (lanes ^ 5) + 100 * (lanes // 32 * 32 + 3))
    assert set(z.tolist()) == {sum(1 << lane for lane in range(0, 32, 3))}


def test_background_copies_land_when_they_are_waited_for():
    memory = SharedArray(u32, 128)

    @kernel("copy_probe", 32)
    def _probe(y: u32.ptr, x: u32.ptr, wait: u32):
        lane, shared = i.lane_index(), memory()
        i.copy_async(shared, 4 * lane, x, 4 * lane)
        i.copy_commit()
        if wait:
            i.copy_wait()
        i.sync_warp()
        y[lane] = shared[(4 * lane + 4) % 128]

    x = np.arange(128, dtype=np.uint32)
    assert run(_probe, (1,), np.zeros(32, np.uint32), x, 1)[0].tolist() == [(4 * n + 4) % 128 for n in range(32)]
    REGISTRY[_probe.name] = _probe
    assert set(run(_probe, (1,), np.zeros(32, np.uint32), x, 0)[0].tolist()) == {0xFFFFFFFF}


@pytest.mark.parametrize(("wait", "landed"), [(0, 0), (1, 1), (2, 2)])
def test_groups_of_copies_land_from_the_oldest_on(wait, landed):
    """Of three groups, copy_wait_third waits for the first, and copy_wait_older for the first two."""
    memory = SharedArray(u32, 384)

    @kernel(f"groups_probe_{wait}", 32)
    def _probe(y: u32.ptr, x: u32.ptr, wait: u32):
        lane, shared = i.lane_index(), memory()
        for group in range(3):
            i.copy_async(shared, 128 * group + 4 * lane, x, 4 * lane)
            i.copy_commit()
        if wait == 1:
            i.copy_wait_third()
        elif wait == 2:
            i.copy_wait_older()
        i.sync_warp()
        for group in range(3):
            y[32 * group + lane] = shared[128 * group + 4 * lane]

    found = run(_probe, (1,), np.zeros(96, np.uint32), np.arange(128, dtype=np.uint32), wait)[0].reshape(3, 32)
    for group, words in enumerate(found.tolist()):
        assert words == ([4 * n for n in range(32)] if group < landed else [0xFFFFFFFF] * 32)


def test_vectors_must_be_aligned():
    words = np.zeros(16, np.uint32)
    assert i.load4(SimulatedPointer(words[:8]), 0) == (0, 0, 0, 0) or words.ctypes.data % 16
    offset = (-words.ctypes.data % 16) // 4
    with pytest.raises(SimulatorError, match="not aligned"):
        i.load4(SimulatedPointer(words), offset + 2)


def test_vectors_and_views_of_memory():
    words = SimulatedPointer(np.arange(16, dtype=np.uint32))
    at = -words.address // 4 % 4  # the first element that is aligned to 16 bytes
    assert i.stream4(words, at) == i.load4(words, at) == tuple(range(at, at + 4))
    assert i.stream2(words + at, 2) == (at + 2, at + 3)
    assert i.stream1(words, 5) == 5
    i.store2(words, at, 70000, 9)
    assert words.array[at:at + 3].tolist() == [70000, 9, at + 2]
    halves = i.as_u16(words + at)
    assert (halves[0], halves[1], halves[2]) == (70000 & 0xFFFF, 1, 9)
    i.as_floats(words + at)[1] = f32(1)
    assert words[at + 1] == 0x3F800000
    assert i.as_words(i.as_floats(words + at))[1] == 0x3F800000
    with pytest.raises(SimulatorError, match="accessed at 16"):
        i.stream1(words + at, 16 - at)
    with pytest.raises(SimulatorError, match="not aligned"):
        i.store2(words, at + 1, 0, 0)


def test_adding_in_memory_wraps():
    for array, value, before, after in ((np.array([7], np.int32), -9, 7, -2), (np.array([2], np.uint32), 5, 2, 7),
                                        (np.array([2**32 - 1], np.uint32), 3, 2**32 - 1, 2),
                                        (np.array([2**31 - 1], np.int32), 1, 2**31 - 1, -2**31)):
        assert i.atomic_add(SimulatedPointer(array), 0, value) == before
        assert array.tolist() == [after]


def test_bits():
    assert arithmetic.bits_of(f32(-1)) == 0xBF800000
    assert arithmetic.float_of(0xBF800000) == -1 and arithmetic.float_of(0x7F800000) == np.inf
    assert (arithmetic.count_bits(0), arithmetic.count_bits(0x80000101), arithmetic.count_bits(2**32 - 1)) == (0, 3, 32)


@pytest.mark.parametrize(("name", "expected"), [("exp", np.exp), ("exp2", np.exp2), ("tanh", np.tanh), ("cos", np.cos),
                                                ("sin", np.sin), ("fabs", np.abs), ("erf", np.vectorize(math.erf))])
def test_mathematics(name, expected):
    x = np.linspace(-4, 4, 33).astype(np.float32)
    found = [getattr(arithmetic, name)(value) for value in x]
    np.testing.assert_allclose(found, expected(x.astype(np.float64)), rtol=3e-6, atol=3e-7)
    assert all(isinstance(value, np.float32) for value in found)


def test_tanh_everywhere():
    """The error relative to the value, also for small values; signs, saturation and NaN."""
    x = np.concatenate([10.0 ** np.linspace(-30, 4, 400), np.linspace(0.2, 0.3, 50)]).astype(np.float32)
    x = np.concatenate([x, -x])
    found = np.array([arithmetic.tanh(value) for value in x])
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=4e-7)
    assert np.signbit(arithmetic.tanh(f32(-0.0))) and np.isnan(arithmetic.tanh(f32("nan")))
    assert (arithmetic.tanh(f32("inf")), arithmetic.tanh(f32("-inf"))) == (1, -1)


def test_roots_logarithms_and_rounding():
    x = np.linspace(0.1, 9, 20).astype(np.float32)
    np.testing.assert_allclose([arithmetic.sqrt(value) for value in x], np.sqrt(x), rtol=1e-6)
    np.testing.assert_allclose([arithmetic.log(value) for value in x], np.log(x), rtol=1e-6, atol=1e-7)
    a, b = f32(1 + 2**-13), f32(1 - 2**-13)
    assert arithmetic.fma(a, b, f32(-1)) == f32(-2.0**-26)  # 0 if the product were rounded
    assert arithmetic.multiply_exactly(a, b) == 1
    assert arithmetic.add_exactly(f32(2**24), f32(1)) == 2**24
    assert arithmetic.divide_exactly(f32(1), f32(3)) == f32(1) / f32(3)


def test_larger_and_smaller():
    nan = f32("nan")
    for a, b, low, high in ((1, 2, 1, 2), (2, 1, 1, 2), (nan, 3, 3, 3), (3, nan, 3, 3), (-np.inf, 0, -np.inf, 0)):
        assert (arithmetic.fmin(f32(a), f32(b)), arithmetic.fmax(f32(a), f32(b))) == (low, high)
    assert np.isnan(arithmetic.fmax(nan, nan))


@pytest.mark.parametrize("seed", range(3))
def test_two_halves_at_a_time(seed):
    """The same rounding as NumPy from exact values, including infinities and subnormals."""
    x = np.random.default_rng(seed).normal(0, 100, (3, 2, 40)).astype(np.float16)
    x[0, 0, :4], x[1, 0, :4] = (60000, 6e-8, np.inf, 2048), (-60000, 6e-8, 1, 1)
    words = np.ascontiguousarray(x.transpose(0, 2, 1)).view(np.uint32)[..., 0].tolist()
    with np.errstate(over="ignore"):
        difference = (x[0].astype(np.float64) - x[1].astype(np.float64)).astype(np.float16)
        product = (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float16)
    for name, args, expected in (("sub_halves", words[:2], difference), ("fma_halves", words, product)):
        with np.errstate(over="ignore"):
            found = [getattr(arithmetic, name)(*some) for some in zip(*args)]
        assert found == np.ascontiguousarray(expected.T).view(np.uint32)[:, 0].tolist()


def test_what_is_asked_for_early_is_in_memory():
    """On the simulator, earlier kernels have ended, and prefetch has no effect."""
    words = SimulatedPointer(np.arange(8, dtype=np.uint32))
    i.prefetch(words, 7)
    with pytest.raises(SimulatorError, match="accessed at 8"):
        i.prefetch(words, 8)
    assert i.after_previous() is None


def test_every_intrinsic_is_tested():
    here = Path(__file__).parent
    files = ("intrinsics", "simulator", "wgmma", "tensor_memory")
    text = "".join((here / f"test_{name}.py").read_text() for name in files)
    assert [name for name in ALL if not re.search(rf"\b{name}\b", text)] == []
