"""Survey of the kernels that networks need: bind a network to a device that notes launches and runs nothing."""

import numpy as np

from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Launch, Memory, Order, Ref
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.program import Program
from numflow.cuda.sample.sample import BEST, FOLLOW, FOLLOW_DRAWN, PICK
from numflow.ops import Network

SIZES = tuple((rows, keys) for rows in (1, 3, 5, 16, 64, 500) for keys in (40, 5000))


class Notebook:
    """A device without memory, which notes the launches."""

    name, graphs = "notebook", False

    def __init__(self, wgmma: bool = False, tma: bool = True, float8: bool = False,
                 float4: bool = False, tcgen05: bool = False):
        self.wgmma, self.tcgen05, self.tma = wgmma, tcgen05, (wgmma or tcgen05) and tma
        self.float8, self.float4 = wgmma or tcgen05 or float8 or float4, tcgen05 or float4
        self.launches: list[Launch] = []

    def alloc(self, nbytes: int) -> Memory:
        return Memory(self, nbytes, None)

    alloc_host = alloc

    def free(self, memory: Memory) -> None:
        """Nothing is held."""

    def upload(self, to: Ref, data: np.ndarray) -> None:
        """Goes nowhere."""

    def download(self, source: Ref, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def copy(self, to: Ref, source: Ref, nbytes: int) -> None:
        """Goes nowhere."""

    def launch(self, work: Launch | Order) -> None:
        """Note the launch of a kernel. An Order between streams launches nothing."""
        if isinstance(work, Launch):
            self.launches.append(work)

    def host_array(self, memory: Memory) -> np.ndarray:
        return np.zeros(memory.nbytes, np.uint8)

    def until(self, event: None) -> None:
        """Nothing is running."""

    def mark(self, again: None = None) -> None:
        """Nothing is running."""

    def wait(self, event: None) -> None:
        """Nothing is running."""

    def fetch(self, to: Ref, other: "Notebook", source: Ref, nbytes: int) -> None:
        """Goes nowhere."""

    def synchronize(self) -> None:
        """Nothing is running."""

    def close(self) -> None:
        """Nothing is held."""


def kernels_of(network: Network, weights, **options) -> dict[str, Kernel]:
    """All kernels, by name, that a network may launch on any GPU, for batches of SIZES. options: of a Program.

    Kernels that run only if an environment variable asks for them are left out.
    """
    activations = options.get("activations")
    float8, float4 = activations == "fp8", activations == "nvfp4"  # only on newer GPUs
    works: list[Launch] = []
    for tcgen05 in {False, float8 or float4}:
        device = Notebook(float8=float8, float4=float4, tcgen05=tcgen05)
        program = Program(network, weights, gpu=device, **options)
        works += device.launches
        for device.wgmma, device.tma in {(False, False), (False, True)} if tcgen05 else {
                (False, False), (float8, False), (not float4, not float4)}:
            works += (work for rows, keys in SIZES for sequences in {1, rows}
                      for work in program.launches(Sizes((rows, rows, rows, sequences), keys)))
        program.close()
    found = {work.kernel.name: work.kernel for work in works}
    return found | {kernel.name: kernel for kernel in (BEST, FOLLOW, PICK, FOLLOW_DRAWN)} \
        if "logits" in network.outputs else found
