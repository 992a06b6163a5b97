"""Per-request adapters on several devices: the sum of the devices' shares is the result of one device."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from numflow import network
from numflow.formats.adapter import Adapter
from numflow.network import WeightSource
from numflow.network.adapters.fit import fitted
from numflow.network.adapters.merge import merged
from numflow.network.adapters.steps import adaptable, parts_of
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from tests.network.test_adapters import PATH, logits_of, low_rank, own_matrices, program_of, tensor
from tests.network.test_adapters_names import in_turns, opened
from tests.partition.plans import executor, options
from tests.specs.case import load_case, memory_checkpoint

FAMILIES = ["llama_biased", "mixtral", *(pytest.param(name, marks=pytest.mark.slow)
                                         for name in ("gpt2", "phi4_mini", "gpt_oss", "qwen2_moe"))]


def adapters_of(found):
    """Three adapters with a scale each: changes of every matrix, DoRA, and replaced tensors."""
    rng, (wanted, _) = np.random.default_rng(1), own_matrices(found)
    tables = {name for name in wanted if any(word in name for word in ("embed", "wte", "wpe"))}
    flat = {name: shape for name, shape in wanted.items() if len(shape) == 2 and name not in tables}
    names = [*sorted(tables)[:1], min(flat), *(name for name in found.tensors if name.endswith(
        ("q_proj.bias", "o_proj.bias", "c_attn.bias", "c_proj.bias")))]
    offsets = {name: (tensor("v", rng.standard_normal(shape[0])), 2.0) for name, shape in flat.items()}
    saved = {name: tensor(name, rng.standard_normal(found.tensors[name].shape)) for name in names}
    return [(Adapter(PATH, "hf", {name: low_rank(name, shape) for name, shape in wanted.items()}, offsets), 0.1),
            (Adapter(PATH, "hf", {name: low_rank(name, shape, True) for name, shape in flat.items()
                                  if "expert" not in name and name != "lm_head.weight"}), 0.3),
            (Adapter(PATH, "hf", {}, replaced={name: each for name, each in saved.items() if "expert" not in name}),
             1.0)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("devices", ["0;1", "0&1", "0&1;2"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.thin(8)
def test_each_device_adds_its_share(name, devices, backend):
    case = load_case(name)
    found = memory_checkpoint(case.configs[0], case.tensors)
    spec = network.choose_spec(found)
    built = network.build(spec, found, fuse=False)
    with closing(placed(built, found, devices, backend)) as program:
        program.reserve(1, 1)
        bare = logits_of(program, case, built, -1)
        for number, (adapter, scale) in enumerate(adapters_of(found)):
            some = merged(found, spec, [(adapter, scale)])
            program.set_adapter(number, parts_of(built, found, fitted(adapter, found, spec), scale, program.shares))
            whole = network.build(spec, some)
            with closing(program_of("reference", whole, some)) as sums:
                expected = logits_of(sums, case, whole, -1)
            assert np.abs(logits_of(program, case, built, number) - expected).max() < 1e-4 * expected.std()
            assert np.array_equal(logits_of(program, case, built, -1), bare)


@pytest.mark.parametrize("devices", ["0;1", "0&1"])
@pytest.mark.merge
def test_a_block_that_layers_have_in_turns(devices):
    case, (found, spec) = load_case("zamba2_adapted"), opened("zamba2_adapted")
    adapter, sums = in_turns(found)
    built, whole = network.build(spec, found, fuse=False), network.build(spec, sums)
    with closing(placed(built, found, devices, "cpu")) as program, closing(
            program_of("reference", whole, sums)) as wanted:
        program.reserve(1, 1)
        program.set_adapter(0, parts_of(built, found, fitted(adapter, found, spec), 0.2, program.shares))
        expected = logits_of(wanted, case, whole, -1)
        assert np.abs(logits_of(program, case, built, 0) - expected).max() < 1e-4 * expected.std()


def placed(built, found, devices: str, backend: str) -> PlanProgram:
    cut = partition(built, devices, backend)
    cut = replace(cut, devices=tuple(replace(part, network=adaptable(part.network, found)) for part in cut.devices))
    return PlanProgram(cut, executor(backend), lambda part: WeightSource(part, found), **options(backend))
