"""Figures: colours for colour-blind readers, labels that do not overlap, a finding and its source on each figure."""

import importlib.util
import io
from itertools import combinations

import pytest

from numflow.errors import RequestError
from numflow.lab import style
from numflow.lab.colours import distance, least_distance
from numflow.lab.errors_figure import draw_errors
from tests.conftest import REPO

FOLDER = REPO / "docs" / "book" / "figures"


def drawings():
    spec = importlib.util.spec_from_file_location("book_figures", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAW = drawings()


def test_distances_are_those_of_cielab():
    assert distance("#000000", "#ffffff") == pytest.approx(100, abs=0.1)
    assert distance("#D55E00", "#D55E00", "protanopia") == 0
    assert least_distance("#2ca02c", "#d62728") < 10 < distance("#2ca02c", "#d62728")  # for colour-blind eyes


def test_series_are_told_apart_by_any_eye():
    for (one, *_), (other, *_) in combinations(style.SERIES[:5], 2):
        assert least_distance(one, other) >= 15, (one, other)
    assert len({marker for _, marker, _ in style.SERIES}) == len({dash for *_, dash in style.SERIES}) == 7


def test_crowded_texts_are_found():
    made, axis = style.figure()
    axis.plot([0, 1], [0, 1], **style.series(0))
    style.title(made, "A finding", "a source")
    assert style.crowded(made) == []
    for x in (0.5, 0.505):
        axis.text(x, 0.5, "a name")
    made.text(0.9, 0.5, "far too long to be written here")
    assert len(style.crowded(made)) == 2


@pytest.mark.parametrize("name", DRAW.FIGURES)
@pytest.mark.thin(3)
def test_a_figure_of_the_book(name):
    made = DRAW.FIGURES[name]()
    assert style.crowded(made) == []
    finding, source = (text.get_text() for text in made.texts[:2])
    assert any(character.isdigit() for character in finding) and ("commit " in source or "computed" in source)
    assert all(axis.get_xlabel() for axis in made.axes)
    style.pyplot().close(made)
    for suffix in (".svg", ".png"):
        assert (FOLDER / name).with_suffix(suffix).is_file()
    drawn = (FOLDER / name).with_suffix(".svg").read_text(encoding="utf-8")
    assert finding.replace("&", "&amp;").replace("'", "&#39;")[:40].split("'")[0][:30] in drawn, "drawn anew: draw.py"


def test_errors_of_a_file(tmp_path):
    report = {"tensors": [{"name": "a", "type": "q4", "error": 0.1}, {"name": "b", "type": "q3h", "error": 0.2},
                          {"name": "c", "type": "F32"}], "bits_per_weight": 4.1}
    draw_errors(report, "small.safetensors", tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert "The worst tensor is b: error 0.2" in drawn and "q3h (1)" in drawn and "4.10 bits per weight" in drawn
    with pytest.raises(RequestError, match=r"the name of a figure should end in \.svg or \.png"):
        draw_errors(report, "x", tmp_path / "x.pdf")
    with pytest.raises(RequestError, match="No such file"):
        draw_errors(report, "x", tmp_path / "gone" / "x.svg")
    with pytest.raises(RequestError, match="has no errors of tensors"):
        draw_errors({"tensors": []}, "x", tmp_path / "x.svg")


def test_an_svg_is_shortened_and_says_the_same():
    from xml.etree import ElementTree

    made, axes = style.figure(1, 2)
    for axis in axes:
        axis.plot(range(20), range(20), **style.series(1))
        axis.annotate("here & there", (10, 4))
    style.title(made, "A finding of 20", "a source")
    whole = io.BytesIO()
    made.savefig(whole, format="svg", metadata={"Date": None})
    long, short = whole.getvalue(), style.drawn(made)[".svg"]
    assert len(short) < len(long) / 2 and b'class="s0"' in short
    for tag in ("text", "use", "path"):
        found = [[(one.text, [round(float(one.get(key, 0)), 1) for key in "xy"])
                  for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}" + tag)]
                 for svg in (long, short)]
        assert [text for text, _ in found[0]] == [text for text, _ in found[1]] and found[0]
        assert all(abs(a - b) < 0.11 for (_, one), (_, other) in zip(*found) for a, b in zip(one, other))
