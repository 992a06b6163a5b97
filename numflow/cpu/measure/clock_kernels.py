"""The kernel that reads the clock (clock.py)."""

from numflow.cpu.runtime.access import i64, i64_ptr
from numflow.cpu.runtime.atomic import read_clock
from numflow.cpu.runtime.kernel import kernel

# Argument: address of int64 [2] for the time.
ADDRESS = 0


@kernel
def stamp(args, thread, n_threads):
    """args: address of the two int64."""
    if thread == 0:
        address = i64(args, ADDRESS)
        i64_ptr(address)[0] = 0
        i64_ptr(address)[1] = 0
        read_clock(address)
