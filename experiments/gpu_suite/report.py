"""OUT/README.md and figures, from the results of all parts."""

from pathlib import Path

from experiments.gpu_suite.setting import kept

MOST_ROWS = 400


def write(out: Path) -> None:
    """Write the page, and figures if matplotlib is installed."""
    parts = [facts for path in sorted(out.glob("*.json")) if "part" in (facts := kept(path))]
    if not parts:
        return
    lines = ["# What the GPU suite found", "", "Made by `python -m experiments.gpu_suite`; every number is in the JSON "
             "file of its part.", ""]
    if any(part["simulator"] for part in parts):
        lines += ["**Parts marked simulator ran without a GPU: their times are those of Python and mean nothing.**", ""]
    figures = draw(out, parts)
    lines += goals({part["part"]: _found(part) for part in parts})
    for part in parts:
        lines += [f"## {part['part']}", "", f"{part['device']}{', simulator' * part['simulator']}"
                  f"{', toy sizes' * part['quick']}; {part['seconds']} s"
                  f"{'' if part['complete'] else '; not complete'}{': ' * bool(part['error'])}{part['error']}", ""]
        lines += [f"![{name}]({name})" for name in figures if name.startswith(part["part"])]
        lines += [*_table(part["rows"]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in parts[-1]["versions"].items())
    lines += ["## Versions", "", f"Python {parts[-1]['python']}, {versions}"]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def _found(part: dict) -> list[dict]:
    """The rows that are results."""
    return [row for row in part["rows"] if "failed" not in row]


def goals(found: dict[str, list[dict]]) -> list[str]:
    """Goals beside measurements, for the parts that were run at full size."""
    rows = []

    def first(part: str, **wanted) -> dict | None:
        return next((row for row in found.get(part, []) if all(row.get(k) == v for k, v in wanted.items())), None)

    copies = [row["gigabytes_per_s"] for row in found.get("copies", []) if row.get("what") == "copy on the device"]
    for kind, goal in (("F16", 85), ("q8", 80), ("q4", 70), ("q3h", 65)):
        row = first("speed", model="8b", weights=kind, what="decode", batch=1)
        if row and copies:
            rows.append((f"8B, {kind}, one token: share of the copy bandwidth", f"{goal} %",
                         f"{100 * row['gigabytes_per_s'] / max(copies):.0f} %"))
    one, many = (first("speed", model="8b", weights="q4", what="decode", batch=batch) for batch in (1, 64))
    if one and many:
        rows.append(("8B, q4: tokens/s of 64 sequences over one", "20",
                     f"{many['tokens_per_s'] / one['tokens_per_s']:.1f}"))
    ours, theirs = (first("matrices", weights=kind, matrix="gate+up", tokens=2048) for kind in ("BF16", "torch bf16"))
    if ours and theirs:
        rows.append(("BF16, gate+up, 2048 tokens: share of cuBLAS", "70 %",
                     f"{100 * ours['tflops'] / theirs['tflops']:.0f} %"))
    ours = first("speed", model="8b", weights="F16", what="decode", batch=1)
    theirs = first("peer", model="8b", what="graph", batch=1)
    if ours and theirs:
        rows.append(("8B, 16 bits, one token: tokens/s over torch with graphs", "1",
                     f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}"))
    head = ["## Goals", "", "| what | goal | found |", "|---|---|---|"]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows), ""] if rows else []


def _table(rows: list[dict]) -> list[str]:
    """Consecutive rows with the same columns as one table."""
    lines, columns = [], []
    for row in rows[:MOST_ROWS]:
        if list(row) != columns:
            columns = list(row)
            lines += ["", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        texts = (f"{v:.4g}" if isinstance(v, float) else " ".join(str(v).split()) for v in row.values())
        lines.append("| " + " | ".join(text.replace("|", "/") for text in texts) + " |")
    return lines


def draw(out: Path, parts: list[dict]) -> list[str]:
    """Draw the figures, and return their names."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    made = []
    by_name = {part["part"]: {**part, "rows": _found(part)} for part in parts}
    plans = (("matrices", "tokens", "gigabytes_per_s", ("weights",), lambda row: row["matrix"] in ("gate+up", "toy")),
             ("attention", "context", "gigabytes_per_s", ("kv", "batch"), lambda row: row["tokens"] == 1),
             ("speed", "batch", "tokens_per_s", ("model", "weights"), lambda row: row["what"] == "decode"))
    for name, x, y, labels, wanted in plans:
        rows = [row for row in by_name.get(name, {"rows": []})["rows"] if y in row and wanted(row)]
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
