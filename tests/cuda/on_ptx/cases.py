"""The jobs for the PTX interpreter: op cases of the tests, decoders with every type of weights, and test functions.

A job runs on any device. On a device that only notes launches (survey.Notebook), it shows which kernels it would run.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import numpy as np

from numflow.cuda.program import Program
from numflow.cuda.weights import quantise
from numflow.lab.shapes import Shape, random_network
from numflow.learn.cases.build import Case, error, run_case
from numflow.network import WeightSource, build, choose_spec
from numflow.network.adapters.parts import AdaptedPart
from numflow.network.adapters.steps import adaptable
from numflow.network.states import matrix_states
from numflow.ops import ADAPTING, Batch, param
from numflow.quant import SCHEMES
from numflow.quant.kv import CODED
from numflow.quant.layout import ROW_SCHEMES
from numflow.quant.state import STATE_TYPES
from numflow.reference.program import Program as Reference
from tests.cuda.attention_shapes import FORMS, attention_case, blocks_case, entries_case, every_bias, latent_case
from tests.cuda.kernels import APART, EVERY, GROUPED, decoder, many_rows
from tests.cuda.matrices import (
    FLOAT4,
    FLOAT8,
    QUANTISED,
    embed_case,
    experts_case,
    heads_case,
    linear_case,
    of_float4,
    of_float8,
    stored,
)
from tests.cuda.small import CASES
from tests.quant.hub import float8_rows
from tests.specs.case import load_case, memory_checkpoint

HALF, INT8, MODEL = 6e-3, 0.05, 0.2     # error bounds: float16, int8 activations, whole models (and bfloat16)
ROWS = (1, 3, 5, 9, 17, 65)             # tokens of a batch; each selects another kernel or tile size
GROUPS = (((0, 1),), ((0, 3),), ((0, 40),), ((0, 160),), ((0, 300),))
WIDTHS = ((512, 256), (2048, 256))     # of decoders: hidden and feed-forward; from 2048 on norms have 1024 threads


class Failure(Exception):
    """A result that differs from the reference."""


@dataclass(frozen=True)
class Job:
    """A job: run(device) launches kernels and raises Failure if the result is wrong.

    wgmma: the device is a Hopper GPU. tcgen05: it has compute capability 10.x. tma: it uses bulk copies. float8,
    float4: it has products of such floats.
    """

    name: str
    run: Callable
    whole: bool = False      # a test function, which cannot run on a Notebook; `kernels` says what it launches
    kernels: tuple[str, ...] = ()
    wgmma: bool = False
    tma: bool = True
    float8: bool = False
    float4: bool = False
    tcgen05: bool = False

    @property
    def flags(self) -> dict[str, bool]:
        """Arguments of a device."""
        return {name: getattr(self, name) for name in ("wgmma", "tma", "float8", "float4", "tcgen05")}


def jobs() -> Iterator[Job]:
    """All jobs."""
    for case in CASES:
        for kv_type in ("f32", "f16") if case.network.caches else ("f32",):
            bound = case.bound if kv_type == "f32" else max(case.bound, HALF)
            yield _case(f"op-{case}-{kv_type}", case, bound, activations="f32", kv_type=kv_type)
        for state_type in STATE_TYPES[1:] if matrix_states(case.network) else ():
            yield _case(f"op-{case}-states-{state_type}", case, MODEL, activations="f32", state_type=state_type)
    yield from _attention()
    for kind in (*EVERY, *APART):
        yield from _matrices(kind)
        for width, ffn in WIDTHS:
            for units in (True, False):
                yield Job(f"model-{kind}-{width}{'-units' * units}", partial(_model, kind, width, ffn, units))
    for kind in (*GROUPED, APART[0]):
        yield _case(f"experts-{kind}", replace(experts_case(kind, 64, 512, 2, 1), schedule=GROUPS), MODEL)
        case = replace(experts_case(kind, 280, 512, 2, 1), schedule=GROUPS[-1:])
        if kind not in APART:
            yield replace(_case(f"experts-{kind}-hopper", case, MODEL), wgmma=True)
    for kind in FLOAT8:
        for tma in (True, False):
            copies = "" if tma else "-copies"
            yield Job(f"linear-{kind}-float8{copies}", partial(_float8, kind), wgmma=True, tma=tma)
            yield Job(f"linear-{kind}-float8-tcgen05{copies}", partial(_float8, kind), tcgen05=True, tma=tma)
        yield Job(f"linear-{kind}-float8-mma", partial(_float8, kind), float8=True)
    for kind in FLOAT4:
        yield Job(f"linear-{kind}-float4", partial(_float4, kind), float4=True)
        for tma in (True, False):
            copies = "" if tma else "-copies"
            yield Job(f"linear-{kind}-float4-tcgen05{copies}", partial(_float4, kind), tcgen05=True, tma=tma)
    for kind in (*FLOAT8, *FLOAT4):
        yield from _few_tokens(kind)
    yield Job("model-E4M3_128-float8", partial(_model_float8, "E4M3_128"), wgmma=True)
    yield Job("model-E4M3_128-float8-tcgen05", partial(_model_float8, "E4M3_128"), tcgen05=True)
    heads = replace(heads_case("F32", 21, 256, 3, 2), schedule=(((0, 1),), ((0, 3),), ((0, 5),)))
    yield _case("heads-F32", heads, 3e-5)
    yield Job("adapters", _adapters)
    yield Job("model-long", _long)
    yield Job("model-entries", _entries)
    yield from _functions()


def _case(name: str, case, bound: float, **options) -> Job:
    return Job(name, partial(_compare, case, bound, options))


def _compare(case, bound: float, options: dict, device) -> None:
    """Run a case of the tests, and compare the result with the reference."""
    actual = run_case(case, Program, gpu=device, **options)
    if not hasattr(device, "checks"):
        return
    kinds = dict.fromkeys(("kv_k", "kv_v"), options["kv_type"]) if "kv_type" in options else {
        name: options[name] for name in ("kv_k", "kv_v") if name in options}
    own = {name: kind for name, kind in kinds.items() if kind not in ("f32", "f16")}
    expected = run_case(case, Reference, **own, state_type=options.get("state_type", "auto"))
    _judge(max(error(a, e) for a, e in zip(actual, expected, strict=True)), bound)


def _judge(worst: float, bound: float) -> None:
    if not worst < bound:
        raise Failure(f"off by {worst:.2g} of the reference, allowed {bound:g}")


def _attention() -> Iterator[Job]:
    """Attention with ordinary, wide and latent heads and every type of keys and values; few and many tokens, and
    contexts that are split into parts."""
    usual = attention_case(4, 1, 128, 128, (((0, 70),), ((0, 1), (1, 5)), ((0, 1), (1, 1)), ((0, 3), (1, 1))))
    for kind in ("f16", *CODED):
        yield _case(f"attention-{kind}", usual, HALF, kv_type=kind)
    for kind in FORMS:
        yield _case(f"attention-{kind}-f32", usual, HALF, kv_type=kind, activations="f32")
    wide, odd = (attention_case(heads, kv, k, v, (((0, 40),), ((0, 1),))) for heads, kv, k, v in (
        (4, 1, 256, 256), (4, 4, 192, 128)))
    for kind in ("f16", "q3h"):
        yield _case(f"attention-wide-{kind}", wide, HALF, kv_type=kind)
    yield _case("attention-192", odd, HALF, kv_k="q5", kv_v="f16")
    latent = latent_case(16, 576, 512, (((0, 20),), ((0, 1),)))
    for kind in ("f16", *FORMS):
        for activations in ("int8", "f32"):
            yield _case(f"attention-latent-{kind}-{activations}", latent, HALF, kv_type=kind, activations=activations)
    for kind in ("f16", *FORMS):
        for every, top_k in ((0, 0), (4, 0), (4, 4)):
            entries = entries_case(2, 512, every, top_k, (((0, 20),), ((0, 3), (1, 1)), ((0, 1), (1, 1))))
            yield _case(f"attention-entries-{kind}-{every}-{top_k}", entries, HALF, kv_type=kind)
    blocks = blocks_case(4, 2, 128, 16, 2, (((0, 50),), ((0, 3), (1, 1)), ((0, 1), (1, 1))))
    for kind in ("f16", *FORMS):
        yield _case(f"attention-blocks-{kind}", blocks, HALF, kv_type=kind)
    yield _case("attention-biases", replace(every_bias(), schedule=(((0, 40), (1, 3)), ((0, 1), (1, 1)))), HALF,
                kv_type="f16")
    narrow = attention_case(4, 1, 64, 64, (((0, 40), (1, 3)), ((0, 1), (1, 1))))
    yield _case("attention-64", narrow, HALF, kv_type="f16")
    narrowest = attention_case(4, 1, 16, 16, (((0, 40), (1, 3)), ((0, 1), (1, 1))))
    yield _case("attention-16", narrowest, HALF, kv_type="f16")
    for case in (case for case in CASES if case.name.startswith("attention-merged")):
        yield _case(f"{case.name}-half", case, HALF, kv_type="f16")


def _matrices(kind: str) -> Iterator[Job]:
    """Matrix products, embedding tables, and products by head, for one type of weights."""
    schedule, bound = tuple(((0, rows),) for rows in ROWS), INT8 if kind in QUANTISED or kind in APART else HALF * 3
    for k in (512, 2048):
        case = replace(linear_case(kind, 40, k, 1, bias=True), schedule=schedule if k == 512 else schedule[:3])
        yield _case(f"linear-{kind}-{k}", case, bound)
        if k == 512:
            few = replace(case, schedule=schedule[:3])
            yield _case(f"linear-{kind}-{k}-f32", few, 3e-5, activations="f32")
    if kind not in APART:
        case = replace(linear_case(kind, 280, 512, 1, bias=True), schedule=(((0, 65),), ((0, 150),)))
        yield replace(_case(f"linear-{kind}-hopper", case, bound), wgmma=True)
        if kind in GROUPED:
            yield replace(_case(f"linear-{kind}-copies", case, bound), wgmma=True, tma=False)
    yield Job(f"linear-{kind}-rows", partial(_many_rows, kind, bound))
    yield _case(f"embed-{kind}", embed_case(kind, 512), 1e-5)
    yield _case(f"heads-{kind}", replace(heads_case(kind, 21, 256, 3, 2), schedule=(((0, 2),), ((0, 9),))), 3e-5)


def _few_tokens(kind: str) -> Iterator[Job]:
    """Products of up to 64 tokens or routes, which have other kernels than those of 8-bit or 4-bit floats."""
    float4 = kind in FLOAT4
    options, bound = {"activations": "nvfp4" if float4 else "fp8"}, INT8 if float4 else HALF * 3
    linear = replace(linear_case(kind, 40, 512, 1, bias=True), schedule=tuple(((0, rows),) for rows in (1, 3, 9, 40)))
    experts = replace(experts_case(kind, 64, 512, 2, 1), schedule=(*GROUPS[:3], ((0, 90),)))
    for case, name in ((linear, "linear"), (experts, "experts")):
        yield replace(_case(f"{name}-{kind}-few", case, bound, **options), float8=True, float4=float4)


def _many_rows(kind: str, bound: float, device) -> None:
    """A product of few tokens by the kernel for matrices with many rows."""
    with many_rows():
        _compare(linear_case(kind, 40, 512, 9, bias=True), bound, {}, device)


def _float8(kind: str, device) -> None:
    """A product with activations in 8-bit floats, with partial tiles of rows and columns; and one with experts."""
    _compare(of_float8(linear_case(kind, 280, 640, 130, bias=True), 640), 3e-5, {"activations": "fp8"}, device)
    experts = replace(experts_case(kind, 280, 256, 2, 1), schedule=GROUPS[-1:])
    _compare(of_float8(experts, 256), 3e-5, {"activations": "fp8"}, device)


def _float4(kind: str, device) -> None:
    """A product with activations in 4-bit floats, with partial tiles of rows and columns; and one of experts."""
    case = of_float4(linear_case(kind, 280, 1088, 130, bias=True), 1088, FLOAT4[kind])
    _compare(case, 3e-5, {"activations": "nvfp4"}, device)
    experts = replace(experts_case(kind, 280, 256, 2, 1), schedule=GROUPS[-1:])
    _compare(of_float4(experts, 256, FLOAT4[kind]), 3e-5, {"activations": "nvfp4"}, device)


def _model_float8(kind: str, device) -> None:
    """A decoder of one layer with activations in 8-bit floats: a prompt of 70 tokens, then one token."""
    network, weights = decoder(Shape(1, 512, 4, 2, 256, 40, 128), kind, float8_rows)
    ids = np.random.default_rng(0).integers(0, 40, 71, dtype=np.int32)
    _compare_logits(network, weights, device, 5, (
        Batch(ids[begin:end], np.arange(begin, end), np.array([0, end - begin]), np.arange(5)[None],
              np.array([end - begin - 1])) for begin, end in ((0, 70), (70, 71))), bound=0.3, activations="fp8")


def _model(kind: str, width: int, ffn: int, units: bool, device) -> None:
    """A decoder of one layer, with fused steps: one token, a few, a prompt."""
    network, weights = decoder(Shape(1, width, 4, 2, ffn, 40, 64), kind, None if _is_made(kind) else stored)
    _compare_logits(network, weights, device, 6, (
        Batch(np.arange(sequences * count, dtype=np.int32) % 40, np.tile(np.arange(count), sequences),
              np.arange(sequences + 1) * count, np.arange(sequences)[:, None],
              np.arange(1, sequences + 1) * count - 1)
        for sequences, count in ((1, 1), (3, 1), (5, 1), (1, 12))), units=units)


def _compare_logits(network, weights, device, blocks: int, batches: Iterable[Batch], units: bool = True,
                    bound: float = MODEL, **options) -> None:
    """Run batches one after the other on the device, and if it checks results, compare logits with the reference."""
    programs: list = [Program(network, weights, gpu=device, units=units, **options)]
    if hasattr(device, "checks"):
        programs.append(Reference(network, weights, **options))
    try:
        for program in programs:
            program.reserve(blocks)
        for batch in batches:
            found = [program.run(batch) for program in programs]
            if len(found) > 1:
                _judge(error(*found), bound)
    finally:
        for program in programs:
            program.close()


def _is_made(kind: str) -> bool:
    """Whether random_checkpoint can make matrices of this type."""
    return kind in SCHEMES or kind.endswith("%") or kind in ("F16", "BF16")


def _adapters(device) -> None:
    """A decoder of one layer whose sequences use different adapters: two ranks, with and without vectors."""
    network, checkpoint = random_network(Shape(1, 128, 2, 1, 160, 40, 64), "F16")
    network, rng = adaptable(network, checkpoint), np.random.default_rng(0)
    weights = WeightSource(network, checkpoint)
    programs = [Program(network, weights, activations="f32", gpu=device)]
    if hasattr(device, "checks"):
        programs.append(Reference(network, weights))
    parts = [{param(step, "part"): [_low_rank(step, rank, vectors, rng)] for step in network.entries["main"]
              if step.op in ADAPTING} for rank, vectors in ((3, True), (9, False))]
    batch = Batch(np.array([7, 7, 39, 7, 5], np.int32), np.array([0, 0, 1, 0, 1]), np.array([0, 1, 3, 5]),
                  np.arange(3)[:, None], np.arange(5), adapters=np.array([1, -1, 0]))
    try:
        found = []
        for program in programs:
            program.reserve(3)
            for number, own in enumerate(parts):
                program.set_adapter(number, own)
            found.append(program.run(batch))
        if len(found) > 1:
            _judge(error(*found), 1e-4)
    finally:
        for program in programs:
            program.close()


def _low_rank(step, rank: int, vectors: bool, rng) -> AdaptedPart:
    """Random LoRA matrices for a step. vectors: with a bias and a scale of the base product too."""
    is_table, width = step.op == "adapt_rows", step.outputs[0].width
    a = rng.standard_normal((param(step, "rows"), rank) if is_table else (rank, step.inputs[0].width), np.float32)
    bias, scale = (rng.random(width, np.float32) if vectors and not is_table else None for _ in range(2))
    return AdaptedPart(a, 0.1 * rng.standard_normal((width, rank), np.float32), bias, scale)


def _long(device) -> None:
    """A decoder whose keys are split into parts: a prompt, then a token, where the join writes an operand."""
    network, weights = decoder(Shape(1, 512, 4, 2, 256, 40, 512), "q4", None)
    ids = np.random.default_rng(0).integers(0, 40, 301, dtype=np.int32)
    _compare_logits(network, weights, device, 5, (
        Batch(ids[begin:end], np.arange(begin, end), np.array([0, end - begin]), np.arange(5)[None],
              np.array([end - begin - 1])) for begin, end in ((0, 300), (300, 301))), block_size=64)


def _entries(device) -> None:
    """A model with entries of 4 and of 8 tokens, with and without an index: prompts in pieces, batches of sequences."""
    stored_case = load_case("deepseek_v4")
    checkpoint = memory_checkpoint(stored_case.configs[0], stored_case.tensors)
    built = build(choose_spec(checkpoint), checkpoint)
    case = Case("model-entries", built, WeightSource(built, checkpoint),
                (((0, 30), (1, 7)), ((1, 7), (0, 1)), ((0, 1), (1, 1))))
    _compare(case, 1e-4, {"activations": "f32"}, device)


def _functions() -> Iterator[Job]:
    """Test functions that launch kernels directly and check the results themselves."""
    from tests.cuda import test_join, test_moe, test_quantise, test_sample

    for name, scheme in ROW_SCHEMES.items():
        kernels = tuple(kernel.name for kernel in quantise.kernels(scheme))
        yield _function(test_quantise, f"quantise-{name}", kernels, "test_the_bytes_of_the_processor", name)
    for parts, width in test_join.SIZES:
        for kind in ("", "int8", "f16"):
            name = f"attention_join{f'_{kind}' * bool(kind)}"
            yield _function(test_join, f"{name}-{parts}", (name,), "test_parts_are_joined", parts, width, kind)
    for sizes in test_join.TWO:
        yield _function(test_join, f"attention_join_two-{sizes[0]}", ("attention_join_two",),
                        "test_parts_over_two_caches_are_joined", *sizes)
    for width in (33, 700):
        yield _function(test_sample, f"sample-{width}", ("sample",), "test_the_same_tokens_as_on_the_host", width)
    yield _function(test_sample, "sample-pieces", ("sample",), "test_a_vocabulary_in_several_pieces")
    yield _function(test_sample, "argmax", ("argmax", "sample"), "test_rows_that_are_not_numbers")
    for name, drawn in (("argmax_follow", False), ("sample_follow", True)):
        yield _function(test_sample, name.replace("_", "-"), (name,), "test_picked_tokens_are_the_next_step", drawn)
    yield _function(test_sample, "sample-borders", ("sample",), "test_random_numbers_at_the_borders_between_tokens")
    yield _function(test_sample, "sample-equal", ("sample",), "test_equal_logits")
    yield _function(test_sample, "sample-unlikely", ("sample",), "test_unlikely_and_impossible_tokens")
    for values in ((1, 1, 1, 0, 16), (150, 2, 7, 0, 16), (40, 3, 4, 2, 64), (5, 4, 40, 0, 16)):
        yield _function(test_moe, f"groups-{values[0]}", ("expert_groups",), "test_routes_in_the_order_of_experts",
                        *values)


def _function(module: ModuleType, name: str, kernels: tuple[str, ...], function: str, *values) -> Job:
    def run(device):
        before = module.Simulated
        module.Simulated = lambda index=0, seed=0: device
        try:
            getattr(module, function)(*values)
        except AssertionError as problem:
            raise Failure(f"{function}: {problem}"[:300]) from problem
        finally:
            module.Simulated = before

    return Job(name, run, True, kernels)
