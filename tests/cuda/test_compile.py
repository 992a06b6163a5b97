"""Every kernel compiles to machine code for sm_80 and sm_90, within its budget of registers and without spills.

Those that these do not have compile for newer cards."""

import pytest

from numflow.cuda.compiler.compile import to_ptx
from tests.cuda.kernels import CAPABILITIES, NEWER, TENSOR, all_kernels, binaries, compiler_is_there

pytestmark = [pytest.mark.slow,  # .ci/cuda runs them
              pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda, or not the wheels it compiles with")]

MOST_REGISTERS = 128   # per thread, unless the kernel says how many blocks must fit on a multiprocessor
MOST_SHARED = 48 << 10  # bytes of static shared memory of a block
MOST_DYNAMIC = 227 << 10  # bytes of shared memory of a block on 9.0 and 10.x; only kernels for these use dynamic memory
PARTS = 8  # parts into which the kernels are divided, so that a merge may run some of them
STACKS = {"rope_angles", "rope_angles_by_length"}  # the accurate cosine of huge arguments has a table on the stack


@pytest.mark.parametrize("capability", CAPABILITIES, ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("part", range(PARTS))
def test_resources(part, capability):
    names = [name for name, kernel in all_kernels().items() if kernel.runs_on(capability)]
    assert over_budget(names[len(names) * part // PARTS:len(names) * (part + 1) // PARTS], capability) == []


@pytest.mark.parametrize("capability", (*NEWER, TENSOR), ids=["sm_89", "sm_120", "sm_100"])
def test_resources_on_newer_cards(capability):
    names = [name for name, kernel in all_kernels().items() if kernel.target != "sm_80" and kernel.runs_on(capability)]
    assert names
    assert over_budget(names, capability) == []


def over_budget(names: list[str], capability: tuple[int, int]) -> list[str]:
    """The kernels that exceed their budget of registers or shared memory, or spill."""
    over = []
    for name, binary in zip(names, binaries(names, capability)):
        kernel = all_kernels()[name]
        budget = min(65536 // (kernel.threads * kernel.blocks) // 8 * 8, 255) if kernel.blocks else MOST_REGISTERS
        if (binary.spills or binary.registers > budget or binary.shared > MOST_SHARED
                or binary.shared + kernel.dynamic > MOST_DYNAMIC or (binary.stack and name not in STACKS)
                or (binary.doubles and not kernel.exact)):
            over.append(f"{binary}, budget {budget}")
    return over


def test_no_approximate_tanh():
    """tanh.approx has only 11 correct bits, too few for float32 results; other approximations have 22 or more."""
    named = [name for name in all_kernels() if "tanh" in name or "softcap" in name]
    assert named
    assert [name for name in named if "tanh.approx" in to_ptx(all_kernels()[name], CAPABILITIES[0])] == []
