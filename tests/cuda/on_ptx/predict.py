"""Predicted times of a model's kernels on a GPU: `python -m tests.cuda.on_ptx.predict [--weights q4 ...]`.

Predicts the kernels of one layer of an 8B model for a batch and a context, from their PTX: some blocks of each launch
run on the interpreter and are counted, and the counts are scaled to all blocks. Registers and shared memory are from
the cubin for sm_90. No GPU has confirmed these numbers. tests/cuda/ptx/model.py explains the model.
"""

import argparse
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from numflow.cuda.compiler.compile import assembled
from numflow.cuda.device.device import Launch, Memory, Order
from numflow.cuda.program import Program
from numflow.lab.shapes import find_shape
from numflow.ops import Batch
from tests.cuda.kernels import CAPABILITIES, NEWER, TENSOR, decoder
from tests.cuda.on_ptx.device import PtxDevice, assembly, digest_of, parsed
from tests.cuda.ptx.findings import Checks
from tests.cuda.ptx.lanes import Grid
from tests.cuda.ptx.machine import Machine
from tests.cuda.ptx.model import CARDS, Prediction, Resources, predict
from tests.cuda.ptx.parse import parse
from tests.cuda.ptx.timeline import USUAL, Latencies

LANES = 4096     # lanes of a launch that run
HOPPERS, BLACKWELLS = ("H200", "H100"), ("B200",)
CODES = {"RTX 4090": "fp8", "RTX 5090": "nvfp4"}  # activations with the fewest bits that a GPU has (code_gemm.py)


class Options(NamedTuple):
    """Options of a prediction.

    early: programmatic dependent launch, as from sm_90 on. wgmma: kernels for Hopper. tma: with bulk copies. lanes: of
    a launch that run. codes: the activations of CODES, else "". tcgen05: kernels for compute capability 10.x.
    latencies: of loads.
    """

    early: bool = True
    wgmma: bool = True
    lanes: int = LANES
    tma: bool = True
    codes: str = ""
    tcgen05: bool = False
    latencies: Latencies = USUAL

    @classmethod
    def for_card(cls, name: str, lanes: int = LANES) -> "Options":
        """The options for a GPU of CARDS."""
        card = CARDS[name]
        return cls(card.dependent is not None, name in HOPPERS, lanes, codes=CODES.get(name, ""),
                   tcgen05=name in BLACKWELLS, latencies=card.latencies)


ANY = Options()


