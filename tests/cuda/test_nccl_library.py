"""The installed nccl4py, over a stub library compiled by this test, and over NVIDIA's library if it is installed."""

import os
import shutil
import subprocess
import sys

import pytest

from numflow.cuda.compiler import compat
from numflow.cuda.exchange.nccl import Clique
from numflow.errors import DeviceError
from tests.conftest import REPO

pytest.importorskip("nccl.bindings", reason="nccl4py is not installed")

# A stub library. Calls print their arguments. An all-reduce returns when both ranks have entered it, so a caller that
# holds the GIL during the call is ended by the alarm.
LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static volatile int inside;
int ncclGetVersion(int *version) { *version = 23203; return 0; }
const char *ncclGetErrorString(int code) { return "said the library"; }
int ncclCommInitAll(void **comms, int count, const int *cards) {
    alarm(20);
    for (int i = 0; i < count; i++) { comms[i] = malloc(8); printf("init %d\n", cards[i]); }
    fflush(stdout);
    return 0;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    if (count == 13) return 5;
    __sync_fetch_and_add(&inside, 1);
    while (inside < 2) usleep(1000);
    printf("sum %p %p %zu %d %d %p\n", from, to, count, type, op, stream);
    fflush(stdout);
    return 0;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    printf("gather %p %p %zu %d %p\n", from, to, count, type, stream);
    fflush(stdout);
    return 0;
}
int ncclCommDestroy(void *comm) { printf("destroy\n"); fflush(stdout); free(comm); return 0; }
int ncclCommAbort(void *comm) { printf("abort\n"); fflush(stdout); free(comm); return 0; }
"""

CALLS = """
import threading
from types import SimpleNamespace
from numflow.cuda.compiler import compat
from numflow.cuda.exchange.nccl import Clique
from numflow.errors import DeviceError

devices = [SimpleNamespace(address=lambda ref: ref, lend=lambda rank=rank: 0x70 + rank) for rank in (0, 1)]
made = Clique(compat.nccl(), [0, 3])
assert made.ready(), made.failure
threads = [threading.Thread(target=made.all_reduce, args=(rank, devices[rank], 0x1000, 0x2000, 64)) for rank in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
made.all_gather(0, devices[0], 0x1000, 16)
made.all_gather(1, devices[1], 0x1000, 16)
made.close()
assert made.ready()
try:
    made.all_reduce(0, devices[0], 0x1000, 0x2000, 13)
except DeviceError as error:
    print(error, flush=True)
made.abort()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_what_the_library_is_given(tmp_path):
    """The arguments of the calls, made by two threads at once."""
    (tmp_path / "nccl.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnccl.so.2", tmp_path / "nccl.c"], check=True)
    place = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, env={**os.environ, **place},
                          timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted([
        "init 0", "init 3", "sum 0x1000 0x2000 64 7 0 0x70", "sum 0x1000 0x2000 64 7 0 0x71",
        "gather 0x1000 0x1000 16 7 0x70", "gather 0x1040 0x1000 16 7 0x71", "destroy", "destroy", "init 0", "init 3",
        "NCCL between GPUs 0, 3: InvalidUsage (5): said the library", "abort", "abort"])


def test_the_library_itself():
    """NCCL loads and reports its version; without GPUs it reports an error."""
    try:
        library = compat.nccl()
    except DeviceError as error:
        assert "libnccl.so.2" in str(error) and compat.INSTALL_NCCL in str(error)
        pytest.skip("NCCL is not installed")
    assert library.get_version() > 20_000
    made = Clique(library, [998, 999])
    assert not made.ready() and "NCCL cannot join GPUs 998, 999" in made.failure
