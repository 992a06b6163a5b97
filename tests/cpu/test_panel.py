"""Panels (weights/panel.py): the number of rows that uses them, and the same bits with and without."""

import numpy as np
import pytest

from numflow.cpu.linear.linear import linear
from numflow.cpu.simd.isa import isa
from numflow.cpu.weights.layout import PANEL_ROWS, PANELS, Packed, panel_bytes
from numflow.formats.types import to_f32
from numflow.ops import Step, View
from tests.cpu.matrices import Bench, activations, columns_of, pack_stored, run_linear

WITHOUT = pytest.mark.skipif(isa() not in ("avx2", "avxvnni", "avx512"), reason="no panels of quantised types")
SOME = [kind for kind in ("Q4_0", "q3h", "Q6_K", "IQ2_XS") if kind in PANELS]


class _Kept(Bench):
    """A Bench that keeps the memory of panels."""

    panel: np.ndarray | None = None

    def scratch(self, name: str, nbytes: int) -> np.ndarray:
        memory = super().scratch(name, nbytes)
        if name == "panel":
            self.panel = memory
        return memory


def _panel_after(kind: str, rows: int, mode: str = "int8", packed: Packed | None = None) -> np.ndarray | None:
    packed = packed or pack_stored(kind, 16, columns_of(kind))[1]
    x = activations(rows, packed.shape[1])
    bench = _Kept({"x": x.shape[1], "y": 16}, {"x": "tokens", "y": "tokens"}, rows, packed, mode)
    bench.array("x")[:, :x.shape[1]] = x
    bench.run(linear(Step("linear", (View("x", 0, x.shape[1]),), (View("y", 0, 16),), {"weight": "w"}), bench), rows)
    return bench.panel


@WITHOUT
@pytest.mark.parametrize("kind", SOME)
def test_many_rows_meet_a_panel(kind):
    untouched = _panel_after(kind, PANEL_ROWS - 1)
    assert untouched is not None and (untouched == 0xA5).all()
    filled = _panel_after(kind, PANEL_ROWS)
    assert filled is not None and not (filled == 0xA5).all(), "no panel was made"


@WITHOUT
def test_bytes_and_floats_have_none():
    assert _panel_after("Q8_0", 2 * PANEL_ROWS) is None
    assert _panel_after("q3h", 2 * PANEL_ROWS, "f32") is None
    assert _panel_after("BF16", 2 * PANEL_ROWS, "bf16") is None
    assert panel_bytes("b8_scale", 64) == panel_bytes("f32", 64) == panel_bytes("bf16", 64, True) == 0


@WITHOUT
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.merge] * (kind == "q5"))
                                  for kind in ("q4", "q3h", "q5") if kind in PANELS])
def test_a_panel_holds_the_weights(kind):
    """(code - zero) * scale, by blocks of 32 columns, are the weights of the rows."""
    raw, _ = pack_stored(kind, 16, columns_of(kind))
    panel, columns = _panel_after(kind, PANEL_ROWS), columns_of(kind)
    assert panel is not None and len(panel) == panel_bytes(kind, columns) == sum(PANELS[kind].tile_bytes(columns))
    codes = panel[:16 * columns].reshape(-1, 8, 16, 4).astype(np.float64)  # [unit][column group][row][column]
    heads = panel[16 * columns:].view(np.float32).reshape(-1, 2, 16).astype(np.float64)
    weights = (codes - heads[:, None, 1, :, None]) * heads[:, None, 0, :, None]
    found = weights.transpose(2, 0, 1, 3).reshape(16, columns)
    np.testing.assert_allclose(found, to_f32(raw.rows, kind), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["F16", "F32"])
@pytest.mark.parametrize("columns", [64, 78])
@pytest.mark.merge
def test_plain_numbers_lie_in_pairs_for_operands_of_bfloat16(kind, columns):
    """On every instruction set, and the columns behind the last 32 too."""
    raw, packed = pack_stored(kind, 16, columns)
    panel, few = (_panel_after(kind, rows, "bf16", packed) for rows in (PANEL_ROWS, PANEL_ROWS - 1))
    assert panel is not None and len(panel) == panel_bytes(kind.lower(), columns, True) == 32 * columns
    bits = panel.view("<u2").reshape(-1, 16, 2).transpose(1, 0, 2).reshape(16, columns)
    wanted = to_f32(raw.rows, kind)
    np.testing.assert_allclose((bits.astype(np.uint32) << 16).view(np.float32), wanted, rtol=2**-8)
    assert few is not None and (few == 0xA5).all()
    x = activations(2 * PANEL_ROWS + 3, columns)
    together = run_linear(packed, x, "bf16")
    for rows in (1, 2, 4, 8, PANEL_ROWS - 1, PANEL_ROWS, PANEL_ROWS + 3):
        np.testing.assert_array_equal(run_linear(packed, x[:rows], "bf16", threads=2), together[:rows])


@pytest.mark.parametrize("kind", ["q3h", *(pytest.param(kind, marks=pytest.mark.merge)
                                           for kind in ("Q4_1", "Q5_K", "q2", "q6", "Q3_K", "IQ3_XXS"))])
def test_rows_around_the_first_panel(kind):
    """The same bits just below, at and above the least number of rows with a panel, and for the remaining rows."""
    _, packed = pack_stored(kind, 45, columns_of(kind))
    x = activations(PANEL_ROWS + 4, packed.shape[1])
    together = run_linear(packed, x, "int8")
    for rows in range(PANEL_ROWS - 1, PANEL_ROWS + 4):
        np.testing.assert_array_equal(run_linear(packed, x[:rows], "int8", threads=2), together[:rows])
