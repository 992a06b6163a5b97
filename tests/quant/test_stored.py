"""The table of stored types: unpacked fields decode to the type's values, and every executor packs the type."""

import re
from pathlib import Path

import numpy as np
import pytest

from numflow.cpu.weights import layout as cpu
from numflow.cpu.weights.pack import STAMPS
from numflow.cuda.device.device import Simulated
from numflow.cuda.weights import layout as cuda
from numflow.cuda.weights.pack import upload
from numflow.cuda.weights.pack_types import PACKED
from numflow.formats.types import TYPES, to_f32
from numflow.network.weights.source import RawMatrix
from numflow.quant.hub_types import HUB_TYPES
from numflow.quant.stored import KINDS, STORED, kept_as, weights
from tests.cpu.matrices import columns_of, stored
from tests.quant.hub import TYPES_TESTED

QUANTISED = [name for name, row in STORED.items() if not row.kind.is_float]
every_type = pytest.mark.parametrize("name", TYPES_TESTED)


@every_type
def test_fields_mean_what_the_type_means(name):
    columns = columns_of(name)
    raw = stored(name, 21, columns)
    row = STORED[name]
    codes, values = row.fields(raw.rows, columns)
    assert codes.shape == (21, columns) and all(value.shape[0] == 21 for value in values)
    if not row.kind.is_float:
        assert codes.dtype == np.uint8 and codes.max() <= (10 if row.kind.paired else 2 if row.kind.bits == 1 else
                                                           (1 << row.kind.bits) - 1)
    np.testing.assert_array_equal(weights(row.kind, codes, values), to_f32(raw.rows, name))


@every_type
def test_fields_of_rows_apart(name):
    """Rows of a larger array: the stride exceeds the row's length, and the array is read-only."""
    columns = columns_of(name)
    raw = stored(name, 5, columns).rows
    wide = np.zeros((5, raw.shape[1] + 8), np.uint8)
    wide[:, 4:-4] = raw
    wide.flags.writeable = False
    codes, values = STORED[name].fields(wide[:, 4:-4], columns)
    expected, headers = STORED[name].fields(raw, columns)
    for found, wanted in zip((codes, *values), (expected, *headers), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_both_executors_keep_every_type():
    """Each type has a packing kernel on the CPU, and planes or a kernel on a GPU; its kind is in the table of layouts.
    """
    assert {name.removesuffix(cpu.SPREAD) for name in cpu.SCHEMES} == KINDS.keys()
    assert cuda.SCHEMES.keys() == {name for name, kind in KINDS.items() if not kind.is_float}
    assert {row.kind.name for row in STORED.values()} == KINDS.keys()
    assert {f"pack_{name.lower()}" for name in QUANTISED} == {name.removesuffix(cpu.SPREAD) for name in STAMPS}
    assert set(QUANTISED) >= PACKED and TYPES.keys() >= STORED.keys()


def test_the_page_has_every_kind():
    """Bits per weight in rows of 4096 columns are those in docs/cuda.md."""
    page = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert {kind: re.findall(r"\w+", types) for kind, types, *_ in rows} == {
        name: [stored for stored, row in STORED.items() if row.kind.name == name] for name in cuda.SCHEMES
        if name.upper() not in HUB_TYPES}
    for kind, _, on_cpu, on_gpu in rows:
        assert f"{sum(cpu.SCHEMES[kind].tile_bytes(4096)) / (2 * 4096):.4g}" == on_cpu
        assert f"{8 * cuda.SCHEMES[kind].row_bytes(4096) / 4096:.4g}" == on_gpu


def test_what_is_kept_otherwise():
    assert [kept_as(name, 80).name for name in ("q4_b16", "F16", "F64", "F8_E4M3")] == ["f32", "f16", "f32", "f16"]
    raw = stored("q4_b16", 20, 80)
    assert [kept_as("E4M3_ROW", columns).name for columns in (48, 40)] == ["e4m3_row", "f32"]
    matrix = upload(RawMatrix("w", "q4_b16", raw.rows, (20, 80)), Simulated())
    assert (matrix.kind, matrix.type, matrix.expanded_from) == ("f32", "q4_b16", "q4_b16")
