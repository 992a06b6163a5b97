"""The runtime with the published cuda.bindings, over a stub driver in C, compiled here, that computes nothing.

It checks what fake_driver.py cannot: that the bindings accept the arguments of device/gpu.py.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [pytest.mark.slow,  # .ci/cuda runs it
              pytest.mark.skipif(not (sys.platform == "linux" and COMPILER), reason="no C compiler"),
              pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings are not installed")]

PROGRAM = """
import numpy as np
from numflow.cuda.compiler import compat
from numflow.cuda.compiler.compile import Binary
from numflow.cuda.device.device import Launch, Order
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.lang.scalar import f32, i32, u32

gpu, other = (Gpu(compat.driver(), 0, lambda kernel, at: Binary(kernel.name, "probe", b"image", 1, 0, 0, 0))
              for _ in range(2))
assert (compat.gpu_names(), gpu.name, gpu.capability) == (["stub"], "stub", (9, 0))
assert (compat.driver_version(), gpu.free_bytes()) == ("13.0", 7000)
x = np.arange(20 << 20, dtype=np.uint8)
memory, small, pinned = gpu.alloc(x.nbytes), gpu.alloc(64), gpu.alloc_host(4096)
gpu.upload(memory.at(), x)
np.testing.assert_array_equal(gpu.download(memory.at(), x.nbytes), x)
gpu.host_array(pinned)[:4] = 7
gpu.copy(small.at(), pinned.at(), 4)
assert gpu.download(small.at(), 4).tolist() == [7] * 4
work = Launch(Kernel("probe", print, (f32.ptr, u32, f32, i32, u32.ptr), 96), (2, 3, 4),
              (memory.at(12), 2**32 - 1, 0.5, -5, None))
gpu.launch(work)
gpu.launch(work)
wide = Launch(work.kernel, work.grid, work.args, cluster=2)
gpu.launch(wide)
gpu.dependent = False
gpu.launch(wide)
gpu.dependent = True
graph = gpu.record([Order("begin", False, False), Order("begin", True, True),
                    Launch(work.kernel, work.grid, work.args, beside=True), Order("end", True, False),
                    Order("end", False, True)])
gpu.replay(graph)
gpu.drop(graph)
begin, end = gpu.mark(timing=True), gpu.mark(timing=True)
assert gpu.milliseconds(begin, end) == 1.5
other.wait(gpu.mark(gpu.mark()))
other.fetch(other.alloc(64).at(), gpu, memory.at(), 64)
other.index = 1
other.fetch(other.alloc(64).at(), gpu, memory.at(), 48)
for held in (memory, pinned):
    gpu.free(held)
gpu.close()
other.close()
"""


def test_calls_of_the_driver(tmp_path):
    source = Path(__file__).with_name("stub_driver.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", tmp_path / "libcuda.so.1", source, "-ldl"], check=True)
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120,
                           env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr
    launch = "probe 2 3 4, 96 1 1, 0: 12 4294967295 0.5 -5 0"
    assert found.stderr.splitlines() == [launch, f"dependent {launch}", f"dependent clusters of 2 1 1 {launch}",
                                         f"clusters of 2 1 1 {launch}", "capture 1", launch, "replay", "peer 48"]
