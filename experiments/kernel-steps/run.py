"""Kernel steps: the gain of each step from a plain loop to the kernels of numflow/cpu, for a 4-bit matrix.

One thread. Prefill multiplies 512 tokens by a Q4_0 matrix of 1536 rows and 576 columns, which fits a cache; its speed
counts multiplications and additions. Decoding multiplies one token by a matrix of 65536 rows and 4096 columns (151 MB),
which is read from memory; its speed counts the bytes of the matrix. Every step computes the same product. The kernels
for AVX2 and for plain LLVM vectors run in separate processes that are restricted to these instruction sets. The limits
are measured before and after the steps; the higher values are used.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np

from numflow.lab import style

OPTIONS = {"repeat": 15}
NOISE = 1.05  # limits and steps are measured one after the other
PREFILL, DECODE = (1536, 576, 512), (65536, 4096, 1)  # rows, columns, tokens
FEATURES = "+64bit,+cx8,+cmov,+fxsr,+mmx,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt"
OTHERS = {"AVX2": ("haswell", FEATURES + ",+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"),
          "plain vectors": ("generic", "")}


def run(lab):
    from numflow.cpu.measure.roofline import measure_limits
    from numflow.cpu.simd.isa import isa

    if lab.quick:
        lab.options |= {"repeat": 1}
    repeat, before = lab.options["repeat"], measure_limits(1)
    rows = [["Plain loops, compiled by Numba", *_loops(repeat)],
            ["De-quantised float32, NumPy (BLAS)", *_elsewhere("_blas", {"OPENBLAS_NUM_THREADS": "1"}, repeat)]]
    for name, (cpu, features) in OTHERS.items():
        settings = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        rows.append([f"Dot products and tiles, {name}", *_elsewhere("_tiles", settings, repeat)])
    single = _tiles(repeat, "f32", 1)
    rows += [[f"Vectors of float32, a token at a time ({isa()})", *single],
             ["Dot products of bytes, a token at a time", *_tiles(repeat, "int8", 1)],
             ["Dot products of bytes, tiles of up to 8 tokens", *_tiles(repeat)]]
    after = measure_limits(1)
    memory, peak = max(before.read_gb_s, after.read_gb_s), max(before.int8_gop_s, after.int8_gop_s)
    for name, gop, gb in rows:
        lab.doubt(lab.quick or (gop <= NOISE * peak and gb <= NOISE * memory), f"{name}: above the machine's limit")
    lab.results |= {"rows": rows, "limits": {"read_gb_s": memory, "int8_gop_s": peak}}
    lab.text(__doc__.split("\n\n", 1)[1].replace("\n", " "))
    lab.table(["step", "prefill, GOP/s", "of int8 peak", "decoding, GB/s", "of bandwidth"],
              [[name, gop, f"{gop / peak:.0%}", gb, f"{gb / memory:.0%}"]
               for name, gop, gb in rows] + [["Limits of this machine", peak, "", memory, ""]])
    redraw(lab)


def redraw(lab):
    """The figure from results alone."""
    rows, limits = lab.results["rows"], lab.results["limits"]
    made, axes = style.figure(1, 2, (9.6, 3.6))
    for axis, column, limit, label in ((axes[0], 1, limits["int8_gop_s"], "a prompt, 10⁹ operations a second"),
                                       (axes[1], 2, limits["read_gb_s"], "one token, GB/s read")):
        axis.barh(range(len(rows)), [row[column] for row in rows], color=style.SERIES[0][0])
        for at, row in enumerate(rows):
            axis.text(row[column] + 0.01 * limit, at, f"{row[column]:.3g}", va="center", fontsize=8,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        axis.axvline(limit, color=style.SERIES[1][0], linestyle="--", linewidth=1)
        axis.text(limit * 0.99, len(rows) - 0.3, f"limit {limit:.3g}", color=style.SERIES[1][0], fontsize=8, ha="right",
                  va="center")
        axis.set(xlabel=label, yticks=range(len(rows)), yticklabels=[], ylim=(len(rows) - 0.1, -0.6))
        axis.set_xlim(0, limit * 1.12)
        axis.grid(axis="y", visible=False)
    axes[0].set_yticklabels([row[0] for row in rows])
    first, last = rows[0], rows[-1]
    lab.figure(made, "steps", f"From plain loops to tiles of bytes: a prompt {last[1] / first[1]:.0f} times, a token "
               f"{last[2] / first[2]:.0f} times as fast", "Q4_0", "1 thread", left=3.3, wspace=0.1,
               caption="Speed of each step; dashed: the limit of this machine")


def _stored(rows: int, columns: int) -> np.ndarray:
    """Q4_0 blocks of random weights, uint8 [rows, bytes]."""
    from gguf import GGMLQuantizationType, quants

    values = np.random.default_rng(0).standard_normal((min(rows, 256), columns)).astype(np.float32)
    blocks = quants.quantize(values, GGMLQuantizationType.Q4_0)
    return np.ascontiguousarray(np.resize(blocks, (rows, blocks.shape[1])))


def _activations(tokens: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((tokens, columns)).astype(np.float32)


def _speeds(time_of) -> tuple[float, float]:
    """GOP/s of the prefill and GB/s of the decoding, of a function that gives the seconds of a shape."""
    n, k, t = PREFILL
    decode = DECODE[0] * DECODE[1] // 32 * 18
    return 2 * n * k * t / time_of(*PREFILL) / 1e9, decode / time_of(*DECODE) / 1e9


def _best(fn, repeat: int) -> float:
    fn()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        fn()
        times.append(time.perf_counter() - begin)
    return min(times)


def _loops(repeat: int) -> tuple[float, float]:
    import numba

    @numba.njit
    def product(scales, codes, x, y):
        """y [T, N] of blocks of 32: scales f32 [N, K / 32], codes u8 [N, K / 32, 16], x f32 [T, K]."""
        for t in range(x.shape[0]):
            for n in range(codes.shape[0]):
                total = np.float32(0)
                for b in range(codes.shape[1]):
                    part = np.float32(0)
                    for i in range(16):
                        code = codes[n, b, i]
                        part += (np.int32(code & 15) - 8) * x[t, 32 * b + i]
                        part += (np.int32(code >> 4) - 8) * x[t, 32 * b + 16 + i]
                    total += part * scales[n, b]
                y[t, n] = total

    def time_of(n, k, t):
        blocks = _stored(n, k).reshape(n, k // 32, 18)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0].astype(np.float32)
        codes, x = np.ascontiguousarray(blocks[:, :, 2:]), _activations(min(t, 8), k)
        y = np.empty((len(x), n), np.float32)
        return _best(lambda: product(scales, codes, x, y), min(repeat, 3)) * t / len(x)

    return _speeds(time_of)


def _blas(repeat: int) -> tuple[float, float]:
    """Speeds of de-quantisation and BLAS. Bytes count as in the 4-bit matrix; the float32 matrix that is read has 7
    times as many."""
    from numflow.formats.types import to_f32

    def time_of(n, k, t):
        weight, x = to_f32(_stored(n, k), "Q4_0"), _activations(t, k)
        return _best(lambda: x @ weight.T, repeat)

    return _speeds(time_of)


def _tiles(repeat: int, mode: str = "int8", at_once: int = 0) -> tuple[float, float]:
    """numflow's kernels; with `at_once` tokens in a call, all of them if 0."""
    from types import SimpleNamespace

    from numflow.cpu.linear.activations import bind_operand, operand_bytes
    from numflow.cpu.linear.linear import linear
    from numflow.cpu.memory.buffers import aligned
    from numflow.cpu.runtime.kernel import HEADER_FIELDS, N_TOKENS
    from numflow.cpu.weights.pack import pack
    from numflow.network.weights.source import RawMatrix
    from numflow.ops import Step, View

    def time_of(n, k, t):
        rows = _stored(n, k)
        packed, count = pack(RawMatrix("w", "Q4_0", rows, (n, k))), at_once or t
        header = aligned(HEADER_FIELDS, np.int64)
        x, y = aligned((count, k), np.float32), aligned((count, n), np.float32)
        x[:], header[N_TOKENS] = _activations(count, k), count
        memory = [aligned(size, np.uint8) for size in operand_bytes(count, k, int(mode == "int8"))]

        def operand(view, pieces, maker):
            addresses = [part.ctypes.data for part in memory]
            call = bind_operand(header.ctypes.data, N_TOKENS, x.ctypes.data, k, k, addresses[0],
                                addresses[1] if pieces else 0, pieces)
            return SimpleNamespace(x=addresses[0], aux=addresses[1], calls=(call,))

        ctx = SimpleNamespace(packed=lambda name: packed, activations=mode, network=None, operand=operand,
                              header=header.ctypes.data, rows=lambda view: N_TOKENS, n_threads=1,
                              scratch=lambda name, nbytes: aligned(nbytes, np.uint8),
                              strided=lambda name, view: {name: y.ctypes.data, f"{name}_stride": n})
        calls = linear(Step("linear", (View("x", 0, k),), (View("y", 0, n),), {"weight": "w"}), ctx)
        return _best(lambda: [call() for call in calls], repeat) * t / count

    return _speeds(time_of)


def _elsewhere(function: str, settings: dict[str, str], repeat: int) -> tuple[float, float]:
    """What a function of this file returns in a process with these environment variables."""
    code = (f"import importlib.util, json; s = importlib.util.spec_from_file_location('steps', {__file__!r}); "
            f"m = importlib.util.module_from_spec(s); s.loader.exec_module(m); "
            f"print(json.dumps(m.{function}({repeat})))")
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))
