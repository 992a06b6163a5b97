"""Disassembly of machine code to SASS by nvdisasm, if it is installed."""

import functools
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from numflow.cuda.compiler.compile import Binary

_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*[^;]*);|^(\.L_x_\d+:)", re.M)


@functools.cache
def disassembler() -> str | None:
    """Path of nvdisasm, from the PATH or from an installed wheel; None if there is none."""
    spec = find_spec("nvidia")
    wheels = [path for root in (spec.submodule_search_locations if spec else ())
              for path in sorted(Path(root).glob("*/bin/nvdisasm"))]
    return shutil.which("nvdisasm") or (str(wheels[-1]) if wheels else None)


def instructions(binary: Binary) -> list[str]:
    """The SASS instructions of a kernel in order, without padding. Labels are entries too, such as ".L_x_1:"."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        text = subprocess.run([disassembler(), "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = [instruction or label for instruction, label in _LINE.findall(text)]
    while found and found[-1].startswith(("NOP", "BRA", ".L")):
        found.pop()
    return found