class Sampling(PtxDevice):
    """A device that runs and counts some blocks from the middle of each launch. Results are ignored."""

    def __init__(self, nbytes: int, how: Options):
        super().__init__(nbytes=nbytes, wgmma=how.wgmma, tma=how.tma, float8=bool(how.codes),
                         float4=how.codes == "nvfp4", tcgen05=how.tcgen05)
        self.how = how
        self.found: list[tuple[Launch, Checks]] = []
        self.counts = False

    def alloc(self, nbytes: int) -> Memory:
        """Allocate memory filled with zeros: some kernels have a slow path for results that are not finite
        (few_gemm.py)."""
        memory = super().alloc(nbytes)
        memory.handle[:] = 0
        return memory

    def launch(self, work: Launch | Order) -> None:
        """Count a launch, after the model is loaded."""
        if isinstance(work, Order) or not self.counts:
            return
        checks = Checks(False, False, counted=True, latencies=self.how.latencies)
        kernel, total = work.kernel, int(np.prod(work.grid))
        count = min(total, max(self.how.lanes // kernel.threads // work.cluster, 1) * work.cluster)
        first = (total - count) // 2 // work.cluster * work.cluster
        grid = Grid(work.grid, kernel.threads, first, count, kernel.dynamic, work.cluster)
        values = [self._value(kind, value) for kind, value in zip(kernel.signature, work.values)]
        newer = self.how.early or kernel.target.endswith("a")
        text = parsed(kernel.name, digest_of(kernel), kernel) if newer else parse(assembly(kernel))
        Machine(text, grid, values, self.global_memory, checks, kernel.name).run()
        self.found.append((work, checks))


def layer(shape: str, weights: str, tokens: int, context: int,
          how: Options = ANY, **options) -> list[tuple[Launch, Checks]]:
    """The counted launches of one layer for a step of `tokens` sequences: those that a second layer adds."""
    one, two = (launches(shape, weights, tokens, context, layers, how, **options) for layers in (1, 2))
    names = [[work.kernel.name for work, _ in found] for found in (one, two)]
    same = next(at for at, (a, b) in enumerate(zip(*names)) if a != b)
    return two[same:same + len(two) - len(one)]


def launches(shape_name: str, weights: str, tokens: int, context: int, layers: int,
             how: Options = ANY, **options) -> list[tuple[Launch, Checks]]:
    """The counted launches of a model with `layers` layers for one step.

    context: earlier tokens of each sequence; negative: the tokens are one sequence's prompt. options: of a Program.
    """
    shape = find_shape(shape_name, layers=layers, vocabulary=256)
    network, source = decoder(shape, weights)
    device = Sampling(3 << 30, how)
    program = Program(network, source, gpu=device, **options)
    prompt, sequences = context < 0, 1 if context < 0 else tokens
    blocks = -(-(tokens if prompt else context + 1) // program.block_size)
    program.reserve(sequences * blocks)
    device.counts = True
    program.run(Batch(np.zeros(tokens, np.int32), np.arange(tokens) if prompt else np.full(tokens, context),
                      np.array([0, tokens]) if prompt else np.arange(tokens + 1),
                      np.arange(sequences * blocks).reshape(sequences, blocks), np.arange(sequences)), output=None)
    return device.found


def predicted(work: Launch, checks: Checks, card) -> Prediction:
    """The prediction for a launch on a GPU."""
    kernel = work.kernel
    capability = next(one for one in (*CAPABILITIES[1:], *NEWER, TENSOR) if kernel.runs_on(one))
    binary = assembled(kernel, assembly(kernel), capability)
    resources = Resources(binary.registers, binary.shared + kernel.dynamic, kernel.threads)
    return predict(card, resources, checks.counters[kernel.name], int(np.prod(work.grid)))


def main() -> None:
    """Print a table for each type of weights."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.on_ptx.predict", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="8b", help="of numflow/lab/shapes.toml")
    parser.add_argument("--weights", nargs="+", default=["F16", "q8", "q4", "q3h"])
    parser.add_argument("--tokens", type=int, default=1, help="sequences of a step")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", action="store_true", help="the tokens are those of one prompt")
    parser.add_argument("--activations", default="int8", choices=["int8", "fp8", "nvfp4", "f32"])
    parser.add_argument("--no-wgmma", action="store_true", help="mma.sync on Hopper too")
    parser.add_argument("--no-tma", action="store_true", help="wgmma without the copy engine and clusters")
    parser.add_argument("--lanes", type=int, default=LANES, help="lanes of a launch that run; bytes that all blocks "
                        "share are counted once for each such sample")
    parser.add_argument("--card", default="H200", choices=CARDS)
    parser.add_argument("--no-dependent", action="store_true", help="no programmatic dependent launch")
    options = parser.parse_args()
    card, context = CARDS[options.card], -1 if options.prompt else options.context
    if options.no_dependent:
        card = replace(card, dependent=None)
    how = Options.for_card(options.card, options.lanes)
    how = how._replace(early=card.dependent is not None, wgmma=how.wgmma and not options.no_wgmma,
                       tma=not options.no_tma)
    for weights in options.weights:
        found = layer(options.shape, weights, options.tokens, context, how, activations=options.activations)
        print(f"\nA layer of {options.shape} {weights}, {options.tokens} tokens, "
              f"{'a prompt' if options.prompt else f'context {context}'}, {card.name} (a prediction)\n\n"
              "| kernel | blocks | resident warps | KB in flight | MB | us | bound by | share | TFLOP/s |\n"
              "|---|---|---|---|---|---|---|---|---|")
        seconds, moved = 0.0, 0.0
        for work, checks in found:
            row = predicted(work, checks, card)
            seconds, moved = seconds + row.seconds, moved + row.bytes
            print(f"| {work.kernel.name} | {int(np.prod(work.grid))} | {row.resident} | {row.in_flight / 1024:.1f} | "
                  f"{row.bytes / 1e6:.2f} | {1e6 * row.seconds:.1f} | {row.bound_by} | {100 * row.share(card):.0f} % | "
                  f"{2e-12 * row.pairs / row.seconds:.0f} |", flush=True)
        print(f"| all | | | | {moved / 1e6:.1f} | {1e6 * seconds:.1f} | | "
              f"{100 * moved / card.bandwidth / seconds:.0f} % | |", flush=True)


if __name__ == "__main__":
    main()
