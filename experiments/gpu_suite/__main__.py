"""The command; the docstring of the package says what it needs."""

import argparse
import importlib
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import experiments.gpu_suite as suite
from experiments.gpu_suite.report import write
from experiments.gpu_suite.setting import FAULT_CODE, KILLED_S, LIMIT_S, Setting, keep, kept

# Part: module and function. A part's module is imported in the part's own process only.
PARTS = {"limits": "first.limits", "main": "first.main_kernels", "two-layers": "first.two_layers",
         "compiling": "compiling.compiling", "parity-kernels": "parity.kernels", "parity-models": "parity.models",
         "parity-fixtures": "whole.fixtures", "parity-random": "whole.random_models", "copies": "kernels.copies",
         "launches": "kernels.launches", "matrices": "kernels.matrices", "attention": "attention.decoding",
         "prompts": "attention.prompts", "experts": "choices.experts", "sampling": "choices.sampling",
         "speed": "models.speed", "fusing": "models.fusing", "peer": "whole.peer", "offload": "models.offload",
         "several": "models.several", "hybrid": "hybrid.hybrid",
         "collectives": "collectives.collectives", "counters": "counters.counters",
         "quantising": "quantising.quantising"}


# Parts of an hour with a card, what teaches most first; each stage is a command of at most eight minutes.
STAGES = (("limits", "main", "two-layers"), ("parity-kernels", "quantising"),
          ("parity-fixtures", "parity-models", "parity-random"), ("copies", "launches", "speed"),
          ("matrices", "attention", "prompts"), ("fusing", "sampling", "experts"),
          ("counters", "several", "peer", "offload", "hybrid", "collectives"))
STAGE_S, ENDS_S = 480.0, 20.0  # of a stage; of these, for a process that is ended

MOST_FAULTS = 20  # processes of a part, each of which ends with a fault of the GPU


def main() -> None:
    """Run the selected parts that have no result yet, each in a separate process."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_suite", description=suite.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"), help="folder of results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--stage", type=int, help=f"1 .. {len(STAGES)}: parts for eight minutes, with one file of "
                        "results, OUT/stage-N.json; run again, a stage continues where it stopped")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="of a part")
    parser.add_argument("--simulator", action="store_true", help="without a GPU")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--here", action="store_true", help="in this process (a fault of the GPU ends it)")
    parser.add_argument("--compile", metavar="CC", help="only compile all kernels, for a compute capability such as 90")
    options = parser.parse_args()
    if options.compile:
        if not (options.compile.isdecimal() and len(options.compile) in (2, 3)):
            parser.error(f"--compile should be a compute capability such as 90, is {options.compile!r}")
        from experiments.gpu_suite.compiling import compile_all

        compile_all((int(options.compile[:-1]), int(options.compile[-1])))
        return
    if options.stage is not None and not 1 <= options.stage <= len(STAGES):
        parser.error(f"--stage should be in 1 .. {len(STAGES)}, is {options.stage}")
    names = STAGES[options.stage - 1] if options.stage else options.parts.split(",")
    unknown = set(names) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    begun = time.perf_counter()
    for name in names:
        setting = Setting(options.simulator, options.quick, options.out, name, limit_s=options.seconds)
        if options.here:
            module, _, function = PARTS[name].partition(".")
            if setting.run(getattr(importlib.import_module(f"experiments.gpu_suite.{module}"), function)):
                sys.exit(FAULT_CODE)
        elif setting.is_done() and not options.again:
            print(f"{name}: {setting.path} exists already")
        else:
            print(f"{name}:", flush=True)
            for _ in range(MOST_FAULTS):
                if options.stage:
                    setting.limit_s = begun + STAGE_S - ENDS_S - time.perf_counter()
                    if setting.limit_s < 1:
                        print("  there is no time left in this stage: run it again", flush=True)
                        break
                if apart(setting, limit_s=min(KILLED_S, setting.limit_s + ENDS_S / 2)) != FAULT_CODE:
                    break
                print("  the GPU had a fault; another process continues after that row", flush=True)
        if options.stage:
            keep(options.out / f"stage-{options.stage}.json",
                 {"stage": options.stage, "parts": [kept(options.out / f"{part}.json") for part in names]})
    if not options.here:
        write(options.out)


def apart(setting: Setting, command: list[str] | None = None, limit_s: float = KILLED_S) -> int | None:
    """Run a part in a separate process, because a fault or an endless kernel makes the process's GPU context
    unusable.

    Returns the exit status, None if the process was killed. command: a replacement, for tests.
    """
    command = command or [sys.executable, "-m", "experiments.gpu_suite", "--here", "--parts", setting.part, "--out",
                          str(setting.out), "--seconds", str(setting.limit_s), *["--simulator"] * setting.simulator,
                          *["--quick"] * setting.quick]
    process = subprocess.Popen(command)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # where the driver does not let go of it, the others do not wait
            process.wait(10)
        setting.ended(f"killed after {limit_s:g} s")
        return None
    except KeyboardInterrupt:
        process.kill()
        raise
    else:
        if code not in (0, FAULT_CODE):
            setting.ended(f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}")
        return code


if __name__ == "__main__":
    main()
