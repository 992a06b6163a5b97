"""Quantisation on a GPU into numflow's own schemes, with the same bytes as on the CPU.

    with closing(Quantiser(lambda: open_device("gpu"))) as rows_of:
        quant.encode(x, scheme, rows_of=rows_of)

Floats are uploaded some rows at a time, and packed rows are downloaded, so the device holds about two stages of a
matrix. The loader of a model keeps the rows and uploads them like rows of a file.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from numflow.cuda.device.call import ceil
from numflow.cuda.device.device import MOST_BLOCKS, Device, Launch, Ref
from numflow.cuda.lang.kernel import Kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.weights.search import LIKES_WARPS, Blocks, Headers, likes_kernel, search_kernel
from numflow.cuda.weights.search_pack import THREADS, pack_kernel
from numflow.quant.layout import RowScheme
from numflow.quant.scheme import checked_weights
from numflow.quant.search import check_magnitude, checked_importance

STAGE = 64 << 20  # bytes of weights that are on the device at a time


class Quantiser:
    """A function from weights to rows, for `numflow.quant.encode`.

    It opens a device on the first call, serves one caller at a time, and releases the device in `close`; a later call
    opens the device again. owns: whether `close` closes the device. stage: bytes of weights on the device at a time.
    """

    def __init__(self, open_it: Callable[[], Device], owns: bool = True, stage: int = STAGE):
        self._open, self._owns, self._stage, self._lock = open_it, owns, stage, threading.Lock()
        self._device: Device | None = None

    def __call__(self, x: np.ndarray, scheme: RowScheme, importance: np.ndarray | None = None,
                 name: str = "matrix") -> np.ndarray:
        """float32 [N, K] -> uint8 [N, scheme.row_bytes(K)].

        Raises:
            RequestError, FormatError: as `numflow.quant.encode`. DeviceError: no GPU, or not enough of its memory.
        """
        x = checked_weights(x, scheme, name)
        c = checked_importance(importance, x, name)
        check_magnitude(max(float(x.max()), -float(x.min())), name)
        with self._lock:
            if self._device is None:
                self._device = self._open()
            return encode(x, scheme, c, importance is None, self._device, self._stage)

    def close(self) -> None:
        """Release the device."""
        with self._lock:
            if self._device is not None and self._owns:
                self._device.close()
            self._device = None


def kernels(scheme: RowScheme) -> tuple[Kernel, Kernel, Kernel]:
    """The kernels of a scheme: the preferred parameters of blocks, the search for headers, the packing of rows."""
    return likes_kernel(scheme), search_kernel(scheme), pack_kernel(scheme)


def encode(x: np.ndarray, scheme: RowScheme, c: np.ndarray, by_block: bool, device: Device,
           stage: int = STAGE) -> np.ndarray:
    """Rows of x float32 [N, K] with importances c float32 [1 or N, K], uint8 [N, row_bytes]."""
    (n, columns), row_bytes, blocks = x.shape, scheme.row_bytes(x.shape[1]), x.shape[1] // scheme.block
    step, each = min(n, max(1, stage // (4 * columns)), MOST_BLOCKS[1]), len(c) > 1
    likes, search, pack = kernels(scheme)
    raw = np.empty((n, row_bytes), np.uint8)
    with ExitStack() as held:

        def room(nbytes: int) -> Ref:
            memory = device.alloc(nbytes)
            held.callback(device.free, memory)
            return memory.at()

        weights, importance, zeros = room(4 * step * columns), room(4 * (step if each else 1) * columns), room(
            scheme.zeros().nbytes)
        known = Blocks(*(room(size * step * blocks) for size in (4, 4, 4, 4, 8)))
        found, rows = Headers(room(2 * step), room(2 * step * blocks), room(4 * step * blocks)), room(step * row_bytes)
        device.upload(zeros, scheme.zeros())
        device.upload(importance, c[:1])
        for first in range(0, n, step):
            some = x[first:first + step]
            device.upload(weights, some)
            if each:
                device.upload(importance, c[first:first + step])
            beside = Rows(importance, columns if each else 0)
            device.launch(Launch(likes, (ceil(blocks, LIKES_WARPS), len(some), 1), (
                known, weights, beside, columns, blocks)))
            device.launch(Launch(search, (1, len(some), 1), (
                found, weights, beside, known, zeros, columns, blocks, int(by_block))))
            device.launch(Launch(pack, (ceil(row_bytes, THREADS), len(some), 1), (
                rows, weights, found, zeros, columns, blocks, row_bytes)))
            raw[first:first + step] = device.download(rows, len(some) * row_bytes).reshape(len(some), row_bytes)
    return raw
