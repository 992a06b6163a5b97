"""The style of all figures: colours for all kinds of vision, the finding as title, and the source of the data.

A series has its own colour, marker and dash, so that colour is never the only difference. Lines are labelled directly.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numflow.lab.plotting import pyplot

# Colour (of Okabe and Ito), marker, dash. The first five have a distance of 15 for any vision (colours.py); the others
# have distinct markers.
SERIES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#56B4E9", "^", "-."), ("#009E73", "D", ":"),
          ("#000000", "v", (0, (5, 1))), ("#CC79A7", "P", (0, (3, 1, 1, 1))), ("#E69F00", "X", (0, (1, 1))))
SIZE = (7.2, 4.4)
GREY = "#555555"
_END = "end of a line"


def series(number: int) -> dict[str, Any]:
    """Arguments of matplotlib's `plot` for a series of a figure."""
    colour, marker, dash = SERIES[number % len(SERIES)]
    return {"color": colour, "marker": marker, "linestyle": dash, "markersize": 5, "linewidth": 1.5,
            "markeredgecolor": "white", "markeredgewidth": 0.5}


def figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE):
    """matplotlib's (figure, axes) in this style; axes is one object, or an array of several."""
    plt = pyplot()
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25, "grid.linewidth": 0.6, "svg.fonttype": "none", "svg.hashsalt": "numflow",
                         "axes.axisbelow": True})
    made, axes = plt.subplots(rows, columns, figsize=size)
    return made, axes


def layout(figure_, left: float = 0.72, right: float = 0.29, bottom: float = 0.55, wspace: float = 0.28,
           hspace: float = 0.4) -> None:
    """Set margins in inches, with room for the two lines of `title`; call it before texts are placed by pixels."""
    width, height = figure_.get_size_inches()
    figure_.subplots_adjust(top=1 - 0.78 / height, bottom=bottom / height, left=left / width, right=1 - right / width,
                            wspace=wspace, hspace=hspace)


def title(figure_, finding: str, source: str, **margins: float) -> None:
    """Draw the finding as title, and below it in grey the source: model, machine and date. Labels at the ends of lines
    are then moved apart. margins: of `layout`."""
    width, height = figure_.get_size_inches()
    layout(figure_, **margins)
    left = 0.0864 / width
    figure_.text(left, 1 - 0.12 / height, finding, fontsize=11.5, fontweight="bold", va="top")
    figure_.text(left, 1 - 0.40 / height, source, fontsize=7.5, color=GREY, va="top")
    for axis in figure_.axes:
        _apart([text for text in axis.texts if text.get_gid() == _END])


def end(axis, text: str, xs: Sequence[float], ys: Sequence[float], number: int, colour: str | None = None) -> None:
    """Label a series after its last point."""
    axis.annotate(text, (xs[-1], ys[-1]), xytext=(6, 0), textcoords="offset points", fontsize=8.5, va="center",
                  color=colour or SERIES[number % len(SERIES)][0], gid=_END)


def _apart(found: list) -> None:
    """Move the labels of each x vertically until none overlaps another, keeping their mean position."""
    if not found:
        return
    found[0].figure.canvas.draw()
    pixels = found[0].figure.dpi / 72
    for x in {text.xy[0] for text in found}:
        labels = sorted((text for text in found if text.xy[0] == x), key=lambda text: text.get_window_extent().y0)
        bottoms = [text.get_window_extent().y0 for text in labels]
        moved = list(bottoms)
        for i in range(1, len(labels)):
            moved[i] = max(bottoms[i], moved[i - 1] + labels[i - 1].get_window_extent().height + 1)
        shift = sum(m - a for m, a in zip(moved, bottoms)) / len(labels)
        for text, old, new in zip(labels, bottoms, moved):
            text.set_position((6, (new - old - shift) / pixels))


def source(recipe: Mapping[str, Any], *facts: str) -> str:
    """A line of facts (model, threads, "simulated"), the machine, the date and the commit of a report's recipe."""
    host = recipe["host"]
    return ", ".join(filter(None, [*facts, host["cpu"], recipe["started"][:10],
                                   f"commit {recipe['commit'] or 'not recorded'}"]))


