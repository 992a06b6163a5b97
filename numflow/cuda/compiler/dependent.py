"""Programmatic dependent launch: on sm_90 and newer, a kernel may start while its predecessor in the stream still runs.

Kernels are compiled to PTX once, for sm_80, where a kernel starts after its predecessor has ended. Instructions that
only newer GPUs have are in this PTX as comments that begin with `NEWER`. `dependent` turns the comments into
instructions. A kernel that does not say where it waits for earlier kernels (intrinsics.after_previous) waits at its
first instruction. So every kernel waits, and the order of memory accesses is the same as without dependent launch. The
gain: when the predecessor's last block ends, the next kernel's blocks are resident already and have prefetched weights
into L2 (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
"""

import re

from numflow.cuda.lang.intrinsic import NEWER, WAIT

DEPENDENT_FROM = (9, 0)                         # compute capability
RELEASE = "griddepcontrol.launch_dependents;"   # the next kernel may start once all blocks of this one have started
_DECLARATION = re.compile(r"\s*(?://[^\n]*\n\s*)*\.(?:reg|local|shared|loc|pragma)\b[^\n]*")


def dependent(ptx: str, target: str = "sm_90") -> str:
    """PTX of one kernel for sm_90 or a newer target: comments marked NEWER become instructions, and the kernel waits
    at its beginning unless it has a wait of its own."""
    ptx = ptx.replace(".target sm_80", f".target {target}").replace(NEWER, "")
    head = re.search(r"\.entry[^{]*\{", ptx)
    begin = head.end()
    while declared := _DECLARATION.match(ptx, begin):
        begin = declared.end()
    first = f"\n\t{RELEASE}" + ("" if WAIT in ptx else f"\n\t{WAIT}")
    return f"{ptx[:begin]}{first}{ptx[begin:]}"
