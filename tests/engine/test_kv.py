"""The options kv, kv_k and kv_v of `load`: which types are cached, on both executors."""

import numpy as np
import pytest

from numflow.engine.load import load
from numflow.errors import RequestError
from tests.engine.published import write_case
from tests.engine.tiny import write_checkpoint
from tests.specs.case import relative_error

IDS = list(range(1, 40))
# Attention that multiplies codes takes 14 seconds to compile; tests/ops/test_kv_types.py compares it.
ACTIVATIONS = ["f32", pytest.param("int8", marks=pytest.mark.merge)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def _logits(folder, **options):
    with load(folder, **options) as model:
        return model.logits(IDS)


@pytest.mark.parametrize("options", [
    {"backend": "reference"}, {"activations": "f32"}, pytest.param({"activations": "int8"}, marks=pytest.mark.merge)])
def test_kv_sets_both_and_each_may_differ(folder, options):
    exact = _logits(folder, **options)
    coarse = {name: np.abs(_logits(folder, **options, **kv) - exact).max() for name, kv in (
        ("both", {"kv": "q3h"}), ("keys", {"kv_k": "q3h"}), ("values", {"kv_v": "q3h"}),
        ("none", {"kv": "q3h", "kv_k": "f32", "kv_v": "f32"}), ("fine", {"kv": "q8"}))}
    assert coarse.pop("none") == 0
    assert 0 < coarse["fine"] < min(coarse["keys"], coarse["values"], coarse["both"])
    assert len(set(coarse.values())) == 4


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(folder, activations):
    options = {"kv": "q4", "activations": activations}
    whole = _logits(folder, chunk=64, **options)
    np.testing.assert_array_equal(_logits(folder, chunk=7, threads=2, **options), whole)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_blocks"])
@pytest.mark.parametrize("kv", ["f16", "q8", "q3h"])
@pytest.mark.merge
def test_keys_of_an_index_have_the_type_too(tmp_path, kv, name):
    """Which keys are seen is decided by rotated codes, as the reference decides it by what they stand for."""
    write_case(name, tmp_path)
    found = _logits(tmp_path, activations="f32", kv=kv)
    assert relative_error(found, _logits(tmp_path, backend="reference", kv=kv)) < (1e-3 if kv == "f16" else 1e-4)
    np.testing.assert_array_equal(_logits(tmp_path, activations="f32", kv=kv, chunk=7, threads=2), found)


def test_types_may_be_in_capitals(folder):
    capitals, usual = (_logits(folder, backend="reference", **kv)
                       for kv in ({"kv": "Q4", "kv_v": "F16"}, {"kv": "q4", "kv_v": "f16"}))
    np.testing.assert_array_equal(capitals, usual)


def test_a_cache_of_few_bits_takes_less_memory(folder):
    size = {}
    for kv in ("f32", "q4", "q2"):
        with load(folder, kv=kv, activations="f32") as model:
            size[kv] = model.program.block_bytes
    assert size["q2"] < size["q4"] < size["f32"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_unknown_type_is_refused(folder, backend):
    with pytest.raises(RequestError, match="kv_v should be one of auto, f32, f16, bf16, q8, .*q3h, q3, q2, is 'q7'"):
        load(folder, backend=backend, kv_v="q7")
