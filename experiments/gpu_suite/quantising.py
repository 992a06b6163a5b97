"""Weights quantised on the device: the same bytes as on the CPU, and the time of both."""

import time

import numpy as np

from experiments.gpu_suite.setting import Setting
from numflow import quant
from numflow.cuda.weights.quantise import Quantiser
from numflow.quant.layout import ROW_SCHEMES


def quantising(setting: Setting) -> None:
    """Every scheme on normally distributed weights, some rows with blocks of very different scales; times of a second
    call."""
    n, columns = (2, 64) if setting.quick else (1024, 4096)
    rng = np.random.default_rng(0)
    x = (0.02 * rng.standard_normal((n, columns))).astype(np.float32)
    x[:n // 16, :32] *= np.float32(1e-4)
    importance = rng.random(columns, np.float32)
    device = setting.device(careful=True)
    rows_of = Quantiser(lambda: device, owns=False)
    for name in ("q3h",) if setting.quick else ROW_SCHEMES:
        for what, given in (("plain", None), ("with importances", importance)):
            if setting.is_over:
                return
            if setting.was_tried(weights=name, what=what):
                continue
            with setting.attempt(weights=name, what=what):
                found, here = rows_of(x, ROW_SCHEMES[name], given), quant.encode(x, ROW_SCHEMES[name], given)
                different = int((found != here).any(axis=1).sum())
                times = []
                for again in (() if setting.quick else (rows_of, quant.encode)):
                    begin = time.perf_counter()
                    again(x, ROW_SCHEMES[name], given)
                    times.append(time.perf_counter() - begin)
                setting.add(weights=name, what=what, rows=n, columns=columns, different_rows=different,
                            good=different == 0, **dict(zip(("seconds", "processor_seconds"), times)))
