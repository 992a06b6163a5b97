"""Quantisation: error of weights, divergence of language models, size and speed, beside llama.cpp's types.

The schemes are numflow's own (q2 ... q8), Inferflow's (with a suffix such as q3h_b64t1), and GGUF's types (in
capitals). Bits per weight count every stored byte. The weights of the two language models are those of their published
GGUF files, decoded, so they have been quantised once already: a 4-bit affine block of 32, such as Q4_1 or q4_b32t1a
with float16 headers, represents SmolLM2's Q4_1 (almost) exactly, and Q4_K represents much of Gemma's.
all-MiniLM-L6-v2 is published in float32. Parts that need a missing model, text or llama.cpp are left out, and the
report says so.
"""

import os
import re
import time
from pathlib import Path

from . import files, formats, frontier, kv, outputs, rows, speeds, weights

_TEXT = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "text" / "wikitext-2-raw.test.txt"
OPTIONS = {
    "llama_cpp": os.environ.get("NUMFLOW_LLAMA_CPP", ""),   # folder of llama.cpp's programs and library, else the PATH
    "size": 1 << 20, "rows": 256,                           # weights of each drawn set; rows of each real matrix
    "models": "all-minilm-l6-v2,smollm2-135m-instruct,gemma-3-270m",  # models whose weights are measured
    "language_models": "smollm2-135m-instruct,gemma-3-270m",          # models whose predictions are measured
    "text": os.environ.get("NUMFLOW_WIKITEXT", ""),         # WikiText-2's raw test split
    "chunks": 20, "calibration_chunks": 32,                 # windows of 512 tokens
    "every": 1,                                             # one token in this many is scored
    "minutes": 0.0,                                         # no long measurement starts later than this; 0: no limit
    "keep": "",                                             # folder for intermediate files, to continue from later
    "parts": "weights,frontier,kv,speed,formats,files,row,chosen",
    "types": "",                                            # types of formats and files, comma-separated; "": all
    "merge": False,                                         # keep the other parts of the present report
}
PARTS = {"weights": weights.weight_error, "frontier": frontier.frontier, "kv": kv.kv_types, "speed": speeds.speed_part,
         "formats": formats.formats_part, "files": files.files_part, "row": rows.row_part, "chosen": rows.chosen_part}
_MARK = "<!-- part {}, {} -->"  # before each part of the report


def run(lab):
    if lab.quick:
        small = {"size": 1 << 13, "rows": 4, "models": "", "language_models": "", "chunks": 2, "calibration_chunks": 2}
        lab.options |= {key: value for key, value in small.items() if lab.options[key] == OPTIONS[key]}
    wanted = lab.options["parts"].split(",")
    old, lab.results = _old(lab) if lab.options["merge"] else ({}, {})
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    # Where things are belongs to this machine, not into the report.
    places = {name: lab.options[name] for name in ("llama_cpp", "text", "keep", "language_models", "models")}
    if not places["text"] and _TEXT.exists():
        places["text"] = str(_TEXT)
    lab.options |= {name: "found" if places[name] else "" for name in ("llama_cpp", "text")} | {"keep": ""}
    for name in ("language_models", "models"):
        lab.options[name] = ",".join(Path(model).name for model in places[name].split(","))
    for part, measure in PARTS.items():
        if part in wanted:
            lab.text(_MARK.format(part, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())))
            measure(lab, places)
            lab.measured(part)
        elif part in old:
            lab.text(old[part])
            lab.recipes[part] = _recipe(lab.before(), part, old[part])
        if not lab.options["merge"]:
            lab.write()  # an interrupted run leaves what it has


def redraw(lab):
    """Figures from results alone."""
    weights.redraw(lab)
    for name, table in lab.results.get("sensitivity", {}).items():
        outputs.sensitivity_figure(lab, name, table)
    if "frontier" in lab.results:
        frontier.picture(lab, lab.results["frontier"])
    if "row" in lab.results:
        rows.figure(lab, lab.results["row"])
    if "chosen" in lab.results:
        rows.chosen_figure(lab, lab.results["chosen"])


def _recipe(before: dict, part: str, text: str) -> dict:
    """The recipe of a part that is not measured again. In older reports a part has no separate recipe, but a mark
    with the time of its measurement; its command and commit are unknown."""
    if part in before.get("parts", {}):
        return before["parts"][part]
    last = before["recipe"]
    if part in last["options"]["parts"].split(","):
        return last
    when = re.match(re.escape(_MARK).replace(r"\{\}", "(.+?)"), text)
    return {**last, "command": "numflow experiment quant-error", "started": when[2], "commit": None}


def _old(lab) -> tuple[dict[str, str], dict]:
    """The parts of the present report, each with its mark, and its results."""
    results = lab.before().get("results")
    if results is None:
        lab.say("there is no report to merge with")
        return {}, {}
    report = (lab.folder / "report.md").read_text(encoding="utf-8")
    begins = list(re.finditer(re.escape(_MARK).replace(r"\{\}", "(.+?)"), report))
    ends = [mark.start() for mark in begins[1:]] + [len(report)]
    return {mark[1]: report[mark.start():end] for mark, end in zip(begins, ends)}, results
