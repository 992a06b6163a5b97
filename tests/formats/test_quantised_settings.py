"""Values of a quantization_config: those of a wrong type are refused by key, even if the tensors make them redundant.
"""

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats import open_checkpoint
from tests.formats.quantised_files import fp8, made
from tests.formats.test_quantised import MODULE, close, folder_of


@pytest.mark.parametrize(("variant", "key", "values"), [
    ("gptq-4", "bits", ["4", [4], 4.0, True, 0, 17, {}]), ("gptq-4", "group_size", ["32", 0, -2, [32], 32.0, False]),
    ("gptq-act", "desc_act", ["true", 1, []]), ("gptq-4", "sym", ["no"]),
    ("gptq-4", "checkpoint_format", [2, ["gptq"]]),
    ("awq", "zero_point", ["true"]), ("awq", "modules_to_not_convert", ["lm_head", [1], {}]),
    ("fp8-block", "weight_block_size", [128, [128], [0, 128], ["128", "128"], [128, 128, 1], "128", "0x128", {}]),
    ("packed-4", "config_groups", [[], "x", 4]), ("packed-4", "ignore", ["lm_head", [None]]),
    ("packed-4", "config_groups.group_0", [[], "x", 4]), ("packed-4", "config_groups.group_0.targets", ["Linear", [4]]),
    ("packed-4", "config_groups.group_0.weights", [[], 4]),
    ("packed-4", "config_groups.group_0.weights.num_bits", ["4", [4]]),
    ("packed-4", "config_groups.group_0.weights.group_size", ["32"]),
    ("packed-4", "config_groups.group_0.weights.strategy", [1, "", "row", ["group"]]),
    ("packed-4", "config_groups.group_0.weights.type", ["whole", 4]),
    ("packed-4", "config_groups.group_0.weights.symmetric", ["yes"]),
    ("nf4", "load_in_4bit", ["true"]), ("nf4", "bnb_4bit_quant_type", [4]),
    ("nf4", "llm_int8_skip_modules", ["lm_head"]),
    ("hqq-4", "skip_modules", ["lm_head"]), ("nvfp4-modelopt", "quant_algo", [["NVFP4"]])])
def test_values_of_the_wrong_kind(tmp_path, variant, key, values):
    tensors, _, config = made(variant, 64, 192)
    for number, value in enumerate(values):
        (tmp_path / str(number)).mkdir()
        part, *path = config, *key.split(".")
        for step in path[:-1]:
            part = part[step]
        part[path[-1]] = value
        with pytest.raises(FormatError, match=rf"\(quantization_config of config.json\): {key}: expected ") as error:
            open_checkpoint(folder_of(tmp_path / str(number), tensors, config))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("said", [[16, 32], "16x32"])
def test_blocks_in_numbers_or_as_a_text(tmp_path, said):
    tensors, weights, _ = fp8(np.random.default_rng(0), 40, 80, way="block", block=(16, 32))
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "block",
                                                "block_structure": said}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(),
          weights.astype(np.float32))


def test_values_that_are_not_there(tmp_path):
    tensors, weights, config = made("gptq-4", 64, 192)
    config |= {"sym": None, "desc_act": None, "modules_to_not_convert": None}
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)


def grouped(strategy: str, **weights) -> dict:
    """Settings of compressed-tensors with kinds of scales."""
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": strategy, **weights}}}


@pytest.mark.parametrize(("variant", "weights", "scales"), [
    ("packed-4", {"strategy": "group", "group_size": 32}, (64, 3)), ("packed-4", {"strategy": "group",
                                                                                   "group_size": 32}, (64, 1)),
    ("packed-channel", {"strategy": "channel", "num_bits": 8}, (64, 2)),
    ("int8", {"strategy": "channel", "num_bits": 8}, (1, 192)),
    ("int8", {"strategy": "tensor", "num_bits": 8}, (64, 1)),
    ("int8", {"strategy": "block", "num_bits": 8, "block_structure": [32, 64]}, (2, 1))])
def test_scales_of_another_kind_than_the_configuration_says(tmp_path, variant, weights, scales):
    tensors, _, config = made(variant, 64, 192)
    kind, found = tensors["weight_scale"]
    tensors["weight_scale"] = kind, np.resize(found, scales)
    config["config_groups"] = grouped(**weights)
    with pytest.raises(FormatError, match=rf"up_proj.weight_scale.*no scales by {weights['strategy']}") as error:
        open_checkpoint(folder_of(tmp_path, tensors, config))
    assert "\n" not in str(error.value)


def test_two_kinds_of_scales(tmp_path):
    tensors, weights, config = made("packed-4", 64, 192)
    config["config_groups"] = grouped("group", group_size=32) | {"group_1": grouped("channel", num_bits=8)["group_0"]}
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)


def test_rows_of_fbgemm_have_a_scale_each(tmp_path):
    tensors, _, _ = made("fp8-channel", 64, 192)
    kind, found = tensors["weight_scale"]
    tensors["weight_scale"] = kind, np.resize(found, (64, 2))
    with pytest.raises(FormatError, match="no scales by channel"):
        open_checkpoint(folder_of(tmp_path, tensors, {"quant_method": "fbgemm_fp8"}))


@pytest.mark.parametrize(("variant", "name", "columns"), [("packed-4", "weight_packed", 12), ("gptq-4", "qzeros", 4)])
def test_words_of_fewer_bits_than_the_configuration_says(tmp_path, variant, name, columns):
    tensors, _, config = made(variant, 64, 192)
    kind, found = tensors[name]
    tensors[name] = kind, np.ascontiguousarray(found[:, :columns])
    if variant == "gptq-4":
        tensors["qweight"] = kind, tensors["qweight"][1][:12]
    with pytest.raises(FormatError, match="no .*codes of 4 bits"):
        open_checkpoint(folder_of(tmp_path, tensors, config))


@pytest.mark.parametrize(("variant", "name"), [("gptq-act", "g_idx"), ("packed-act", "weight_g_idx")])
def test_an_order_of_inputs_that_is_missing(tmp_path, variant, name):
    tensors, _, config = made(variant, 64, 192)
    del tensors[name]
    if variant == "packed-act":
        config["config_groups"] = grouped("group", group_size=32, actorder="group")
    with pytest.raises(FormatError, match=rf"needs '.*{name}' .*which is not there"):
        open_checkpoint(folder_of(tmp_path, tensors, config))


def test_numbers_of_hqq_are_one_each(tmp_path):
    tensors, _, config = made("hqq-4", 64, 192)
    tensors["axis"] = "I64", np.array([1, 1])
    with pytest.raises(FormatError, match=r"axis'?: is I64 \[2\], expected one number"):
        open_checkpoint(folder_of(tmp_path, tensors, config))
