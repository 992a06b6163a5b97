"""Matrices with outliers: quantised codes and a sparse matrix, for few tokens, prompts, experts and tables."""

from dataclasses import replace

import numpy as np
import pytest

from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Launch, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.estimate import weight_bytes
from numflow.cuda.program import Program
from numflow.cuda.survey import Notebook
from numflow.cuda.weights.outliers import slots_of
from numflow.cuda.weights.pack import upload
from numflow.formats.types import tensor_type, to_f32
from numflow.lab.shapes import Shape, random_network
from numflow.learn.cases.build import CaseBuilder as Builder
from numflow.learn.cases.build import error, run_case
from numflow.network import WeightSource
from numflow.network.weights.columns import stored_columns
from numflow.network.weights.source import RawMatrix
from numflow.ops import Batch, Part, Weight
from numflow.quant import encode, find
from numflow.quant.apart import take_apart
from numflow.reference.program import Program as Reference
from tests.cuda.fake_driver import FakeDriver, fake_binary
from tests.cuda.matrices import Stored, embed_case, experts_case, linear_case, stored, stored_as, values
from tests.partition.plans import placed, run

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
KIND = "q3h+2%"


def cut(raw: RawMatrix, begin: int, end: int) -> RawMatrix:
    """The columns of a matrix with outliers that a plan assigns to one device."""
    base, outliers = take_apart(raw.rows, find(raw.type), raw.shape[1])
    kind = find(raw.type).base.name
    return RawMatrix(raw.name, kind, stored_columns(base, tensor_type(kind), raw.shape[1], begin, end),
                     (raw.shape[0], end - begin), raw.groups, outliers.between(begin, end))


class Cut(Stored):
    """FakeWeights with a matrix of which only some columns are stored."""

    def __init__(self, other, matrices, shape, columns):
        super().__init__(other, matrices)
        self._shape, self._columns = shape, columns

    def raw(self, name):
        return cut(RawMatrix(name, *self.matrices[name], self._shape), *self._columns) if name in self.matrices else (
            super().raw(name))


def cut_case(kind, n, k, columns, tokens):
    """linear_case with some columns of a matrix [n, k]."""
    begin, end = columns
    case, rows = linear_case("F16", n, end - begin, tokens), stored(kind, n, k)
    (name,) = case.weights.matrices
    case.weights.arrays[name] = np.ascontiguousarray(values(kind, rows, k)[:, begin:end])
    made = stored_as(case, {name: (kind, rows)})
    return replace(made, weights=Cut(case.weights, made.weights.matrices, (n, k), columns))


def rounded(case, kind, k):
    """The expected product with int8 activations: the base matrix times rounded x, plus the outliers times unrounded
    x."""
    table = next(a for name, a in case.weights.arrays.items() if name.startswith("table"))
    tokens = case.runs(64)[0].batch.tokens
    x = table[tokens][:, :k].reshape(len(tokens), k // 32, 32)
    scale = np.abs(x).max(2, keepdims=True) / np.float32(127)
    x, near = x.reshape(-1, k), (np.rint(x / scale) * scale).reshape(-1, k)
    ((_, (_, rows)),) = case.weights.matrices.items()
    base, outliers = take_apart(rows, find(kind), k)
    apart = outliers.add_to(np.zeros((len(base), k), np.float32))
    return (near @ values(find(kind).base.name, np.ascontiguousarray(base), k).T + x @ apart.T).astype(np.float32)


@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    (KIND, 21, 256, 1), (KIND, 5, 256, 3), ("q2+5%", 19, 512, 4), ("q4+0.5%", 3, 1312, 1), ("q8+0.1%", 6, 96, 2),
    ("q3h_b64t1+2%", 5, 256, 3)])
@pytest.mark.thin(3)
def test_few_tokens(kind, n, k, tokens):
    case = linear_case(kind, n, k, tokens)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1))
    expected = rounded(case, kind, k)
    assert error(actual, expected) < 2e-5
    ((name, (_, rows)),) = case.weights.matrices.items()
    base, _ = take_apart(rows, find(kind), k)
    alone = stored_as(case, {name: (find(kind).base.name, np.ascontiguousarray(base))})
    assert error(run_case(alone, Program, gpu=Simulated())[0], expected) > 0.05


@pytest.mark.parametrize("tokens", [2, pytest.param(11, marks=pytest.mark.slow)])
def test_float32_activations(tokens):
    """Exact for any number of tokens; more than 8 need a second tile."""
    case = linear_case(KIND, 18, 128, tokens, bias=True)
    (actual,) = run_case(case, Program, activations="f32", gpu=Simulated(seed=2))
    assert error(actual, run_case(case, Reference)[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "k", "tokens"), [
    (KIND, 20, 256, 5), ("q4+5%", 130, 32 * 33, 9), ("q6+2%", 7, 64, 40), ("q2+5%", 20, 96, 70), (KIND, 9, 64, 130),
    ("q3h_b64t1+2%", 20, 256, 9)])
