"""One style for all figures: colours that every eye tells apart, the finding as title, and where the numbers are from.

A series has a colour, a marker and a dash, so that no two are told by colour alone. Names stand at the lines.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numflow.lab.report import pyplot

# Colour (of Okabe and Ito), marker, dash. The first five are 15 apart for any eye; the others have their own marker.
SERIES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#56B4E9", "^", "-."), ("#009E73", "D", ":"),
          ("#000000", "v", (0, (5, 1))), ("#CC79A7", "P", (0, (3, 1, 1, 1))), ("#E69F00", "X", (0, (1, 1))))
SIZE = (7.2, 4.4)
_GREY = "#555555"


def series(number: int) -> dict[str, Any]:
    """Arguments of `plot` for a series of a figure."""
    colour, marker, dash = SERIES[number % len(SERIES)]
    return {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5, "linewidth": 1.5,
            "markeredgecolor": "white", "markeredgewidth": 0.5}


def figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE):
    """(figure, axes) of matplotlib in the style; axes is one object, or an array of several."""
    plt = pyplot()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25, "grid.linewidth": 0.6, "svg.fonttype": "none", "svg.hashsalt": "numflow",
                         "axes.axisbelow": True})
    made, axes = plt.subplots(rows, columns, figsize=size)
    return made, axes


def title(figure_, finding: str, source: str) -> None:
    """The finding above, and below it in grey the model, machine and date that the numbers are from."""
    height = figure_.get_figheight()
    figure_.subplots_adjust(top=1 - 0.78 / height, bottom=0.55 / height, left=0.1, right=0.96, wspace=0.28, hspace=0.4)
    figure_.text(0.012, 1 - 0.12 / height, finding, fontsize=11.5, fontweight="bold", va="top")
    figure_.text(0.012, 1 - 0.40 / height, source, fontsize=7.5, color=_GREY, va="top")


def source(recipe: Mapping[str, Any], *facts: str) -> str:
    """A line of facts (model, threads, "simulated"), the machine, the date and the commit of a report's recipe."""
    host = recipe["host"]
    return ", ".join(filter(None, [*facts, host["cpu"], f"{recipe['started'][:10]}", f"commit {recipe['commit']}"]))


def name(axis, text: str, x: float, y: float, number: int, offset: tuple[float, float] = (5, 0)) -> None:
    """The name of a series, at a point of it and in its colour."""
    axis.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8.5, va="center",
                  ha="left" if offset[0] >= 0 else "right", color=SERIES[number % len(SERIES)][0])


def plain_log(axis, which: str, ticks: Sequence[float]) -> None:
    """A logarithmic axis ("x" or "y") whose ticks are plain numbers."""
    getattr(axis, f"set_{which}scale")("log")
    one = getattr(axis, f"{which}axis")
    one.set_ticks(list(ticks), [f"{tick:g}" for tick in ticks])
    one.set_minor_locator(pyplot().NullLocator())


def save(figure_, path: Path) -> list[Path]:
    """The figure as SVG and PNG beside each other; path: without a suffix."""
    found = []
    for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 110})):
        found.append(path.with_suffix(suffix))
        figure_.savefig(found[-1], **options)
    pyplot().close(figure_)
    return found


def texts(figure_) -> list[tuple[str, Any]]:
    """(text, its box in pixels) of everything that is written on a figure."""
    figure_.canvas.draw()
    renderer = figure_.canvas.get_renderer()
    plt = pyplot()
    found = [t for t in figure_.findobj(plt.Text) if t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found]


def crowded(figure_) -> list[str]:
    """Complaints: texts that cover each other, and texts that leave the canvas."""
    found = _within_axes(texts(figure_), figure_)
    whole = figure_.bbox
    wrong = [f"{text!r} leaves the canvas" for text, box in found
             if box.x0 < whole.x0 - 1 or box.y0 < whole.y0 - 1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1]
    for at, (text, box) in enumerate(found):
        wrong += [f"{text!r} covers {other!r}" for other, its in found[at + 1:] if _overlap(box, its) > 2.0]
    return wrong


def _within_axes(found: Iterable[tuple[str, Any]], figure_) -> list[tuple[str, Any]]:
    """Without labels of ticks that lie beyond the limits of their axis, which are not drawn."""
    hidden = set()
    for axis in figure_.axes:
        for one, low, high in ((axis.xaxis, *axis.get_xlim()), (axis.yaxis, *axis.get_ylim())):
            low, high = sorted((low, high))
            for tick in (*one.get_major_ticks(), *one.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    hidden |= {(tick.label1.get_text(), tick.label1.get_window_extent().x0,
                                tick.label1.get_window_extent().y0)}
    return [(text, box) for text, box in found if (text, box.x0, box.y0) not in hidden]


def _overlap(a, b) -> float:
    """Area that two boxes share, in square pixels."""
    return max(0.0, min(a.x1, b.x1) - max(a.x0, b.x0)) * max(0.0, min(a.y1, b.y1) - max(a.y0, b.y0))
