"""Every kernel compiles to machine code for sm_80 and sm_90, within its budget of registers and without spills."""

import pytest

from numflow.cuda.compile import compile_kernel
from numflow.cuda.kernel import Kernel
from tests.cuda.kernels import ALL, compiler_is_there

pytestmark = [pytest.mark.slow,  # .ci/cuda runs them
              pytest.mark.skipif(not compiler_is_there(), reason="no numba-cuda, or not the wheels it compiles with")]

MOST_REGISTERS = 128   # of a thread, unless the kernel says how many blocks must fit
MOST_SHARED = 48 << 10  # bytes of a block that need no opt-in
STACKS = {"rope_angles"}  # the exact cosine of huge arguments keeps a table there


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_resources(name, capability):
    kernel: Kernel = ALL[name]
    binary = compile_kernel(kernel, capability)
    budget = min(65536 // (kernel.threads * kernel.blocks) // 8 * 8, 255) if kernel.blocks else MOST_REGISTERS
    assert binary.spills == 0
    assert binary.registers <= budget
    assert binary.shared <= MOST_SHARED
    assert binary.stack == 0 or name in STACKS
    assert kernel.exact or ".f64" not in binary.ptx, "arithmetic in double precision"