def test_tensor_cores(kind, n, k, tokens):
    """Tiles of 16, 64 and 128 tokens; columns in parts."""
    case = linear_case(kind, n, k, tokens, bias=True)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=3))
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


@pytest.mark.parametrize("columns", [(0, 256), (64, 128), (192, 256)])
def test_columns_cut_out(columns):
    """Rows have different numbers of outliers."""
    case = cut_case(KIND, 20, 256, columns, 2)
    (actual,) = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    assert error(actual, run_case(case, Reference)[0]) < 1e-5


@pytest.mark.slow
def test_columns_cut_out_on_tensor_cores():
    case = cut_case(KIND, 20, 256, (64, 192), 9)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1))
    assert error(actual, run_case(case, Reference)[0]) < 4e-3


def test_slots_rise_and_none_are_lost():
    raw = RawMatrix("w", KIND, stored(KIND, 30, 256), (30, 256))
    part = cut(raw, 64, 128)
    slots = slots_of(part.outliers)
    assert (np.diff((slots & 0xFFFF).astype(int), axis=1) >= 0).all()
    found = np.zeros((30, 64), np.float32)
    np.add.at(found, (np.arange(30)[:, None], slots & 0xFFFF), (slots & np.uint32(0xFFFF0000)).view(np.float32))
    np.testing.assert_array_equal(found, part.outliers.add_to(np.zeros((30, 64), np.float32)))
    assert (found != 0).sum(1).max() == slots.shape[1] < take_apart(raw.rows, find(KIND), 256)[1].columns.shape[1]


def test_columns_without_outliers_are_a_plain_matrix():
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    x[:, 3:13] *= 100
    raw = RawMatrix("w", KIND, encode(x, find(KIND), threads=1), (4, 256))
    matrix = upload(cut(raw, 64, 128), Simulated())
    assert (matrix.kind, matrix.outliers, "outliers" in matrix.parts) == ("q3h", 0, False)
    assert upload(raw, Simulated()).outliers == 5


@pytest.mark.slow
@pytest.mark.parametrize(("first", "held"), [(0, 3), (1, 2)])
def test_experts(first, held):
    """A prompt by tiles of routes, then one token by one pass a route; some experts are on another device."""
    case = experts_case(KIND, 20, 128, experts=3, chosen=2, first=first, held=held, bias=True)
    case = replace(case, schedule=(((0, 11),), ((0, 1),)))
    found = run_case(case, Program, gpu=Simulated(seed=1)), run_case(case, Reference)
    for actual, expected, bound in zip(*found, (1e-2, 3e-2), strict=True):  # few large weights dominate the sums
        assert error(actual, expected) < bound


def test_experts_in_float32():
    case = experts_case(KIND, 18, 64, experts=3, chosen=2, first=1, held=2)
    (actual,) = run_case(case, Program, activations="f32", gpu=Simulated(seed=1))
    assert error(actual, run_case(case, Reference)[0]) < 1e-5


@pytest.mark.parametrize("host", [False, True])
def test_rows_of_a_table(host):
    case = embed_case("q6+2%", 96, held=48, first=30)
    (actual,) = run_case(case, Program, gpu=Simulated(seed=1), host_embeddings=host)
    assert error(actual, run_case(case, Reference)[0]) < 1e-6


def test_a_residual_is_added_at_once():
    b = Builder("outliers and residual")
    x, a = b.inputs(64, 20)
    product, y = b.buffer(20), b.buffer(20)
    rows = stored(KIND, 20, 64)
    name = b.weight("weight", values(KIND, rows, 64))
    b.step("linear", (x,), (product,), {"weight": name})
    b.step("add", (a, product), (y,), scale=0.5)
    case = b.case(y, (((0, 3),),))
    case = stored_as(case, {name: (KIND, rows)})
    together, alone = (run_case(case, Program, fused=fused, gpu=Simulated())[0] for fused in (True, False))
    assert error(together, alone) < 1e-5
    assert error(together, run_case(case, Reference)[0]) < 0.05


@pytest.mark.parametrize("reader", [KIND, "F16"])
def test_a_norm_whose_readers_want_both_operands(reader):
    """Blocks that compute 32 adjacent results write int8 codes and float32 rows; both readers apply the norm's
    scale."""
    b, matrices = Builder(f"both, {reader}"), {}
    x, a = b.inputs(64, 64)

    def linear(into, kind, n):
        rows = stored(kind, n, 64) if kind != "F16" else b.normal(n, 64).astype(np.float16).view(np.uint8)
        name, y = b.weight("weight", to_f32(rows, kind)), b.buffer(n)
        matrices[name] = kind, rows
        b.step("linear", (into,), (y,), {"weight": name})
        return y

    product, hidden, normed = linear(x, KIND, 64), b.buffer(64), b.buffer(64)
    b.step("add", (a, product), (hidden,), scale=0.5)
    b.step("rms_norm", (hidden,), (normed,), {"weight": b.weight("norm", 1 + 0.1 * b.normal(64))}, eps=1e-5)
    one, two, y = linear(normed, "q4", 20), linear(normed, reader, 20), b.buffer(20)
    b.step("add", (one, two), (y,))
    case = b.case(y, (((0, 3),),))
    case = stored_as(case, matrices)
    notebook = Program(case.network, case.weights, gpu=Notebook())
    assert "gemv_q3h_int8_4_norm_both_apart" in {
        work.kernel.name for work in notebook.launches(Sizes((3,) * 4, 1)) if isinstance(work, Launch)}
    together, alone = (run_case(case, Program, units=units, gpu=Simulated())[0] for units in (True, False))
    assert error(together, alone) < 1e-5


