"""Bugs planted in compiled kernels of numflow: each barrier, fence and wait removed, each kind of access shifted.

    python -m tests.cuda.on_ptx.planted [KERNEL]

Prints a line for each kernel: the number of changes, how many were noticed by a fault, a note or a wrong result, and
those that were not. NEEDLESS lists removals that have no effect in the kernel's test case, with the reason.
"""

import functools
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch

from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.program import Program
from numflow.learn.cases.build import error, run_case
from tests.cuda.attention_shapes import attention_case
from tests.cuda.matrices import linear_case, of_float8
from tests.cuda.on_ptx.device import PtxDevice, assembly
from tests.cuda.ptx.findings import Checks, Fault
from tests.cuda.ptx.parse import parse
from tests.cuda.small import CASES

SYNC = (r"bar(?:rier)?\.sync[^;]*;|bar\.warp\.sync[^;]*;|cp\.async\.wait_group[^;]*;|fence\.proxy[^;]*;"
        r"|wgmma\.(?:fence|commit_group|wait_group)[^;]*;|fence\.mbarrier_init[^;]*;|mbarrier\.(?:arrive|try_wait)[^;]*;"
        r"|barrier\.cluster\.arrive[^;]*; barrier\.cluster\.wait[^;]*;|cp\.async\.bulk[^;]*;"
        r"|tcgen05\.(?:alloc|commit|cp|dealloc|fence|wait)[^;]*;")
_ALONE = "in a cluster of two, as here, every copy is a multicast; the code for a single block does not run"
_APART = "on this machine, the lanes of a warp reconverge by themselves before the next warp-wide instruction"
_LAST = "a block waits for all copies to it; on a GPU its copies to the other block may still be in flight"
_FIRST = (dict.fromkeys((3, 4, 10, 11), "the buffers of the first two tiles have not been used before")
          | dict.fromkeys((6, 7, 13, 14), _ALONE))
_ALLOCATED = "each product and each load has a fence of its own, and only an allocation comes before"
_SIMULATOR = "the wait for the last products follows; the simulator needs the barrier, to start these products first"
# For each kernel: removals without effect, by the number of the match in the PTX, and the reason.
NEEDLESS: dict[str, dict[int, str]] = {
    "attention_few_f16_64_f16_64_8": {4: "the next turn writes the sums' memory behind the barrier of its queries"},
    "wgmma_q4_tma": _FIRST | dict.fromkeys((27, 28), _ALONE) | {30: _APART, 32: _LAST},
    "wgmma_f16_tma": _FIRST | dict.fromkeys((28, 29), _ALONE) | {31: _APART, 33: _LAST},
    "tcgen05_e4m3_128_float8": dict.fromkeys((2, 4), _ALLOCATED) | {13: _APART, 19: _SIMULATOR},
    "tcgen05_e4m3_128_float8_tma": dict.fromkeys((2, 4), _ALLOCATED) | {30: _APART, 36: _LAST}
    | dict.fromkeys((7, 8), "the buffers of the first three tiles have not been used before")
    | dict.fromkeys((10, 11, 27, 28), _ALONE),
    "rms_norm_weight_256": {0: "block_sum begins with a barrier for the sake of an earlier sum; here is one sum alone"}}


def cases() -> dict[str, tuple]:
    """(case, options) for each kernel that is changed."""
    tokens = attention_case(8, 2, 128, 128, (((0, 70),), ((0, 1), (1, 5))))
    # Two of 8 rows for each token; with a product behind it, attention also writes the product's operand.
    turns = attention_case(16, 1, 128, 128, (((0, 40), (1, 3)), ((0, 1), (1, 1)), ((0, 1), (1, 1), *(
        (each, 1) for each in range(2, 6)))), product="F16")
    return {"gemv_q4_int8_1_split4": (linear_case("q4", 20, 4608, 1, bias=True), {}),
            "gemm_q4_64": (linear_case("q4", 130, 512, 17, bias=True), {}),
            "gemm_f16_16": (linear_case("F16", 130, 512, 9, bias=True), {}),
            "attention_many_f16_64_f16_64": (tokens, {"kv_type": "f16"}),
            "attention_few_f16_64_f16_64_8": (turns, {"kv_type": "f16"}),
            "wgmma_q4": (linear_case("q4", 260, 512, 70, bias=True), {}),
            "wgmma_f16": (linear_case("F16", 20, 512, 70, bias=True), {}),
            "wgmma_q4_tma": (linear_case("q4", 260, 512, 70, bias=True), {}),
            "wgmma_f16_tma": (linear_case("F16", 260, 512, 70, bias=True), {}),
            "tcgen05_e4m3_128_float8": (of_float8(linear_case("E4M3_128", 20, 512, 70, bias=True), 512),
                                        {"activations": "fp8"}),
            "tcgen05_e4m3_128_float8_tma": (of_float8(linear_case("E4M3_128", 260, 512, 70, bias=True), 512),
                                            {"activations": "fp8"}),
            "rms_norm_weight_256": (next(case for case in CASES if case.name == "rms_norm-wide"),
                                    {"activations": "f32"})}


