"""The command; the package's own docstring says what it needs."""

import argparse
from pathlib import Path

import experiments.gpu_suite as suite
from experiments.gpu_suite import attention, choices, hybrid, kernels, models, parity, whole
from experiments.gpu_suite.report import write
from experiments.gpu_suite.setting import Setting

PARTS = {"parity-kernels": parity.kernels, "parity-models": parity.models, "parity-fixtures": whole.fixtures,
         "parity-random": whole.random_models, "copies": kernels.copies, "launches": kernels.launches,
         "matrices": kernels.matrices, "attention": attention.decoding,
         "prompts": attention.prompts, "experts": choices.experts,
         "sampling": choices.sampling, "speed": models.speed, "fusing": models.fusing, "peer": whole.peer,
         "offload": models.offload, "several": models.several, "hybrid": hybrid.hybrid}


def main() -> None:
    """Run the parts that are asked for and have no result yet."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_suite", description=suite.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"), help="folder of results")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--simulator", action="store_true", help="without a GPU")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--compile", metavar="CC", help="only compile all kernels, for a compute capability such as 90")
    options = parser.parse_args()
    if options.compile:
        compile_all((int(options.compile[:-1]), int(options.compile[-1])))
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    setting = Setting(options.simulator, options.quick, options.out)
    for name in options.parts.split(","):
        setting.run(name, PARTS[name], options.again)
    write(options.out)


def compile_all(capability: tuple[int, int]) -> None:
    """Compile every kernel into the folder of compiled kernels."""
    from numflow.cuda.compile import cached, folder
    from tests.cuda.kernels import EVERY, all_kernels

    found = all_kernels(EVERY) | {made.name: made for made in (kernels._empty, kernels._eight)}
    for done, made in enumerate(found.values(), 1):
        cached(made, capability)
        print(f"\r{done} of {len(found)} kernels in {folder()}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