def decoder(kind, program=Program, layers=2, **options):
    """A plain decoder with random weights."""
    network, checkpoint = random_network(Shape(layers, 64, 2, 1, 96, 40, 64), kind)
    return program(network, WeightSource(network, checkpoint), **options)


@pytest.mark.slow
def test_a_decoder_by_graphs():
    """Fused steps, recorded and replayed by a fake driver, against the reference."""
    fake, logits = FakeDriver(), []
    for program in (decoder(KIND, gpu=Gpu(fake, 0, fake_binary)), decoder(KIND, gpu=Simulated(seed=1), fused=False),
                    decoder(KIND, Reference)):
        program.reserve(3)
        rng, found = np.random.default_rng(0), []
        for begin, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
            found.append(program.run(Batch(rng.integers(0, 40, count), np.arange(begin, begin + count),
                                           np.array([0, count]), np.array([[2]]), np.array([count - 1]))))
        program.close()
        logits.append(np.concatenate(found))
    assert fake.replays >= 2
    assert error(logits[0], logits[1]) < 1e-2
    assert error(logits[0], logits[2]) < 0.15


@pytest.mark.slow
def test_a_plan():
    """Matrices cut by rows and by columns over two devices, against one device."""
    network, checkpoint = random_network(Shape(1, 64, 2, 2, 128, 40, 64), KIND, fuse=False)
    logits = []
    for devices in ("0", "0&1"):
        program = placed(network, checkpoint, "cuda", devices, activations="f32", gpu="simulator")
        logits.append(run(program, output="logits", ids=[3, 9, 27]))
        program.close()
    assert np.abs(logits[0] - logits[1]).max() < 1e-5 * logits[0].std()


def test_launches_of_a_layer():
    """The same number of launches as without outliers."""
    counts = {}
    for kind in ("q3h", KIND):
        of = [decoder(kind, layers=layers, gpu=Notebook()) for layers in (2, 3)]
        counts[kind] = np.diff([len(program.launches(Sizes((1,) * 4, 40))) for program in of])[0]
        many = {work.kernel.name for work in of[0].launches(Sizes((9,) * 4, 40)) if isinstance(work, Launch)}
        assert ("gemm_q3h_16_apart" in many) == (kind == KIND)
    assert counts[KIND] == counts["q3h"]


def test_planned_bytes():
    rows = stored(KIND, 20, 256)
    matrix = upload(RawMatrix("w", KIND, rows, (20, 256)), Simulated())
    assert weight_bytes(Weight("w", (20, 256), (Part("t"),), types=(KIND,))) == matrix.nbytes
    assert matrix.nbytes < 1.3 * rows.nbytes
    x = np.random.default_rng(1).standard_normal((512, 4096)).astype(np.float32)
    raw = RawMatrix("w", "q4+1%", encode(x, find("q4+1%")), (512, 4096))
    half = Weight("w", (512, 2048), (Part("t", columns=(0, 2048)),), types=("q4+1%",))
    plain = Weight("w", (512, 2048), (Part("t", columns=(0, 2048)),), types=("q4",))
    assert weight_bytes(half) - weight_bytes(plain) == pytest.approx(slots_of(cut(raw, 0, 2048).outliers).nbytes,
                                                                     rel=0.1)


def test_inferflows_schemes_and_columns_that_make_no_units():
    """Stored with outliers and without; rows of blocks of 16 that do not fill units become floats."""
    for kind, columns, kept in (("q3h_b64t1+2%", 128, "b3h_base"), ("q4_b16+2%", 64, "b4_bytes16"),
                                ("q4_b16+2%", 80, "f32")):
        x = 0.1 * np.random.default_rng(0).standard_normal((4, columns)).astype(np.float32)
        matrix = upload(RawMatrix("w", kind, encode(x, find(kind), threads=1), (4, columns)), Simulated())
        assert (matrix.kind, matrix.type, matrix.expanded_from) == (kept, kind, kind if kept == "f32" else None)
        weight = Weight("w", (4, columns), (Part("t"),), types=(kind,))
        assert weight_bytes(weight) == pytest.approx(matrix.nbytes, abs=128)
    assert matrix.nbytes == 4 * 4 * 96
