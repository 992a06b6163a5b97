"""OUT/README.md and figures, from the results of all parts."""

import json
from pathlib import Path

MOST_ROWS = 400


def write(out: Path) -> None:
    """Make the page, and figures where matplotlib is installed."""
    parts = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    if not parts:
        return
    lines = ["# What the GPU suite found", "", "Made by `python -m experiments.gpu_suite`; every number is in the JSON "
             "file of its part.", ""]
    if any(part["simulator"] for part in parts):
        lines += ["**Parts marked simulator ran without a GPU: their times are those of Python and mean nothing.**", ""]
    figures = draw(out, parts)
    for part in parts:
        lines += [f"## {part['part']}", "", f"{part['device']}{', simulator' * part['simulator']}"
                  f"{', toy sizes' * part['quick']}; {part['seconds']} s"
                  f"{'' if part['complete'] else '; not complete'}{': ' * bool(part['error'])}{part['error']}", ""]
        lines += [f"![{name}]({name})" for name in figures if name.startswith(part["part"])]
        lines += [*_table(part["rows"]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in parts[-1]["versions"].items())
    lines += ["## Versions", "", f"Python {parts[-1]['python']}, {versions}"]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def _table(rows: list[dict]) -> list[str]:
    """Consecutive rows with the same columns as one table."""
    lines, columns = [], []
    for row in rows[:MOST_ROWS]:
        if list(row) != columns:
            columns = list(row)
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines.append("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return lines


def draw(out: Path, parts: list[dict]) -> list[str]:
    """Names of the figures."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    made = []
    by_name = {part["part"]: part for part in parts if part["rows"]}
    plans = (("matrices", "tokens", "gigabytes_per_s", ("weights",), lambda row: row["matrix"] in ("gate+up", "toy")),
             ("attention", "context", "gigabytes_per_s", ("kv", "batch"), lambda row: row["tokens"] == 1),
             ("speed", "batch", "tokens_per_s", ("model", "weights"), lambda row: row["what"] == "decode"))
    for name, x, y, labels, wanted in plans:
        rows = [row for row in by_name.get(name, {"rows": []})["rows"] if wanted(row)]
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for label in dict.fromkeys(tuple(row[key] for key in labels) for row in rows):
            line = [row for row in rows if tuple(row[key] for key in labels) == label]
            axes.plot([row[x] for row in line], [row[y] for row in line], marker="o", label=" ".join(map(str, label)))
        axes.set(xlabel=x, ylabel=y.replace("_", " "), xscale="log", title=by_name[name]["device"])
        axes.legend(fontsize=7)
        made.append(f"{name}.png")
        figure.savefig(out / made[-1], dpi=110)
        pyplot.close(figure)
    return made
