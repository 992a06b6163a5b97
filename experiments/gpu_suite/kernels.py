"""Speed of copies, matrix products and launches."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from experiments.gpu_suite.setting import Setting, each, seconds
from numflow.cuda.device.call import Sizes, ceil
from numflow.cuda.device.device import Device, Launch
from numflow.cuda.lang.intrinsics import block_x, thread_index
from numflow.cuda.lang.kernel import kernel
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.program import Program
from numflow.cuda.weights.pack import stored_bytes
from numflow.ops import Batch
from tests.cuda.matrices import FLOAT8, linear_case

KINDS = ("F16", "BF16", "q8", "Q8_0", "q6", "q5", "q4", "Q4_0", "Q4_K", "q3h", "q3h+0.5%", "q3",
         "q2", "E4M3_128")
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336),
          "head": (128256, 4096)}
COLD = 160 << 20  # bytes of the copies of a matrix: more than second caches hold


def copies(setting: Setting) -> None:
    """Copies within device memory, to the device and to the host."""
    device = setting.device()
    for megabytes in (1,) if setting.quick else (16, 256, 1024, 4096):
        if setting.was_tried(megabytes=megabytes):
            continue
        with setting.attempt(megabytes=megabytes):
            _copies(setting, device, megabytes)


def _copies(setting: Setting, device: Device, megabytes: int) -> None:
    size = megabytes << 20
    a, b = device.alloc(size), device.alloc(size)
    time = seconds(device, lambda to=b, source=a, n=size: device.copy(to.at(), source.at(), n))
    setting.add(what="copy on the device", megabytes=megabytes, gigabytes_per_s=2 * size / time / 1e9)
    data = np.zeros(min(size, 256 << 20), np.uint8)
    for what, work in (("upload", lambda to=a, source=data: device.upload(to.at(), source)),
                       ("download", lambda source=a, n=data.size: device.download(source.at(), n))):
        time = seconds(device, work, 3)
        setting.add(what=what, megabytes=data.size >> 20, gigabytes_per_s=data.size / time / 1e9)
    device.free(a)
    device.free(b)


def matrices(setting: Setting) -> None:
    """Every type of matrix at the shapes of an 8B model, from 1 token to a long prompt."""
    shapes = {"toy": (128, 256)} if setting.quick else SHAPES
    for kind in ("F16", "q4", "q3h+0.5%") if setting.quick else KINDS:
        for name, (n, k) in shapes.items():
            if setting.is_over:
                return
            if setting.was_tried(weights=kind, matrix=name):
                continue
            with setting.attempt(weights=kind, matrix=name):
                _matrix(setting, kind, name, n, k)
        if kind == "F16" and not setting.simulator:
            with setting.attempt(weights="torch bf16"):
                _vendor(setting, shapes)


def _matrix(setting: Setting, kind: str, name: str, n: int, k: int) -> None:
    """One matrix for each number of tokens: random values, in several copies that together exceed the caches."""
    copies = 2 if setting.quick else ceil(COLD, stored_bytes(kind, k) * n)
    case = linear_case(kind, n, k, 1, fill="repeated", copies=copies)
    device = setting.device()
    float8 = kind in FLOAT8 and device.wgmma
    program = Program(case.network, case.weights, "fp8" if float8 else "int8", gpu=device)
    names = [step.weights["weight"] for step in case.network.entries["main"] if step.op == "linear"]
    size = case.weights.raw(names[0]).rows.nbytes
    for tokens in (1, 9) if setting.quick else (1, 4, 8, 16, 64, 256, 2048):
        if setting.is_over:
            break
        program.run(_batch(tokens), output=None)
        own = device.wgmma, device.tma
        ways = {own: "", (True, False): " without TMA"} | ({} if float8 else {(False, False): " by mma.sync"})
        for way in ways if device.wgmma and tokens > 64 else (own,):
            device.wgmma, device.tma = way
            works = [work for step, calls in program.bound("main") if step.op == "linear" for call in calls
                     for work in call.launches(Sizes((tokens,) * 4, 1))]
            time = each(device, works, 2 if setting.quick else max(20 // copies, 2)) / copies
            setting.add(weights=kind + ways[way], matrix=name, n=n, k=k,
                        tokens=tokens, copies=copies, microseconds=time * 1e6, gigabytes_per_s=size / time / 1e9,
                        tflops=2 * n * k * tokens / time / 1e12, kernel=works[0].kernel.name)
        device.wgmma, device.tma = own
    program.close()


def _batch(tokens: int) -> Batch:
    return Batch(np.zeros(tokens, np.int32), np.arange(tokens), np.array([0, tokens]), np.zeros((1, 0), int),
                 np.arange(tokens))


def _vendor(setting: Setting, shapes: dict) -> None:
    """The same products by torch (cuBLAS), in bfloat16."""
    try:
        import torch
    except ImportError:
        return
    for name, (n, k) in shapes.items():
        weights = torch.randn(ceil(COLD, 2 * n * k), n, k, device="cuda", dtype=torch.bfloat16)
        for tokens in (1, 8, 64, 256, 2048):
            x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for repeat in range(2):
                begin.record()
                for turn in range(20 if repeat else 3):
                    x @ weights[turn % len(weights)].T
                end.record()
                torch.cuda.synchronize()
            time = begin.elapsed_time(end) / 20e3
            setting.add(weights="torch bf16", matrix=name, n=n, k=k, tokens=tokens, microseconds=time * 1e6,
                        gigabytes_per_s=2 * n * k / time / 1e9, tflops=2 * n * k * tokens / time / 1e12,
                        kernel="cuBLAS")


def launches(setting: Setting) -> None:
    """Time of a launch, one by one and in a CUDA graph."""
    device, count = setting.device(), 20 if setting.quick else 1000
    memory = device.alloc(1024)
    for made in (_empty, _eight):
        work, arguments = Launch(made, (1, 1, 1), (memory.at(),) * len(made.signature)), len(made.signature)
        with setting.attempt(what="launched", arguments=arguments):
            time = seconds(device, lambda w=work: [device.launch(w) for _ in range(count)], 5)
            setting.add(what="launched", arguments=arguments, microseconds=time / count * 1e6)
        for what, dependent in (("in a graph, in turn", False), ("in a graph, dependent", True)):
            if setting.was_tried(what=what, arguments=arguments) or (dependent and not getattr(device, "dependent", 0)):
                continue
            with setting.attempt(what=what, arguments=arguments), _dependent(device, dependent):
                time = each(device, [work] * (2 if setting.quick else 100), 10)
                setting.add(what=what, arguments=arguments, microseconds=time / (2 if setting.quick else 100) * 1e6)


@contextmanager
def _dependent(device: Device, wanted: bool) -> Iterator[None]:
    """Set whether launches use programmatic dependent launch, within a `with` block."""
    before, device.dependent = getattr(device, "dependent", False), wanted
    try:
        yield
    finally:
        device.dependent = before


@kernel("suite_empty", 32)
def _empty(a: f32.ptr):
    if block_x() * 32 + thread_index() == u32(99):
        a[0] = f32(0)


@kernel("suite_eight", 32)
def _eight(a: f32.ptr, b: f32.ptr, c: f32.ptr, d: f32.ptr, e: f32.ptr, f: f32.ptr, g: f32.ptr, h: f32.ptr):
    if block_x() * 32 + thread_index() == u32(99):
        a[0] = b[0] + c[0] + d[0] + e[0] + f[0] + g[0] + h[0]
