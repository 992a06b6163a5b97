"""Output of a token's walk through the network (`generate --trace`): text, JSON, or an HTML page."""

import html as markup
import inspect
import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numflow.cli.running import print_json
from numflow.cli.tables import print_table, printable
from numflow.errors import RequestError

_STRIP = 96  # coloured fields in the drawing of a residual stream


def show_walk(walk, model: str, json: bool, page: Path | None) -> None:
    """Print a Walk, or write it as an HTML page."""
    if page is not None:
        try:
            page.write_text(as_page(walk, model), encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{page}: {error.strerror}") from None
        print(f"{page}: {len(walk.rows)} steps")
    elif json:
        print_json(as_dict(walk))
    else:
        _print(walk)


def as_dict(walk) -> dict:
    """A Walk as a JSON object, without the residual stream."""
    return {"text": walk.text, "template": walk.template, "ids": [{"id": id, "text": text} for id, text in walk.ids],
            "steps": [{**asdict(row), "values": asdict(walk.values[row.index]) if row.index in walk.values else None}
                      for row in walk.rows],
            "best": [asdict(guess) for guess in walk.best],
            "lens": [[asdict(guess) for guess in layer] for layer in walk.lens]}


def _print(walk) -> None:
    print(f"text  {_quoted(walk.text)}  template: {'applied' if walk.template else 'none'}")
    shown = walk.ids if len(walk.ids) <= 16 else walk.ids[-16:]
    print("ids   " + ("... " if len(shown) < len(walk.ids) else "")
          + " ".join(f"{id} {_quoted(text)}" for id, text in shown))
    print(f"steps of the last token, position {len(walk.ids) - 1}\n")
    head = [">min", ">max", ">rms"] if walk.values else []
    print_table(["#", "label", "op", "shapes", *head, ">µs", "kernel"],
                [(row.index, row.label, row.op, row.shapes, *(_numbers(walk, row) if head else ()), *_time(row))
                 for row in walk.rows])
    total = sum(row.microseconds for row in walk.rows)
    print(f"{len(walk.rows)} steps, {total / 1000:.3f} ms; times are medians of several runs")
    for layer, guesses in enumerate(walk.lens):
        print(f"after layer {layer}:  {_guesses(guesses)}")
    if walk.best:
        print(f"likeliest:  {_guesses(walk.best)}")


def _numbers(walk, row) -> tuple[str, str, str]:
    """Minimum, maximum and RMS of a step's result; "-" for a fused result that is never stored in memory."""
    found = walk.values.get(row.index)
    if found is None:
        return "-", "-", "-"
    least, most, rms = (f"{x:.3g}" if found.finite else "nan" for x in (found.least, found.most, found.rms))
    return least, most, rms


def _time(row) -> tuple[str, str]:
    """A step's time and kernel. For a step that is fused into another step's kernel: that step's index."""
    return (f"{row.microseconds:.1f}", row.kernel) if row.within is None else ("-", f"in step {row.within} (fused)")


def _guesses(guesses) -> str:
    return "  ".join(f"{_quoted(guess.text)} {100 * guess.probability:.1f} %" for guess in guesses)


def _quoted(text: str) -> str:
    return printable(json_module.dumps(text, ensure_ascii=False))


def as_page(walk, model: str) -> str:
    """A self-contained HTML page: one line per step, which expands to the step's NumPy source."""
    escape = markup.escape
    layers = {} if walk.stream is None else dict(enumerate(walk.stream))
    steps = "\n".join(_step(walk, row, layers) for row in walk.rows)
    ids = " ".join(f"<b title='{id}'>{escape(_quoted(text))}</b>" for id, text in walk.ids)
    lens = "".join(f"<tr><td>after layer {layer}</td><td>{escape(_guesses(guesses))}</td></tr>"
                   for layer, guesses in enumerate(walk.lens))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>A token's walk</title>
<style>body{{font:14px/1.4 system-ui;margin:2em;max-width:80em}}
summary,pre{{font-family:ui-monospace,monospace;white-space:pre}}
pre{{background:#8882;padding:.6em;overflow:auto}}b{{font-weight:400;background:#8883;padding:0 .2em}}
.fused{{opacity:.55}}svg{{display:block;margin:.2em 1.5em}}</style>
<h1>A token's walk through {escape(model)}</h1>
<p>{ids}</p><p>Template: {'applied' if walk.template else 'none'}. The steps are those of the last token,
at position {len(walk.ids) - 1}. Times are medians of several runs.
A strip shows the residual stream after a layer: blue is below 0, orange above 0.</p>
{steps}
<h2>The likeliest next tokens</h2><p>{escape(_guesses(walk.best))}</p>
{f'<h2>Logit lens</h2><table>{lens}</table>' if lens else ''}
</html>
"""


def _step(walk, row, layers) -> str:
    """HTML of a step: its line and its expanded source. The last step of a layer is followed by the residual stream."""
    least, most, rms = _numbers(walk, row)
    time, kernel = _time(row)
    line = (f"{row.index:>4} {row.label:<28} {row.op:<14} {row.shapes:<34} min {least:>9} max {most:>9} rms {rms:>9} "
            f"{time:>8} µs")
    strip, layer = "", _layer(row)
    if layer is not None and layer in layers and not any(_layer(other) == layer for other in walk.rows[row.index + 1:]):
        strip = _strip(layers[layer])
    kind = ' class="fused"' if row.within is not None else ""
    return (f"<details{kind}><summary>{markup.escape(line)}</summary><p>{markup.escape(kernel)}</p>"
            f"<pre>{markup.escape(_source(row.op))}</pre></details>{strip}")


def _layer(row) -> int | None:
    parts = row.label.split(".")
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdigit() else None


def _source(op: str) -> str:
    """Source of the op's reference kernel in NumPy."""
    from numflow.reference.program import KERNELS

    code: Any = KERNELS.get(op)
    return inspect.getsource(code) if op in KERNELS else "an exchange between devices"


def _strip(stream) -> str:
    """An SVG row of coloured fields. Each field shows the mean of neighbouring values of a residual stream [D]."""
    import numpy as np

    fields = [float(part.mean()) for part in np.array_split(stream, min(_STRIP, len(stream)))]
    most = max(map(abs, fields)) or 1.0
    boxes = "".join(f'<rect x="{8 * index}" width="8" height="14" fill="{"#D55E00" if value > 0 else "#0072B2"}" '
                    f'fill-opacity="{abs(value) / most:.2f}"/>' for index, value in enumerate(fields))
    return f'<svg width="{8 * len(fields)}" height="14">{boxes}</svg>'
