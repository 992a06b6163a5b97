"""Configuration values that few files of a family have, against transformers' results.

Most are values that the family's spec once read wrongly or not at all: layers with a window, router or state,
activations, softcaps, positions, a separate head. See configs_variants.py.
"""

from importlib import import_module

import pytest

from numflow import network
from numflow.network import WeightSource
from tests.specs.case import VARIANT_FOLDER, load_case, memory_checkpoint, names, relative_error, run
from tests.specs.test_families import TOLERANCE
from tests.specs.weights import values

# An odd rotary width, two lists of rotary factors, an activation behind a convolution, one of a scan, one of a gate,
# a convolution of one tap, no expert.
ON_THE_PROCESSOR = ["qwen3_next_odd", "phimoe_long", "mamba2_gelu", "minimax_gelu", "recurrent_gemma_silu",
                    "mamba2_one_tap", "qwen2_moe_no_expert"]
RUNS = [("reference", name) for name in names(VARIANT_FOLDER)] + [("cpu", name) for name in ON_THE_PROCESSOR]


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize(("executor", "name"), RUNS)
@pytest.mark.thin(8)
def test_published_numbers(executor, name, form):
    """form: index of the form of config.json: as published, or as transformers writes it today."""
    case = load_case(name, VARIANT_FOLDER)

    def salted(tensor, shape):
        return values(tensor + case.salt, shape).astype("float32")

    checkpoint = memory_checkpoint(case.configs[form], case.tensors, make=salted)
    built = network.build(network.choose_spec(checkpoint), checkpoint)
    program = import_module(f"numflow.{executor}.program").Program(
        built, WeightSource(built, checkpoint), activations="f32")
    for i, (given, kept) in enumerate(zip(case.inputs, case.rows, strict=True)):
        ids, read = given.get("decoder_ids", given["ids"]), given["ids"] if "decoder_ids" in given else None
        for key in {"logits", "hidden"} & {name.rpartition("_")[0] for name in case.expected}:
            found = run(program, ids, key, given.get("types"), read)[kept["rows"]]
            assert relative_error(found, case.expected[f"{key}_{i}"]) < TOLERANCE
    program.close()
