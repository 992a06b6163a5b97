"""Compilation of all kernels before the measurements, on all cores."""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

from experiments.gpu_suite.setting import Setting
from numflow.cuda.compiler.compile import cached, folder, is_cached


def compiling(setting: Setting) -> None:
    """Compile for this GPU; on the simulator there is nothing to compile."""
    if setting.simulator:
        setting.add(what="left out: the simulator runs uncompiled kernels")
        return
    device = setting.device()
    capability = device.capability
    device.close()
    setting.add(**compile_all(capability, setting.quick))


def compile_all(capability: tuple[int, int], quick: bool = False) -> dict:
    """Compile every kernel into the cache of compiled kernels. Returns their number and the seconds.

    Raises:
        DeviceError: a kernel is not in the cache, and there is no compiler.
    """
    names = sorted(name for name, made in wanted().items() if made.runs_on(capability))[:4 if quick else None]
    missing = [name for name in names if not is_cached(wanted()[name], capability)]
    begun = time.perf_counter()
    if missing:
        count = min(len(os.sched_getaffinity(0)), len(missing))
        # New processes: a fork of a process that has used the GPU could not continue to use it.
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            for done, _ in enumerate(pool.map(_compile, missing, [capability] * len(missing), chunksize=2), 1):
                print(f"\r  {done} of {len(missing)} kernels", end="", flush=True)
        print()
    return {"capability": "{}.{}".format(*capability), "kernels": len(names), "compiled": len(missing),
            "seconds": time.perf_counter() - begun, "folder": str(folder())}


def wanted() -> dict:
    """Every kernel that the suite may launch, by name."""
    from experiments.gpu_suite import kernels
    from tests.cuda.kernels import EVERY, all_kernels

    return all_kernels(EVERY) | {made.name: made for made in (kernels._empty, kernels._eight)}


def _compile(name: str, capability: tuple[int, int]) -> None:
    cached(wanted()[name], capability)
