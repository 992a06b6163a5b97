"""Figure with the error of every tensor of a quantised file (`numflow verify FILE --plot FIGURE`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numflow.errors import RequestError
from numflow.lab import style

_SUFFIXES = (".svg", ".png")


def errors_figure(report: Mapping[str, Any], name: str):
    """A figure with a point for each quantised tensor, in the order of the file, and a series for each type.

    Raises:
        RequestError: no tensor has an error.
    """
    rows = [row for row in report["tensors"] if row.get("error")]
    if not rows:
        raise RequestError(f"{name}: the report has no errors of tensors to draw")
    kinds = list(dict.fromkeys(row["type"] for row in rows))
    worst = max(rows, key=lambda row: row["error"])
    made, axis = style.figure()
    for series, kind in enumerate(kinds):
        points = [(index, row["error"]) for index, row in enumerate(rows) if row["type"] == kind]
        look = style.series(series) | {"linestyle": "none"}
        axis.plot([x for x, _ in points], [error for _, error in points], label=f"{kind} ({len(points)})", **look)
    axis.set_xlabel(f"tensor, in the order of the file ({len(rows)})")
    axis.set_ylabel("relative rms error")
    axis.set_ylim(0, 1.12 * worst["error"])
    axis.legend(loc="lower right", fontsize=8, ncols=min(len(kinds), 4))
    bits = report.get("bits_per_weight")
    facts = [name, f"{bits:.2f} bits per weight" if bits else ""]
    style.title(made, f"The worst tensor is {worst['name']}: error {worst['error']:.3g}",
                ", ".join(filter(None, facts)))
    return made


def draw_errors(report: Mapping[str, Any], name: str, path: Path) -> None:
    """Write the figure to a file.

    Raises:
        RequestError: the suffix is not .svg or .png, or the file cannot be written; also as `errors_figure`.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise RequestError(f"{path}: the name of a figure should end in {' or '.join(_SUFFIXES)}")
    made = errors_figure(report, name)
    try:
        made.savefig(path)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from None
