"""GGML's grid types with a code per weight: the bits of the form with indices, in more memory."""

import numpy as np
import pytest

import numflow
from numflow.cpu import estimate
from numflow.cpu.program import Program
from numflow.cpu.weights.layout import SPREAD, scheme_of
from numflow.cpu.weights.pack import pack
from numflow.errors import RequestError
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch
from numflow.quant.grids import GRIDS
from numflow.quant.stored import STORED
from tests.cpu.matrices import activations, run_linear, stored

# Codes of 2, 3 and 4 bits; scales by 16 and by 32, and with a sign.
_MAIN = ("IQ1_S", "IQ2_S", "IQ3_XXS")
KINDS = [pytest.param(kind, marks=[] if kind in _MAIN else [pytest.mark.slow]) for kind in GRIDS]
SHAPE = Shape(2, 256, 4, 2, 512, 97, 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.merge
def test_the_bits_are_those_of_indices(kind):
    for groups, columns in ((1, 512), (3, 256)):
        raw = stored(kind, 45, columns, groups)
        indices, codes = pack(raw), pack(raw, threads=2, spread=True)
        assert codes.kind == indices.kind + SPREAD and codes.type == kind
        assert codes.scheme.bits <= 8 * codes.nbytes / (codes.groups * codes.group_tiles * 16 * columns) \
            <= codes.scheme.bits + 0.4375
        for mode in ("int8", "f32") if groups == 1 else ():
            for tokens in (1, 33):
                x = activations(tokens, columns)
                np.testing.assert_array_equal(run_linear(codes, x, mode), run_linear(indices, x, mode))


def logits(kind, **options):
    """(logits of a small decoder with matrices of this type, bytes of its weights)."""
    network, checkpoint = random_network(SHAPE, kind)
    program = Program(network, WeightSource(network, checkpoint), threads=2, **options)
    program.reserve(1)
    each = np.arange(7, dtype=np.int32)
    y = program.run(Batch(each + 3, each, np.array([0, 7], np.int32), np.zeros((1, 1), np.int32), each))
    found = y, program.weights_bytes
    program.close()
    return found


@pytest.mark.merge
def test_a_model_has_the_same_logits(monkeypatch):
    small, nbytes = logits("IQ2_S")  # auto: too small to matter
    fast, more = logits("IQ2_S", iq="fast")
    np.testing.assert_array_equal(small, fast)
    assert 1.2 * nbytes < more < 1.35 * nbytes
    monkeypatch.setattr(estimate, "_LARGE", 1)
    assert logits("IQ2_S", iq="compact")[1] == nbytes and logits("IQ2_S")[1] == more


@pytest.mark.merge
def test_a_program_beside_another_has_its_form():
    network, checkpoint = random_network(SHAPE, "IQ2_S")
    source = WeightSource(network, checkpoint)
    first = Program(network, source, threads=1, iq="fast")
    second = Program(network, source, threads=1, beside=first)
    assert second.weights_bytes < first.weights_bytes / 2, (second.weights_bytes, first.weights_bytes)
    second.close()
    first.close()


@pytest.mark.parametrize(("free", "devices", "pays"), [(2.01, 1, True), (1.99, 1, False), (2.01, 2, False),
                                                       (4.01, 2, True), (None, 1, False)])
def test_auto_takes_at_most_half_of_the_free_memory(free, devices, pays, monkeypatch):
    network, _ = random_network(SHAPE, "IQ3_S")
    needed = sum(estimate.weight_bytes(weight, True) for weight in network.weights.values() if len(weight.shape) > 1)
    monkeypatch.setattr(estimate, "_LARGE", 1)
    monkeypatch.setattr(estimate, "free_memory", lambda: None if free is None else int(free * needed))
    assert estimate.spread_pays(network, devices) == pays


def test_other_types_have_one_form(monkeypatch):
    monkeypatch.setattr(estimate, "_LARGE", 0)
    monkeypatch.setattr(estimate, "free_memory", lambda: 1 << 40)
    assert all(scheme_of(type_.kind, True) == scheme_of(type_.kind, False) for name, type_ in STORED.items()
               if name not in GRIDS)
    monkeypatch.setattr(estimate, "_LARGE", 1)
    assert not estimate.spread_pays(random_network(SHAPE, "Q4_K")[0])


def test_the_option_is_checked(tmp_path):
    with pytest.raises(RequestError, match="iq"):
        numflow.load(tmp_path, iq="small")
