"""Correctness: every kernel at odd shapes, and whole models, against the reference."""

import numpy as np

from experiments.gpu_suite.setting import Setting
from numflow.cuda.program import Program
from numflow.lab.shapes import Shape, random_network
from numflow.learn.cases.build import error, run_case
from numflow.learn.cases.cases import CASES
from numflow.network import WeightSource
from numflow.ops import Batch
from numflow.reference.program import Program as Reference
from tests.cuda.kernels import APART
from tests.cuda.matrices import FLOAT8, QUANTISED, embed_case, linear_case, of_float8
from tests.cuda.small import CASES as SMALL

BOUND = {"int8": 0.05, "f32": 1e-5}  # of matrices of every type; int8: rounded activations
FLOAT8_BOUND = 0.02                  # beside exact sums of 8-bit floats: tensor cores keep some 14 bits of a sum
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", *(k for k in QUANTISED if k.startswith("q")), "q3h+0.5%")


def kernels(setting: Setting) -> None:
    """The op cases, then matrices of every type for few and for many tokens."""
    cases = [case for case in SMALL if len(case.name) % 3 == 0][:8] if setting.quick else CASES
    for case in cases:
        if setting.is_over:
            return
        _compare(setting, case, case.bound, activations="f32")
    kinds = ("q4", "q3h", "q3h+0.5%") if setting.quick else ("F16", "BF16", *QUANTISED, *APART)
    for kind in kinds:
        shapes = ((6, 256, 1), (6, 256, 9)) if setting.quick else (
            (37, 256, 1), (130, 2304, 3), (513, 4096, 8), (129, 768, 9), (1000, 2816, 77), (257, 1024, 300))
        for n, k, tokens in shapes:
            if setting.is_over:
                return
            for activations in ("int8", "f32"):
                case = linear_case(kind, n, k, tokens, bias=True)
                _compare(setting, case, BOUND[activations], activations=activations)
        _compare(setting, embed_case(kind, 512), 1e-5)
    for kind in FLOAT8 if not setting.quick and setting.device().wgmma else ():
        for n, k, tokens in (1000, 2816, 77), (257, 1024, 300):
            case = of_float8(linear_case(kind, n, k, tokens, bias=True), k)
            _compare(setting, case, FLOAT8_BOUND, activations="fp8")


def _compare(setting: Setting, case, bound: float, **options) -> None:
    if setting.was_tried(case=str(case), **options):
        return
    with setting.attempt(case=str(case), **options):
        actual = run_case(case, Program, gpu=setting.device(careful=True), **options)
        worst = max(error(a, e) for a, e in zip(actual, run_case(case, Reference), strict=True))
        setting.add(case=str(case), **options, error=worst, bound=bound, good=bool(worst < bound))


def models(setting: Setting) -> None:
    """Prefill, then decoding, of plain decoders with random weights: logits against the reference."""
    toy = Shape(2, 64, 4, 2, 96, 101, 512)
    shapes = {"toy": toy} if setting.quick else {"toy": toy, "1b, 2 layers": Shape(2, 2048, 32, 8, 8192, 32000, 2048),
                                                 "8b, 1 layer": Shape(1, 4096, 32, 8, 14336, 32000, 2048)}
    for name, shape in shapes.items():
        for kind in ("F16", "q4") if setting.quick else KINDS:
            for activations in ("f32", "int8"):
                if setting.is_over:
                    return
                if setting.was_tried(model=name, weights=kind, activations=activations):
                    continue
                with setting.attempt(model=name, weights=kind, activations=activations):
                    _model(setting, name, shape, kind, activations)


def _model(setting: Setting, name: str, shape: Shape, kind: str, activations: str) -> None:
    network, checkpoint = random_network(shape, kind)
    source, length = WeightSource(network, checkpoint), 6 if setting.quick else 45
    programs = [Program(network, source, activations=activations, gpu=setting.device(careful=True)),
                Reference(network, source)]
    tokens, worst, same = np.random.default_rng(0).integers(0, shape.vocabulary, length).tolist(), 0.0, True
    for program in programs:
        program.reserve(64)
    for step in range(3):
        begin, count = (0, length) if step == 0 else (length + step - 1, 1)
        batch = Batch(np.array(tokens[begin:]), np.arange(begin, begin + count), np.array([0, count]),
                      np.arange(64)[None], np.array([count - 1]))
        a, b = (program.run(batch) for program in programs)
        worst, same = max(worst, error(a, b)), same and bool(a.argmax() == b.argmax())
        tokens.append(int(b.argmax()))
    for program in programs:
        program.close()
    bound = 5e-4 if activations == "f32" else 0.15
    setting.add(model=name, weights=kind, activations=activations, error=worst, bound=bound, same_tokens=same,
                good=worst < bound)
