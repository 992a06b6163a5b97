"""The kernel that reads the clock (clock.py)."""

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.atomic import read_clock
from numflow.cpu.runtime.kernel import kernel

# Arguments: address of int64 [2] that the clock is read into.
AT = 0


@kernel
def stamp(args, thread, n_threads):
    """args: address of the two int64."""
    if thread == 0:
        at = i64(args, AT)
        i64_ptr(at)[0] = 0
        i64_ptr(at)[1] = 0
        read_clock(at)
