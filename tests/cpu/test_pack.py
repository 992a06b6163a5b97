"""Packing is lossless: embed reads every weight of every type back, bit for bit or with one more rounding."""

import weakref

import numpy as np
import pytest

from numflow.cpu.linear.embed import embed
from numflow.cpu.memory.arena import Arena
from numflow.cpu.weights.layout import SCHEMES
from numflow.cpu.weights.pack import pack
from numflow.errors import NetworkError
from numflow.formats.types import to_f32
from numflow.network.weights.source import RawMatrix
from numflow.ops import Step, View
from numflow.quant.hub_types import HUB_TYPES
from numflow.quant.inferflow import INFERFLOW_SCHEMES
from numflow.quant.stored import EXPANDED, STORED
from tests.cpu.matrices import Bench, activations, columns_of, pack_stored, run_linear, stored
from tests.quant.hub import TYPES_TESTED


def _rows(packed, ids, scale=1.0):
    columns = packed.shape[1]
    bench = Bench({"y": columns}, {"y": "tokens"}, len(ids), packed, "int8")
    step = Step("embed", (), (View("y", 0, columns),), {"table": "w"}, {"scale": scale})
    bench.run(embed(step, bench), len(ids), ids=np.asarray(ids, np.int32))
    return bench.array("y")[:len(ids), :columns]


# Some of Inferflow's schemes: signed codes, split nibbles, pairs. The other schemes differ in few lines.
_SOME = {"q8_b32t2", "q5_b32t1", "q3h_b64t1", "q4_b16"}
_SOME |= {"U2_BF16_16", "I8_F32_ROW", "U1_F16_ROW", "NF4_64", "E4M3_ROW", "E2M1_ROW"}
_KINDS = [pytest.param(kind, marks=[pytest.mark.slow] if kind in {*INFERFLOW_SCHEMES, *HUB_TYPES} - _SOME else [])
          for kind in TYPES_TESTED]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.thin(8)
def test_every_number_comes_back(kind):
    raw, packed = pack_stored(kind, 45, columns_of(kind))
    assert packed.expanded_from is None
    values = to_f32(raw.rows, kind)
    ids = np.random.default_rng(0).permutation(45)
    known = STORED[kind].kind
    if kind in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "q4_b16") or (known.zeros and known.scale == "F32"):
        # d (code - z) here is d code - d z in the kernels: products of a float16 are exact, others are rounded.
        bound = 2.0**-23 * np.abs(values[ids]).max(axis=1, keepdims=True) * 4
        assert (np.abs(_rows(packed, ids) - values[ids]) <= bound).all()
    else:
        np.testing.assert_array_equal(_rows(packed, ids), values[ids])
    np.testing.assert_array_equal(_rows(packed, ids, 0.5), 0.5 * _rows(packed, ids))


@pytest.mark.parametrize(("kind", "columns"), [("U2_BF16_16", 48), ("U2_BF16_16", 80), ("E4M3_ROW", 48),
                                               pytest.param("E2M1_ROW", 112, marks=pytest.mark.slow)])
@pytest.mark.merge
def test_rows_that_half_of_a_unit_ends(kind, columns):
    """Tables and products of rows that end with half a unit, with the bits of the type."""
    raw, packed = pack_stored(kind, 45, columns)
    assert packed.expanded_from is None and packed.is_ragged
    values = to_f32(raw.rows, kind)
    np.testing.assert_array_equal(_rows(packed, np.arange(45)), values)
    x = activations(11, columns)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(values).T
    assert (np.abs(run_linear(packed, x, "int8") - exact) <= bound).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16"])
def test_threads_and_groups_only_move_rows(kind):
    columns = 512
    raw, packed = pack_stored(kind, 60, columns, groups=3)
    _, threaded = pack_stored(kind, 60, columns, groups=3, threads=3)
    np.testing.assert_array_equal(packed.codes, threaded.codes)
    np.testing.assert_array_equal(packed.headers, threaded.headers)
    for group in range(3):
        alone = pack(RawMatrix("w", kind, raw.rows[20 * group:20 * group + 20], (20, columns)))
        size = packed.codes.nbytes // 3
        np.testing.assert_array_equal(packed.codes[group * size:(group + 1) * size], alone.codes)


