"""Programmatic dependent launch: on sm_90 and newer a kernel begins while the one before it in the queue still runs.

Kernels are compiled once, for sm_80, where a kernel begins when the one before has ended. Instructions that newer cards
alone have stand in that assembly as comments (`NEWER`); `dependent` makes instructions of them. A kernel that does not
say where it waits for the kernels before it (intrinsics.after_previous) waits at its first instruction. So all kernels
wait, and what they leave in memory is in order, as it would be without. What is gained: blocks are in their places, and
weights on their way to the second cache, when the last block before them ends (CUDA programming guide, "Programmatic
Dependent Launch").
"""

import re

from numflow.cuda.lang.intrinsic import NEWER, WAIT

DEPENDENT_FROM = (9, 0)                         # compute capability
RELEASE = "griddepcontrol.launch_dependents;"   # the next kernel may begin once all blocks of this one have
_DECLARATION = re.compile(r"\s*(?://[^\n]*\n\s*)*\.(?:reg|local|shared|loc|pragma)\b[^\n]*")


def dependent(ptx: str, target: str = "sm_90") -> str:
    """The assembly of one kernel for sm_90 or a newer target: instructions behind NEWER, and a wait in any case."""
    ptx = ptx.replace(".target sm_80", f".target {target}").replace(NEWER, "")
    head = re.search(r"\.entry[^{]*\{", ptx)
    begin = head.end()
    while declared := _DECLARATION.match(ptx, begin):
        begin = declared.end()
    first = f"\n\t{RELEASE}" + ("" if WAIT in ptx else f"\n\t{WAIT}")
    return f"{ptx[:begin]}{first}{ptx[begin:]}"
