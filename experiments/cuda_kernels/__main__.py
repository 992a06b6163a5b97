"""The table of kernels: registers, spills, shared memory and instructions of each, and of the loops over weights the
instructions per weight. Needs no GPU, but the compiler (extra `cuda-compile`), and nvdisasm for instructions.

    python -m experiments.cuda_kernels --out reports/cuda-kernels/ [--match REGEX] [--compiled]

--compiled: only kernels that are compiled already. Writes kernels.json and README.md.
"""

import argparse
import json
import re
from pathlib import Path

from numflow.cuda.compat import versions
from numflow.cuda.compile import cached, is_cached
from numflow.cuda.sass import disassembler, instructions
from tests.cuda.kernels import all_kernels

CAPABILITY = (9, 0)
LEGEND = """\
Compiled for sm_90; made by `python -m experiments.cuda_kernels`. `per weight`: instructions of a lane in the longest
loop, over the weights it reads there (32 for each unit): a multiprocessor issues 4 instructions of 32 lanes a clock, so
at w weights per byte and b bytes per clock the loop takes b * w * (per weight) / 128 of what it can issue. `128-bit`:
loads of weights and activations of 16 bytes a lane.
"""


def main() -> None:
    """Compile, disassemble, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.cuda_kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/cuda-kernels"))
    parser.add_argument("--match", default="", help="only kernels whose name matches")
    parser.add_argument("--compiled", action="store_true", help="only kernels that are compiled already")
    options = parser.parse_args()
    rows = []
    for name, kernel in all_kernels().items():
        if not re.search(options.match, name) or (options.compiled and not is_cached(kernel, CAPABILITY)):
            continue
        rows.append(row_of(name, cached(kernel, CAPABILITY), kernel.threads))
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kernels.json").write_text(json.dumps({"versions": versions(), "kernels": rows}, indent=1))
    (options.out / "README.md").write_text(page(rows))


def row_of(name: str, binary, threads: int) -> dict:
    """Facts of a kernel."""
    facts = {"kernel": name, "threads": threads, "registers": binary.registers, "spills": binary.spills,
             "shared": binary.shared, "stack": binary.stack}
    if disassembler() is None:
        return facts
    found = instructions(binary)
    names = [text.split()[0] for text in found if not text.startswith(".L")]

    def count(pattern: str) -> int:
        return sum(re.match(pattern, n) is not None for n in names)

    facts |= {"instructions": len(names), "128-bit": count(r"LDG\S*\.128"), "IDP": count("IDP"), "HMMA": count("HMMA")}
    weights = weights_of(name)
    if weights:
        facts["per weight"] = round(longest_loop(found) / weights, 2)
    return facts


def weights_of(name: str) -> int:
    """Weights that a lane reads in one turn of the main loop of a matrix-vector kernel of quantised weights."""
    made = re.match(r"gemv_.*_(int8|f32)_(\d)", name)
    return {"1": 4, "4": 2, "8": 1}[made[2]] * 32 if made else 0


def longest_loop(found: list[str]) -> int:
    """Instructions of the longest stretch that a branch jumps back over; labels are lines of their own."""
    longest = 0
    places = {text[:-1]: place for place, text in enumerate(found) if text.startswith(".L")}
    for place, text in enumerate(found):
        target = re.search(r"BRA.*(\.L_x_\d+)", text)
        if target and target[1] in places and places[target[1]] < place:
            longest = max(longest, place - places[target[1]])
    return longest


def page(rows: list[dict]) -> str:
    """README.md."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["# Kernels of the CUDA executor", "", LEGEND, f"{len(rows)} kernels.", "",
             "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join([*lines, "", ", ".join(f"{k} {v}" for k, v in versions().items()), ""])


if __name__ == "__main__":
    main()