def test_sizes_are_those_of_the_layout():
    packed = pack_stored("q3h", 32, 512)[1]
    assert packed.nbytes == 2 * sum(SCHEMES["q3h"].tile_bytes(512))
    bits = {kind: 8 * sum(SCHEMES[stored.kind.name].tile_bytes(512)) / (16 * 512) for kind, stored in STORED.items()
            if kind not in HUB_TYPES}
    assert bits == {"Q4_0": 4.5, "Q5_0": 5.5, "Q8_0": 8.5, "Q4_1": 5.0, "Q5_1": 6.0, "Q2_K": 2.625, "Q3_K": 3.5625,
                    "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5,
                    "NVFP4": 5.0, "Q1_0": 1.125, "Q2_0": 2.25, "Q2_0_128": 2.125, "TQ1_0": 1.8125, "TQ2_0": 2.0625,
                    "IQ1_S": 1.6875, "IQ1_M": 1.8125, "IQ2_XXS": 2.1875, "IQ2_XS": 2.4375, "IQ2_S": 2.5625,
                    "IQ3_XXS": 3.1875, "IQ3_S": 3.4375, "F32": 32, "F16": 16, "BF16": 16,
                    # as in the file, whose rows have a header of 16 bits
                    "q2": 2.375 + 16 / 512, "q3": 3.375 + 16 / 512, "q3h": 3.6875 + 16 / 512, "q4": 4.375 + 16 / 512,
                    "q5": 5.375 + 16 / 512, "q6": 6.375 + 16 / 512, "q8": 8.375 + 16 / 512,
                    # a header of 32 bits for every 32 columns
                    "q8_b32t1": 9, "q8_b32t2": 8.5, "q6_b64t1": 7, "q5_b64t1": 6, "q5_b32t1": 6, "q4_b64t1": 5,
                    "q4_b32t1a": 5, "q4_b32t1b": 5, "q3h_b64t1": 4.5, "q3_b32t1a": 4, "q3_b32t1b": 4, "q2_b32t1a": 3,
                    "q2_b32t1b": 3, "q4_b16": 5}


def test_rows_of_a_larger_file_are_packed_in_place():
    """A read-only memory-mapped view, whose row stride is larger than a row."""
    raw = stored("Q4_1", 20, 64)
    wide = np.zeros((20, raw.rows.shape[1] + 7), np.uint8)
    wide[:, 3:-4] = raw.rows
    wide.flags.writeable = False
    view = RawMatrix("w", "Q4_1", wide[:, 3:-4], (20, 64))
    np.testing.assert_array_equal(pack(view).codes, pack(raw).codes)


def test_other_types_are_expanded_and_say_so():
    raw, packed = pack_stored("F64", 20, 70, groups=2)
    assert (packed.kind, packed.type, packed.expanded_from) == ("f32", "F32", "F64")
    x = np.eye(70, dtype=np.float32)
    np.testing.assert_array_equal(run_linear(pack(RawMatrix("w", "F64", raw.rows, (20, 70))), x, "int8").T,
                                  to_f32(raw.rows, "F64"))


@pytest.mark.parametrize("kind", EXPANDED)
def test_types_of_a_byte_become_float16(kind):
    rows = np.arange(256, dtype=np.uint8).reshape(16, 16)
    packed = pack(RawMatrix("w", kind, rows, (16, 16)))
    assert (packed.kind, packed.type, packed.expanded_from, packed.nbytes) == ("f16", "F16", kind, 512)
    np.testing.assert_array_equal(_rows(packed, np.arange(16)), to_f32(rows, kind))


def test_blocks_of_16_that_make_no_whole_units_are_expanded():
    raw, packed = pack_stored("q4_b16", 20, 80)
    assert (packed.kind, packed.expanded_from) == ("f32", "q4_b16")
    np.testing.assert_array_equal(_rows(packed, np.arange(20)), to_f32(raw.rows, "q4_b16"))


def test_special_float16_values():
    """Zeros, subnormals, infinities and NaN convert as NumPy has them."""
    values = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    packed = pack(RawMatrix("w", "F16", values.view(np.uint8).reshape(256, 512), (256, 256)))
    np.testing.assert_array_equal(_rows(packed, np.arange(256)), values.astype(np.float32))


@pytest.mark.parametrize(("rows", "shape", "groups"), [
    ((4, 18), (4, 64), 1), ((4, 19), (4, 32), 1), ((4, 18), (5, 32), 1), ((4, 18), (4, 32), 3), ((4, 18), (4, 33), 1)])
def test_rows_that_do_not_fit(rows, shape, groups):
    with pytest.raises(NetworkError, match="matrix 'w'"):
        pack(RawMatrix("w", "Q4_0", np.zeros(rows, np.uint8), shape, groups))


def test_arena_hands_out_zeroed_lines_and_gives_back():
    arena = Arena()
    arrays = [arena.zeros(size) for size in (1, 100, 0, 64 << 20, 3)]
    for array, size in zip(arrays, (1, 100, 0, 64 << 20, 3)):
        assert array.nbytes == size and array.ctypes.data % 64 == 0 and not array[:1000].any()
        array[:1000] = 255  # the arrays do not overlap
    mapping = weakref.ref(arrays[3].base)
    del arrays, array
    assert mapping() is not None  # the arena still uses its remaining part
    arena.zeros(65 << 20)
    assert mapping() is None


@pytest.mark.merge
def test_every_scale_of_the_4_bit_floats():
    """Powers of two, subnormal too, up to those whose 128-fold overflows float32; all E4M3 floats."""
    scales, rng = np.arange(256, dtype=np.uint8), np.random.default_rng(0)
    powers = np.concatenate([scales[:247, None], rng.integers(0, 256, (247, 16), dtype=np.uint8)], axis=1)
    floats = np.concatenate([np.repeat(scales[:, None], 4, 1), rng.integers(0, 256, (256, 32), dtype=np.uint8)], axis=1)
    for kind, blocks, columns in (("MXFP4", powers, 32), ("NVFP4", floats, 64)):
        packed = pack(RawMatrix("w", kind, blocks, (len(blocks), columns)))
        np.testing.assert_array_equal(_rows(packed, np.arange(len(blocks))), to_f32(blocks, kind))
