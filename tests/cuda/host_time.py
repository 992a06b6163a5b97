"""The host's time per token, without a GPU: `python -m tests.cuda.host_time [LAYERS] [WEIGHTS]`.

Measures numflow's runtime with the published cuda.bindings over a C stub of the driver that does nothing, with CUDA
graphs. The model is a decoder of toy width with the number of layers of an 8B model. Prints the median processor time
of `Program.sample` and `Program.decode`, greedy and sampled. `sample` runs a new batch for each token, and a batch that
goes on (Batch.go_on), which the engine makes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TOKENS = 400
BLOCK = 64  # tokens of a KV block


def main(layers: int, weights: str) -> None:
    """Print the microseconds per token."""
    from numflow.cuda.compiler import compat
    from numflow.cuda.compiler.compile import Binary
    from numflow.cuda.device.gpu import Gpu
    from numflow.cuda.program import Program
    from numflow.decoding.choice import Choice
    from numflow.executor.contract import MOST_STEPS
    from numflow.lab.shapes import Shape, random_network
    from numflow.network import WeightSource
    from numflow.ops import Batch

    network, checkpoint = random_network(Shape(layers, 512, 4, 2, 512, 97, 4096), weights)
    gpu = Gpu(compat.driver(), 0, lambda kernel, capability: Binary(kernel.name, "probe", b"image", 1, 0, 0, 0))
    program = Program(network, WeightSource(network, checkpoint), gpu=gpu)
    program.reserve(64)
    table = np.arange(64, dtype=np.int32)[None]

    def new_batch(position: int) -> Batch:
        return Batch(*(np.array(one, np.int32) for one in ([7], [position], [0, 1])), table, np.zeros(1, np.int32),
                     limits=np.array([4096], np.int32))

    for name, choice in {"greedy": Choice(), "drawn": Choice(0.8, 0.5, (("top_p", 0.9),))}.items():
        for goes_on in (False, True):
            times, batch = [], new_batch(0)
            for position in range(TOKENS):
                if goes_on and position % BLOCK:
                    batch.go_on([7])
                else:
                    batch = new_batch(position)
                begun = time.process_time_ns()
                program.sample(batch, [choice])
                times.append((time.process_time_ns() - begun) / 1e3)
            print(f"{layers} layers, {weights}, {name}, {'a batch that goes on' if goes_on else 'new batches'}: "
                  f"{statistics.median(times[TOKENS // 4:]):.0f} us a token")
    drawn = Choice(0.8, 0.5, (("top_p", 0.9),), (0.5,) * (MOST_STEPS - 1))
    for name, choices in {"greedy": None, "drawn": [drawn]}.items():
        times = []
        for position in range(0, MOST_STEPS * TOKENS, MOST_STEPS):
            several = new_batch(position)
            begun = time.process_time_ns()
            program.decode(several, MOST_STEPS, choices)
            times.append((time.process_time_ns() - begun) / 1e3 / MOST_STEPS)
        print(f"{layers} layers, {weights}, {name}, {MOST_STEPS} steps in one go: "
              f"{statistics.median(times[TOKENS // 4:]):.0f} us a token")
    program.close()


if __name__ == "__main__":
    given = [*sys.argv[1:], *("32", "q4")[len(sys.argv) - 1:]]
    if "NUMFLOW_STUB" in os.environ:
        main(int(given[0]), given[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(__file__).with_name("stub_driver.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-w", "-O2", "-DQUIET", "-o", f"{folder}/libcuda.so.1", source,
                            "-ldl"], check=True)
            sys.exit(subprocess.run([sys.executable, "-m", "tests.cuda.host_time", *given], check=False, env={
                **os.environ, "LD_LIBRARY_PATH": folder, "NUMFLOW_STUB": "1"}).returncode)
