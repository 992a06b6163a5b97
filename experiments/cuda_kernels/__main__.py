"""The table of GPU kernels: registers, spills, shared memory and instructions, and instructions per weight of the loops
over weights. Needs no GPU, but the compiler (extra `cuda-compile`), and nvdisasm for the instructions.

    python -m experiments.cuda_kernels --out reports/cuda-kernels/ [--match REGEX] [--compiled]

--compiled: only kernels in the cache. Writes README.md.
"""

import argparse
import re
from pathlib import Path

from numflow.cuda.compiler.compat import versions
from numflow.cuda.compiler.compile import assembled, cached, is_cached
from numflow.cuda.compiler.sass import disassembler, instructions
from tests.cuda.kernels import NEWER, TENSOR, all_kernels
from tests.cuda.on_ptx.device import assembly

CAPABILITIES = ((9, 0), *NEWER, TENSOR)    # a kernel is compiled for the first of them on which it runs
LEGEND = """\
Made by `python -m experiments.cuda_kernels`. `sm`: the compute capability that a kernel is compiled for, 9.0 if it runs
there. `per weight`: instructions of a lane in the longest loop, over the weights it reads there, for all tokens of the
kernel (the number at the end of its name). `128-bit`: loads of weights and activations of 16 bytes a lane. docs/cuda.md
says what follows for speed.
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
        capability = next(one for one in CAPABILITIES if kernel.runs_on(one))
        if not re.search(options.match, name) or (options.compiled and not is_cached(kernel, capability)):
            continue
        binary = (cached(kernel, capability) if is_cached(kernel, capability) else
                  assembled(kernel, assembly(kernel), capability))
        rows.append(row_of(name, capability, binary, kernel.threads))
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text(page(rows))


def row_of(name: str, capability: tuple[int, int], binary, threads: int) -> dict:
    """Facts of a kernel."""
    facts = {"kernel": name, "sm": "{}.{}".format(*capability), "threads": threads, "registers": binary.registers,
             "spills": binary.spills, "shared": binary.shared, "stack": binary.stack}
    if disassembler() is None:
        return facts
    found = instructions(binary)
    names = [text.split()[0] for text in found if not text.startswith(".L")]

    def count(pattern: str) -> int:
        return sum(re.match(pattern, n) is not None for n in names)

    facts |= {"instructions": len(names), "128-bit": count(r"LDG\S*\.128"), "IDP": count("IDP"), "HMMA": count("HMMA")}
    made = re.match(r"gemv_(.*)_int8_(\d)", name)
    if made:
        loop = longest_loop(found)
        products = sum("IDP" in text for text in loop)
        units = products // ((12 if made[1] == "q3h" else 8) * int(made[2]))  # pairs take 12 for each token, others 8
        facts["per weight"] = round(len(loop) / (32 * units), 2)
    return facts


def longest_loop(found: list[str]) -> list[str]:
    """Instructions of the longest stretch that a branch jumps back over."""
    longest: list[str] = []
    places = {text[:-1]: place for place, text in enumerate(found) if text.startswith(".L")}
    for place, text in enumerate(found):
        target = re.search(r"BRA.*(\.L_x_\d+)", text)
        if target and places.get(target[1], place) < place:
            loop = [one for one in found[places[target[1]]:place + 1] if not one.startswith(".L")]
            longest = max(longest, loop, key=len)
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
