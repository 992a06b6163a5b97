"""Recurrent state: speed and memory of models with recurrent layers, beside llama.cpp on the same files.

Measured are: blocks of tokens against single tokens, in one op; prompts and decoding of whole models with random
weights (their speed does not depend on the weights), by text length; the memory of a text; and the effect of fewer bits
for states. With one text, numflow decodes greedily, several steps in one call; with several texts, and in llama.cpp, no
tokens are sampled. The engines take turns, run by run, and rates are medians of the rounds. To decode at a position of
a text, numflow does not process the tokens before it: their keys and values are zeros, which cost the same. The option
`llama_cpp` (or $NUMFLOW_LLAMA_CPP) names the folder of llama.cpp's llama-bench; the report says if it is missing. Model
files are written into a temporary folder and removed.
"""

import os
import tempfile
from itertools import product
from pathlib import Path

from ..llama_cpp import LlamaCpp
from . import kernels, memory, models, show, speed

PARTS = "kernels,models,positions,types,memory"
# Lists have commas between. parts: which of the measurements; the report keeps what it had of the others. positions: of
# the tokens that are decoded. texts: how many decode together.
OPTIONS = {"parts": PARTS, "rounds": 5, "threads": "1,2", "prompts": "512,4096",
           "positions": "32,4096,32768", "tokens": 64, "texts": 32, "models": "qwen35,lfm2,granite,gemma4",
           "types": "Q4_0",  # of the matrices in the files that llama.cpp reads too
           "llama_cpp": os.environ.get("NUMFLOW_LLAMA_CPP", "")}


def run(lab):
    if lab.quick:
        lab.options |= {"rounds": 1, "threads": "1", "prompts": "40", "positions": "32,256", "tokens": 4, "texts": 3}
    options, quick = lab.options, lab.quick
    peer = LlamaCpp(options["llama_cpp"])
    options["llama_cpp"] = "llama-bench" if peer else ""
    parts, rounds = options["parts"].split(","), options["rounds"]
    threads, prompts, positions = (list(map(int, options[key].split(","))) for key in ("threads", "prompts",
                                                                                      "positions"))
    made = [getattr(models, name)(quick) for name in options["models"].split(",")]
    found = lab.results
    found["load_average"] = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        if "kernels" in parts:
            lab.say("one op")
            found["kernels"] = kernels.rates(rounds, quick)
        if "models" in parts:
            found["models"] = {}
            for one, kind in product(made, options["types"].split(",")):
                path = one.write(Path(folder) / "model.gguf", kind)
                for count in threads:
                    lab.say(f"{one.name}, {kind}, {count} threads")
                    name = one.name if kind == "Q4_0" else f"{one.name}, {kind}"
                    found["models"][f"{name}|{count}"] = speed.beside(
                        peer, path, count, prompts, positions[0], options["tokens"], options["texts"], rounds) | {
                            "read_bytes": one.read_bytes(kind), "operations": one.operations()}
                path.unlink()
        if "positions" in parts:
            found["positions"] = {}
            for one in (models.qwen35(quick, pure=True), models.qwen35(quick)):
                lab.say(f"{one.name}, by position")
                path = one.write(Path(folder) / "model.gguf")
                found["positions"][one.name] = speed.by_position(path, threads[0], positions, options["tokens"], rounds)
                path.unlink()
        if "types" in parts:
            lab.say("types of states")
            path = models.qwen35(quick, pure=True).write(Path(folder) / "model.gguf")
            found["types"] = speed.by_type(path, threads[-1], 64 if quick else 1024, positions[0], options["tokens"])
            path.unlink()
    if "memory" in parts:
        found["memory"] = memory.table([models.qwen35(False), models.gemma3(), models.deepseek()])
    found["load_average"].append(os.getloadavg()[0])
    for part in PARTS.split(","):
        keep(lab, part, part in parts)
    show.report(lab, found)


def keep(lab, part: str, measured: bool) -> None:
    """Copy the present report's results of a part that is not measured now; in the part `models`, of the models that
    are not measured now."""
    before = {} if lab.quick else lab.before().get("results", {})
    if measured:
        lab.measured(part)
    elif part in before:
        lab.results[part] = before[part]
        lab.kept(part)
    if part == "models" and part in lab.results:
        lab.results[part] = before.get(part, {}) | lab.results[part]


def redraw(lab):
    """Figures from results alone."""
    if "kernels" in lab.results:
        show.blocks_figure(lab, lab.results["kernels"])
    if "positions" in lab.results:
        show.positions_figure(lab, lab.results["positions"])
