"""docs/quantisation.md: its example runs, its table of schemes is correct, and its links exist."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from numflow.quant import SCHEMES
from numflow.quant.layout import ROW_SCHEMES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quantisation.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(code, {})
    bits, error = map(float, capsys.readouterr().out.split())
    assert bits == 3.703125 and 0.1 < error < 0.112


def test_the_table_of_schemes():
    rows = re.findall(r"\| (q\w+) \| (\d+)[^|]*\| (\d+) \| ([\d.]+) (?=\|)", PAGE)
    assert {row[0] for row in rows} == set(ROW_SCHEMES)
    for name, levels, block, bits in rows:
        scheme = SCHEMES[name]
        assert (scheme.levels, scheme.block) == (int(levels), int(block))
        assert scheme.bits_per_weight(1024) == pytest.approx(float(bits), abs=5e-4)


def test_what_it_points_to():
    files = re.findall(r"`((?:numflow|experiments)/[\w/.-]+\.py)`", PAGE)
    assert len(files) > 10 and not [name for name in files if not (ROOT / name).is_file()]
    for names, module in (("encode_reference decode_reference inferflow_scheme", "inferflow"),
                          ("encode_reference", "search"), ("decode_reference", "layout")):
        for name in names.split():
            assert callable(getattr(import_module(f"numflow.quant.{module}"), name))
