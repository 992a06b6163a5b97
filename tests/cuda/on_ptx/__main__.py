"""Run numflow's kernels from their PTX: `python -m tests.cuda.on_ptx [PATTERN]`, or `make ptx [KERNELS=PATTERN]`.

Prints each finding with its job, then `K kernels, F findings`: the number of kernels that ran, and of findings. PATTERN
is a shell pattern of kernel names, such as `gemm_q4*`. Without a pattern, a kernel that is compiled by the tests
(tests/cuda/kernels.py) but never ran is a finding too.
"""

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from fnmatch import fnmatch

from numflow.cuda.survey import Notebook
from tests.cuda.on_ptx.cases import Failure, Job, jobs
from tests.cuda.on_ptx.device import PtxDevice
from tests.cuda.ptx.findings import Fault
from tests.shares import share


def main() -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.on_ptx", description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern of kernel names: gemm_q4*")
    parser.add_argument("--jobs", default="*", help="shell pattern of job names: linear-q4*")
    parser.add_argument("--seed", type=int, default=0, help="seed of a random order of warps; 0: the default order")
    parser.add_argument("--share", type=share, default=(0, 1), metavar="K/N", help="only every Nth job, from K on: 0/7")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    names = [job.name for job in jobs() if fnmatch(job.name, options.jobs)][options.share[0]::options.share[1]]
    ran, findings, begun = {}, 0, time.perf_counter()
    with ProcessPoolExecutor(options.processes) as pool:
        waiting = [pool.submit(run, name, options.pattern, options.seed) for name in names]
        for done, future in enumerate(as_completed(waiting), 1):
            name, kernels, found = future.result()
            for kernel, launches in kernels.items():
                ran[kernel] = ran.get(kernel, 0) + launches
            findings += len(found)
            for text in found:
                print(f"{name}: {text}", flush=True)
            if done % 50 == 0:
                seconds = time.perf_counter() - begun
                print(f"  {done} of {len(names)} jobs, {len(ran)} kernels, {seconds:.0f} s", flush=True)
    ran = {name: count for name, count in ran.items() if fnmatch(name, options.pattern)}
    if options.pattern == options.jobs == "*" and options.share[1] == 1:
        from tests.cuda.kernels import all_kernels

        missing = sorted(set(all_kernels()) - set(ran))
        findings += len(missing)
        if missing:
            print(f"{len(missing)} kernels never ran: {', '.join(missing)}")
    if not ran:
        print(f"no kernel is called {options.pattern}")
    print(f"{len(ran)} kernels, {findings} findings")
    return int(bool(findings) or not ran)


_JOBS: dict[str, Job] = {}


def run(name: str, pattern: str = "*", seed: int = 0) -> tuple[str, dict[str, int], list[str]]:
    """Run a job by its name if it launches a kernel of the pattern: (name, launches of each kernel, findings)."""
    if not _JOBS:
        _JOBS.update({job.name: job for job in jobs()})
    job = _JOBS[name]
    if pattern != "*" and not any(fnmatch(kernel, pattern) for kernel in would_launch(job)):
        return name, {}, []
    device, found = PtxDevice(seed=seed, **job.flags), []
    try:
        job.run(device)
    except (Fault, Failure) as problem:
        found.append(str(problem))
    except Exception as problem:
        found.append(f"{type(problem).__name__}: {problem}")
    found += [f"{text} ({count} times)" for text, count in sorted(device.checks.notes.items())]
    return name, dict(device.launched), found


def would_launch(job: Job) -> set[str]:
    """Names of the kernels that a job launches."""
    if job.whole:
        return set(job.kernels)
    device = Notebook(**job.flags)
    with suppress(Failure):
        job.run(device)
    return {work.kernel.name for work in device.launches}


if __name__ == "__main__":
    sys.exit(main())
