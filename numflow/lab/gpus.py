"""This machine's GPUs as a Cluster: measured once with the CUDA executor's kernels and copies, then stored."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from numflow.cuda.compiler.compat import driver_version, gpu_names
from numflow.cuda.device import gpu as runtime
from numflow.cuda.device.call import ceil
from numflow.cuda.device.device import Launch, Memory, Ref
from numflow.cuda.exchange.exchange import copy_rows
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.linear.gemm import ROWS, gemm, tile_of
from numflow.cuda.linear.linear import gemv_args, gemv_kernel
from numflow.cuda.linear.parameters import Shape, bias_of, planes_of
from numflow.cuda.weights.layout import Matrix
from numflow.cuda.weights.operand import UNIT, Operand, operand_bytes
from numflow.lab.machine import kept, this_machine
from numflow.partition.cut.devices import CPU
from numflow.partition.price.hardware import Cluster, DeviceSpec, Link

_FORMAT = 1
_READ, _COLUMNS = 1 << 30, 8192     # bytes of a matrix that is larger than the caches, and its columns
_PRODUCT = 8192, 4096, 2048         # rows, columns and tokens of a product that occupies every multiprocessor
_SMALL, _LARGE = 4 << 10, 256 << 20  # bytes of copies that measure latency and bandwidth
_STEPS = 200                        # launches in a graph
_ROUNDS, _EACH = 10, 10             # timed rounds, after as many warm-up rounds; launches per round
_SAMPLE = 1 << 20                   # random float16 values that memory is filled with: zeros would take less power


def these_gpus(names: Sequence[str] = (), again: bool = False) -> Cluster:
    """This machine's GPUs as devices "0", "1", ..., and its CPU if "cpu" is among the names.

    again: measure even if measurements are stored.

    Raises:
        DeviceError: there is no driver, no GPU, or a GPU that the kernels do not support.
    """
    cards = gpu_names()
    found = kept(f"{', '.join(cards)}, driver {driver_version()}, format {_FORMAT}", lambda: measure(len(cards)), again)
    cluster = as_cluster(found, cards)
    if CPU not in names:
        return cluster
    return replace(cluster, devices={**cluster.devices, **this_machine([CPU], again).devices})


def as_cluster(figures: Mapping[str, Any], cards: Sequence[str]) -> Cluster:
    """The measurements of `measure` as a Cluster. cards: names of the GPUs."""
    devices = {str(index): DeviceSpec(name, **one) for index, (name, one) in enumerate(zip(cards, figures["gpus"]))}
    links = {tuple(ends.split(">")): Link(**values) for ends, values in figures["links"].items()}
    slowest = min(links.values(), key=lambda link: link.bandwidth)
    title = ", ".join(f"{count} x {name}" for name, count in Counter(cards).items())
    return Cluster(f"this machine with {title}", devices, slowest, links)


def measure(count: int) -> dict[str, Any]:
    """Measure the first `count` GPUs.

    Returns:
        gpus: for each, memory (free bytes after the context is created), bandwidth (bytes/s read by a product with one
        token), operations (float16 operations/s of a product with many tokens), step (seconds of a small kernel in a
        graph). links: by "a>b", also with "cpu": bandwidth (bytes/s of a large copy), latency (seconds of a small
        copy).
    """
    with ExitStack() as stack:
        devices = [stack.enter_context(closing(runtime.open_gpu(index))) for index in range(count)]
        free = [device.free_bytes() for device in devices]  # before any allocation
        return {"gpus": [{"memory": nbytes, **_card(device, min(_READ, nbytes // 4))}
                         for device, nbytes in zip(devices, free)], "links": _links(devices)}


def _card(device: runtime.Gpu, nbytes: int) -> dict[str, float]:
    """Measure one GPU. nbytes: size of the matrix that is read."""
    rows, (n, k, tokens) = max(1, nbytes // (2 * _COLUMNS)), _PRODUCT
    with closing(_Bench(device)) as bench:
        read = _seconds(device, partial(device.launch, bench.reading(rows, _COLUMNS)), _EACH)
        product = _seconds(device, partial(device.launch, bench.product(n, k, tokens)), _EACH)
        graph = device.record([bench.small()] * _STEPS)
        steps = _seconds(device, partial(device.replay, graph))
        device.drop(graph)
    return {"bandwidth": rows * _COLUMNS * 2 / read, "operations": 2.0 * n * k * tokens / product,
            "step": steps / _STEPS}


class _Bench:
    """Launches of the executor's kernels on random data."""

    def __init__(self, device):
        self.device, self.held = device, list[Memory]()
        self.sample = np.random.default_rng(0).standard_normal(_SAMPLE).astype(np.float16)

    def reading(self, rows: int, columns: int) -> Launch:
        """Launch of a float16 matrix times one token; y is the first argument."""
        x = self._filled(columns * 4, np.ones(columns, np.float32)).at()
        y, matrix = self._room(rows * 4).at(), self._matrix(rows, columns)
        made, blocks = gemv_kernel(matrix, False, 1, rows, False)
        operand = Operand("f32", x, None, columns, ())
        args = gemv_args(Rows(y, rows), operand, matrix, None, None, self._counts(1), 0, rows, 1)
        return Launch(made, (blocks, 1, 1), args)

    def product(self, rows: int, columns: int, tokens: int) -> Launch:
        """Launch of a float16 matrix times many tokens, on tensor cores; y is the first argument."""
        x_bytes, _ = operand_bytes(tokens, columns, "f16")
        x, scales = self._filled(x_bytes, self.sample).at(), self._filled(4 * tokens, np.ones(tokens, np.float32)).at()
        y, tile, matrix = self._room(4 * tokens * rows).at(), tile_of(tokens), self._matrix(rows, columns)
        shape = Shape(self._counts(tokens), field=0, n=rows, units=columns // UNIT)
        args = (Rows(y, rows), None, x, scales, planes_of(matrix), bias_of(None), shape, None, None, 0, None, 0)
        return Launch(gemm(matrix.kind, tile), (ceil(rows, ROWS), ceil(tokens, tile), 1), args)

    def small(self) -> Launch:
        """Launch of a kernel with hardly any work."""
        x, y = self._filled(512, np.ones(128, np.float32)).at(), self._room(512).at()
        return Launch(copy_rows, (1, 1, 1), (y, 128, x, 128, self._counts(1), 0, 128, 0))

    def close(self) -> None:
        """Free the memory."""
        for memory in self.held:
            self.device.free(memory)

    def _matrix(self, rows: int, columns: int) -> Matrix:
        nbytes = rows * columns * 2
        codes = self._filled(nbytes, self.sample).at()
        return Matrix("f16", "F16", (rows, columns), 1, columns, nbytes, {"codes": codes})

    def _counts(self, rows: int) -> Ref:
        return self._filled(16, np.full(4, rows, np.int32)).at()

    def _room(self, nbytes: int) -> Memory:
        self.held.append(self.device.alloc(nbytes))
        return self.held[-1]

    def _filled(self, nbytes: int, data: np.ndarray) -> Memory:
        """Memory filled with the bytes of `data`, repeated."""
        memory, data = self._room(nbytes), data.view(np.uint8)[:nbytes]
        self.device.upload(memory.at(), data)
        done = data.size
        while done < nbytes:
            more = min(done, nbytes - done)
            self.device.copy(memory.at(done), memory.at(), more)
            done += more
        return memory


def _links(devices: Sequence[runtime.Gpu]) -> dict[str, dict[str, float]]:
    """Measure copies between every two GPUs, and to and from pinned host memory."""
    found, buffers = {}, [device.alloc(_LARGE) for device in devices]
    for b, (device, buffer) in enumerate(zip(devices, buffers)):
        host = device.alloc_host(_LARGE)
        for ends, to, source in ((f"{CPU}>{b}", buffer, host), (f"{b}>{CPU}", host, buffer)):
            found[ends] = _link(device, partial(device.copy, to.at(), source.at()))
        device.free(host)
        for a, (other, other_buffer) in enumerate(zip(devices, buffers)):
            if a != b:
                found[f"{a}>{b}"] = _link(device, partial(device.fetch, buffer.at(), other, other_buffer.at()))
    return found


def _link(device: runtime.Gpu, copy: Callable[[int], None]) -> dict[str, float]:
    """Bandwidth and latency of a link. copy: queues a copy of a number of bytes on the device."""
    return {"bandwidth": _LARGE / _seconds(device, partial(copy, _LARGE)),
            "latency": _seconds(device, partial(copy, _SMALL))}


def _seconds(device: runtime.Gpu, work: Callable[[], None], each: int = 1) -> float:
    """Median time (by events) of `work`, which queues work on the device and is called `each` times per round."""
    begin, end, times = device.mark(timing=True), device.mark(timing=True), []
    for _ in range(2 * _ROUNDS):
        device.mark(begin)
        for _ in range(each):
            work()
        device.mark(end)
        times.append(device.milliseconds(begin, end) / 1e3 / each)
    return median(times[_ROUNDS:])