def changes(text: str) -> Iterator[tuple[str, str]]:
    """(description, changed PTX): each synchronisation removed; accesses of each kind misaligned, or moved far away."""
    for number, found in enumerate(re.finditer(SYNC, text)):
        rest = "setp.eq.u32 over, 0, 0;" if "try_wait" in found[0] else ""       # the wait succeeds at once
        yield f"{number} without {found[0]}", text[:found.start()] + rest + text[found.end():]
    accesses = r"((?:ld|st)\.(?:global|shared)[\w.:]*)(?=\s)[^;\[]*\[[%\w]+(?:\+\d+)?(?=\])"
    for access in sorted({found[1] for found in re.finditer(accesses, text)}):
        shifts = {"misaligned": _size(access) // 2, "far away": (1 << 28) * (".global" in access)}
        for what, shift in shifts.items():
            if shift:
                yield f"{access} {what}", re.sub(accesses, functools.partial(_shifted, access, shift), text)


def _shifted(access: str, by: int, found: re.Match) -> str:
    if found[1] != access:
        return found[0]
    base, _, offset = found[0].rpartition("+") if re.search(r"\+\d+$", found[0]) else (found[0], "", "0")
    return f"{base}+{int(offset) + by}"


def _size(access: str) -> int:
    """Bytes that a lane accesses."""
    count = re.search(r"\.v(\d)", access)
    return int(re.search(r"\.[a-z]+(\d+)$", access)[1]) // 8 * int(count[1] if count else 1)


def launched(name: str, case, options: dict) -> tuple[Kernel, list]:
    """The kernel of this name among those of a case, and the case's correct results."""
    found = {}

    class Remembering(PtxDevice):
        """A PtxDevice that remembers the kernels."""

        def launch(self, work):
            if hasattr(work, "kernel"):
                found[work.kernel.name] = work.kernel
            super().launch(work)

    results = run_case(case, Program, gpu=_for(name, Remembering()), **options)
    return found[name], results


def _for(name: str, device: PtxDevice) -> PtxDevice:
    """Set the device's flags for a kernel of this name."""
    device.wgmma, device.tma = name.startswith("wgmma"), name.endswith("_tma")
    device.tcgen05 = device.float8 = device.float4 = name.startswith("tcgen05")
    return device


def is_noticed(name: str, case, options: dict, text: str, expected: list) -> bool:
    """Whether a changed kernel causes a fault, a note or another result."""
    device = _for(name, PtxDevice(checks=Checks(steps=100_000)))
    device.changed[name] = parse(text)
    try:
        actual = run_case(case, Program, gpu=device, **options)
    except Fault:
        return True
    return bool(device.checks.notes) or any(error(a, e) != 0 for a, e in zip(actual, expected))


def unnoticed(name: str) -> tuple[int, list[str]]:
    """The number of changes of a kernel, and the changes that should be noticed and are not."""
    case, options = cases()[name]
    kernel, expected = launched(name, case, options)
    missed, count = [], 0
    for what, text in changes(assembly(kernel)):
        number = int(what.split()[0]) if what[0].isdigit() else -1
        if number in NEEDLESS.get(name, {}):
            continue
        count += 1
        if not is_noticed(name, case, options, text, expected):
            missed.append(what)
    return count, missed


def main() -> int:
    """Run the command, and return its exit status."""
    pattern, total, lost = sys.argv[1] if len(sys.argv) > 1 else "*", 0, 0
    for name in cases():
        if fnmatch(name, pattern):
            count, missed = unnoticed(name)
            total, lost = total + count, lost + len(missed)
            print(f"{name}: {count} changes, {count - len(missed)} noticed"
                  + (f"; not: {', '.join(missed)}" if missed else ""), flush=True)
    print(f"{total} planted bugs, {total - lost} found")
    return int(bool(lost) or not total)


if __name__ == "__main__":
    sys.exit(main())
