"""Style of figures: a colour and a marker for each family, and names beside points that do not overlap."""

from numflow.lab import style

# family: its number among the series of the style, size of the marker
STYLES = {"numflow": (0, 5), "numflow, auto": (1, 5), "numflow, outliers apart": (2, 6),
          "numflow, not calibrated": (4, 5), "Inferflow": (6, 5), "GGUF": (3, 4)}
_PLACES = [(4, 3, "left", "bottom"), (-4, 3, "right", "bottom"), (4, -3, "left", "top"), (-4, -3, "right", "top"),
           (7, 0, "left", "center"), (-7, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top"),
           (8, 11, "left", "bottom"), (8, -11, "left", "top"), (-8, 11, "right", "bottom"), (-8, -11, "right", "top")]


def points(axis, family: str, xs, ys, errors=None, line: bool = False, label: str | None = None) -> None:
    """Points of a family, joined where `line`; errors are drawn as bars."""
    number, size = STYLES[family]
    look = style.series(number) | {"markersize": size, "linewidth": 1.2, "markeredgewidth": 0.4}
    axis.errorbar(xs, ys, errors, elinewidth=0.8, capsize=2, label=label or family,
                  **look | ({} if line else {"linestyle": "none"}))


def colour(family: str) -> str:
    return style.SERIES[STYLES[family][0]][0]


def names(axis, found: list[tuple[float, float, str, str]], size: float = 6.5) -> None:
    """Label each point (x, y, name, family) at the side where the label overlaps least.

    Call this after limits, scales and layout (`style.layout`) are set. A label that would cover another one is omitted;
    the table has all names.
    """
    axis.figure.canvas.draw()
    renderer, frame = axis.figure.canvas.get_renderer(), axis.get_window_extent()
    at = axis.transData.transform([(x, y) for x, y, *_ in found]) if found else []
    taken = [(px - 4, py - 4, px + 4, py + 4) for px, py in at]
    for x, y, name, family in sorted(found, key=lambda point: (point[0], -point[1])):
        text = axis.annotate(name, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=size,
                             color=colour(family), annotation_clip=True)
        best = None
        for place in _PLACES:
            _move(text, place)
            box = text.get_window_extent(renderer)
            covered = sum(_overlap(box.extents, other) for other in taken)
            outside = box.width * box.height - _overlap(box.extents, frame.extents)
            if best is None or covered + 4 * outside < best[0] - 1e-6:
                best = covered + 4 * outside, place, tuple(box.extents)
            if best[0] == 0:
                break
        _move(text, best[1])
        if best[0] > 2:
            text.remove()
        else:
            taken.append(best[2])


def _move(text, place) -> None:
    text.set_position(place[:2])
    text.set_horizontalalignment(place[2])
    text.set_verticalalignment(place[3])


def _overlap(a, b) -> float:
    """Area that two boxes (x0, y0, x1, y1) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