def name(axis, text: str, x: float, y: float, number: int, offset: tuple[float, float] = (5, 0)) -> None:
    """Label a series at one of its points, in its colour."""
    axis.annotate(text, (x, y), xytext=offset, textcoords="offset points", fontsize=8.5, va="center",
                  ha="left" if offset[0] >= 0 else "right", color=SERIES[number % len(SERIES)][0])


def plain_log(axis, which: str, ticks: Sequence[float]) -> None:
    """Make an axis ("x" or "y") logarithmic, with plain numbers as tick labels."""
    getattr(axis, f"set_{which}scale")("log")
    one = getattr(axis, f"{which}axis")
    one.set_ticks(list(ticks), [f"{tick:g}" for tick in ticks])
    one.set_minor_locator(pyplot().NullLocator())


def drawn(figure_) -> dict[str, bytes]:
    """The figure's files: suffix ".svg" or ".png" -> bytes. The PNG has 128 colours, for a third of the size."""
    from PIL import Image

    vectors, pixels, few = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure_.savefig(vectors, format="svg", metadata={"Date": None})
    figure_.savefig(pixels, format="png", dpi=110)
    whole = Image.open(pixels).convert("RGB")
    whole.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(few, "PNG", optimize=True)
    pyplot().close(figure_)
    return {".svg": _short(vectors.getvalue()), ".png": few.getvalue()}


def _short(svg: bytes) -> bytes:
    """An SVG without comments, metadata, indents, fallback fonts, needless digits and group ids, and with a class for
    each style that occurs more than twice: less than half the size."""
    svg = re.sub(rb"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", b"", svg, flags=re.S)
    svg = re.sub(rb"'DejaVu Sans', 'Bitstream Vera Sans'[^;\"]*", b"'DejaVu Sans', sans-serif", svg)
    svg = re.sub(rb"\n +", b"\n", svg)
    svg = re.sub(rb' transform="rotate\(-?0 [^"]*"', b"", svg)
    svg = re.sub(rb'<g(?: id="(?:text|line2d|patch)_\d+")?>\n(<(?:text|path|use) [^\n]*)\n</g>', rb"\1", svg)
    svg = re.sub(rb"<(?:text|use) [^>]*>", lambda one: re.sub(rb'( [xy]="-?\d+\.\d)\d+"', rb'\1"', one[0]), svg)
    svg = re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"\s+", b" ", re.sub(rb"(\.\d)\d+", rb"\1", path[0])), svg)
    often = [style for style, times in Counter(re.findall(rb' style="([^"]*)"', svg)).items() if times > 2]
    for number, style in enumerate(often):
        svg = svg.replace(b' style="%s"' % style, b' class="s%d"' % number)
    rules = b"".join(b".s%d{%s}" % (number, style) for number, style in enumerate(often))
    return svg.replace(b"</style>", rules + b"</style>", 1)


def save(figure_, path: Path) -> list[Path]:
    """Write the figure as SVG and PNG. path: without a suffix."""
    found = []
    for suffix, data in drawn(figure_).items():
        found.append(path.with_suffix(suffix))
        found[-1].write_bytes(data)
    return found


def texts(figure_) -> list[tuple[str, Any]]:
    """(text, box in pixels) of all visible texts of a figure."""
    plt = pyplot()
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure_)  # a closed figure has no canvas
    canvas.draw()
    renderer = canvas.get_renderer()
    found = [t for t in figure_.findobj(plt.Text) if t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found]


def crowded(figure_) -> list[str]:
    """Messages on texts that overlap each other or leave the canvas."""
    found = _within_axes(texts(figure_), figure_)
    whole = figure_.bbox
    wrong = [f"{text!r} leaves the canvas" for text, box in found
             if box.x0 < whole.x0 - 1 or box.y0 < whole.y0 - 1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1]
    for at, (text, box) in enumerate(found):
        wrong += [f"{text!r} covers {other!r}" for other, its in found[at + 1:] if _overlap(box, its) > 2.0]
    return wrong


def _within_axes(found: Iterable[tuple[str, Any]], figure_) -> list[tuple[str, Any]]:
    """The texts without tick labels beyond the limits of their axis, which are not drawn."""
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
    """Area of the intersection of two boxes, in square pixels."""
    return max(0.0, min(a.x1, b.x1) - max(a.x0, b.x0)) * max(0.0, min(a.y1, b.y1) - max(a.y0, b.y0))
