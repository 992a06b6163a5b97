"""Stacks of experts as other programs quantise them, layers with their own settings, and unquantised ones."""

import json

import numpy as np
import pytest

from numflow.errors import FormatError
from numflow.formats import open_checkpoint
from tests.formats.quantised_files import bitsandbytes4, gptq, hqq, made, save
from tests.formats.quantised_more import mlx, torchao4
from tests.formats.quantised_parts import E2M1, e4m3, words
from tests.formats.test_quantised import MODULE, close, folder_of

EXPERTS = "model.layers.0.mlp.experts"


def stack_of(tmp_path, tensors, config):
    """The tensors of a checkpoint with one stack."""
    save(tmp_path / "model.safetensors", {f"{EXPERTS}.{name}": value for name, value in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(tmp_path).tensors


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj.weight"])
def test_packed_words(tmp_path, name, bits, zeros):
    rng, (e, n, k) = np.random.default_rng(bits), (3, 40, 64)
    codes, scales = rng.integers(0, 1 << bits, (e, n, k)), rng.random((e, n, 2)).astype(np.float32)
    points = rng.integers(0, 1 << bits, (e, n, 2)) if zeros else np.full((e, n, 2), 1 << bits - 1)
    tensors = {f"{name}_packed": ("I32", words(codes, bits, True)), f"{name}_scale": ("F32", scales),
               f"{name}_shape": ("I64", np.array([e, n, k]))}
    if zeros:
        packed = words(np.ascontiguousarray(points.swapaxes(1, 2)), bits, True)
        tensors[f"{name}_zero_point"] = "I32", np.ascontiguousarray(packed.swapaxes(1, 2))
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.20.0",
              "config_groups": {"a": {"weights": {"num_bits": bits}}}}
    tensor = stack_of(tmp_path, tensors, config)[f"{EXPERTS}.{name}"]
    assert not tensor.turned
    close(tensor.f32(), np.repeat(scales, 32, 2) * (codes - np.repeat(points, 32, 2)).astype(np.float32))


@pytest.mark.parametrize("zeros", [(), (3, 1, 1), (3, 40, 1)])
def test_zeros_that_are_not_packed(tmp_path, zeros):
    rng = np.random.default_rng(0)
    codes, points = rng.integers(0, 16, (3, 40, 64)), rng.integers(-8, 8, zeros or (1,))
    scales = rng.random(points.shape).astype(np.float32)
    tensors = {"up_proj_packed": ("I32", words(codes, 4)), "up_proj_scale": ("F32", scales),
               "up_proj_shape": ("I64", np.array([3, 40, 64])), "up_proj_zero_point": ("I8", points.astype(np.int8))}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    tensor = stack_of(tmp_path, tensors, config)[f"{EXPERTS}.up_proj"]
    close(tensor.f32(), (scales * (codes - 8 - points)).astype(np.float32))


def test_4_bits_of_a_table(tmp_path):
    tensors, weights, config = bitsandbytes4(np.random.default_rng(0), 3 * 40, 64)
    state = json.loads(tensors["weight.quant_state.bitsandbytes__nf4"][1].tobytes()) | {"shape": [3, 40, 64]}
    tensors["weight.quant_state.bitsandbytes__nf4"] = "U8", np.frombuffer(json.dumps(state).encode(), np.uint8)
    named = {name.replace("weight", "gate_up_proj"): value for name, value in tensors.items()}
    tensor = stack_of(tmp_path, named, config)[f"{EXPERTS}.gate_up_proj"]
    assert tensor.type.name == "NF4_ROW" and not tensor.turned
    close(tensor.f32(), weights.reshape(3, 40, 64).astype(np.float32))


@pytest.mark.parametrize("factors", [(), (3,)])
def test_nvfp4_the_other_way_round(tmp_path, factors):
    """ModelOpt stores experts of transposed stacks as [E, K / 2, N]."""
    rng, (e, n, k) = np.random.default_rng(0), (3, 40, 64)
    codes, steps = rng.integers(0, 16, (e, n, k)), rng.integers(40, 100, (e, n, k // 16)).astype(np.uint8)
    factor = rng.random(factors).astype(np.float32)
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    tensors = {"gate_up_proj": ("U8", np.ascontiguousarray(data.swapaxes(1, 2))),
               "gate_up_proj_weight_scale": ("F8_E4M3", np.ascontiguousarray(steps.swapaxes(1, 2))),
               "gate_up_proj_weight_scale_2": ("F32", factor), "gate_up_proj_input_scale": ("F32", np.float32(1))}
    tensors = stack_of(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    tensor = tensors[f"{EXPERTS}.gate_up_proj"]
    assert len(tensors) == 1 and tensor.turned and tensor.type.name == "E2M1_ROW"
    close(tensor.f32(), (E2M1[codes] * np.repeat(e4m3(steps), 16, 2) * factor.reshape(-1, 1, 1)).astype(np.float32))


def test_torchaos_4_bits(tmp_path):
    parts, weights, config = zip(*(torchao4(np.random.default_rng(i), 40, 64) for i in range(3)), strict=True)
    tensors = {name.replace("_weight", "_up_proj"): (kind, np.stack([part[name][1] for part in parts]))
               for name, (kind, _) in parts[0].items()}
    close(stack_of(tmp_path, tensors, config[0])[f"{EXPERTS}.up_proj"].f32(), np.stack(weights).astype(np.float32))


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bits", [3, 4])
def test_hqqs_words_as_floats(tmp_path, kind, bits):
    tensors, weights, config = hqq(np.random.default_rng(0), 64, 192, bits=bits)
    data = tensors["W_q"][1]
    tensors["W_q"] = kind, np.ascontiguousarray(data).view({"BF16": "<u2", "F16": "<u2", "F32": "<u4"}[kind])
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(),
          weights.astype(np.float32))


@pytest.mark.parametrize("key", ["dynamic", "extra_config"])
@pytest.mark.parametrize(("said", "own", "group"), [(7, 8, 32), (4, 8, 64), (8, 4, 48), (2, 3, 96), (4, 4, 80)])
def test_bits_and_groups_that_a_layer_has_by_itself(tmp_path, key, said, own, group):
    tensors, weights, config = gptq(np.random.default_rng(0), 64, 192, bits=own, group=group, g_idx=False)
    if key == "extra_config":
        config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    config |= {"bits": said, "group_size": 32, key: {MODULE: {"bits": own, "group_size": group}}}
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(),
          weights.astype(np.float32))


def test_groups_of_a_row_beside_blocks(tmp_path):
    """Experts may have groups along a row, while weight_block_size applies to other matrices."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 0x70, (64, 192)).astype(np.uint8), rng.random((64, 6)).astype(np.float32)
    tensors = {"weight": ("F8_E4M3", codes), "weight_scale_inv": ("F32", scales)}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(),
          (e4m3(codes) * np.repeat(scales, 32, 1)).astype(np.float32))


def test_zeros_that_have_no_meaning(tmp_path):
    tensors, _, config = made("fp8-channel", 64, 192)
    tensors["weight_zero_point"] = "I8", np.zeros((64, 1), np.int8)
    open_checkpoint(folder_of(tmp_path, tensors, config))
    tensors["weight_zero_point"][1][5] = 1
    with pytest.raises(FormatError, match="up_proj.weight_zero_point.*is not 0"):
        open_checkpoint(folder_of(tmp_path, tensors, config))


def test_a_code_that_stands_for_nothing(tmp_path):
    tensors, _, config = made("bitnet", 64, 192)
    tensors["weight"][1][3, 7] |= 0x30
    tensor = open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"]
    with pytest.raises(FormatError, match="up_proj.weight'.*has a code of 3"):
        tensor.f32()


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("mlx-4", {"group_size": 80}, "no whole groups of 80"), ("mlx-4", {"bits": 5}, "no whole groups of 64 codes of 5"),
    ("mlx-4", {"group_size": 32}, r"scales.*\[64, 3\], expected .*\[64, 6\]"), ("mlx-4", {"bits": 9}, "1 to 8 bits"),
    ("mlx-mxfp4", {"group_size": 64}, "4 bits in groups of 64, expected 4 in groups of 32, as mxfp4"),
    ("awq-gemv", {"group_size": 100}, "scale for each 100"),
    ("awq-gemv", {"group_size": 2}, "scale for each 2 of"),
])
def test_settings_that_do_not_fit(tmp_path, name, changes, said):
    tensors, _, config = made(name, 64, 192)
    with pytest.raises(FormatError, match=f"model.safetensors.*{MODULE}.*{said}"):
        open_checkpoint(folder_of(tmp_path, tensors, config | changes))


def test_tensors_that_do_not_fit(tmp_path):
    for name, part, said in [("gptq-planes-5", "qweight", "fits no codes"), ("mlx-4", "biases", "biases.*expected"),
                             ("torchao-int4", "_weight_scale", "expected"), ("bitnet", "weight_scale", "expected"),
                             ("torchao-nvfp4-tiles", "_weight_scale", "scale for each 16 of 192 columns"),
                             ("modelopt-w4a16_awq", "pre_quant_scale", r"pre_quant_scale.*\[192\]"),
                             ("awq-gemv", "qzeros", "qzeros.*expected")]:
        tensors, _, config = made(name, 64, 192)
        kind, array = tensors[part]
        tensors[part] = kind, array[:-1]
        with pytest.raises(FormatError, match=said):
            open_checkpoint(folder_of(tmp_path, tensors, config))


def test_the_method_of_mlx_may_stand_under_a_key_of_its_own(tmp_path):
    tensors, weights, config = made("mlx-4", 64, 192)
    folder_of(tmp_path, tensors, None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization": config, "model_type": "llama"}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.quantised == "MLX (quantization of config.json)" and checkpoint.config == {"model_type": "llama"}
    close(checkpoint.tensors[f"{MODULE}.weight"].f32(), weights)


def test_other_objects_under_that_key_are_none_of_mlx(tmp_path):
    tensors, weights, config = made("int8", 64, 192)
    folder_of(tmp_path, tensors, config)
    said = {"quantization_config": config, "quantization": {"qformat_weight": "int8"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    close(open_checkpoint(tmp_path).tensors[f"{MODULE}.weight"].f32(), weights)


def test_a_method_that_only_tensors_tell_is_named(tmp_path):
    tensors = {"weight._data": ("I8", np.ones((64, 192), np.int8)), "weight._scale": ("F32", np.ones((64, 1), "f4"))}
    with pytest.raises(FormatError, match=r"quantised by 'quanto' \(tensor '.*up_proj.weight._data'\), which is not"):
        open_checkpoint(folder_of(tmp_path, tensors, None))


def test_experts_of_mlx_that_lie_in_one_stack(tmp_path):
    """Each expert is a matrix with its rows of codes, scales and biases."""
    tensors, weights, config = mlx(np.random.default_rng(0), 3 * 40, 64)
    named = {f"model.layers.0.mlp.switch_mlp.up_proj.{name}": (kind, array.reshape(3, 40, -1))
             for name, (kind, array) in tensors.items()}
    save(tmp_path / "model.safetensors", named)
    (tmp_path / "config.json").write_text(json.dumps({"quantization": config}))
    found = open_checkpoint(tmp_path).tensors
    assert list(found) == [f"{EXPERTS}.{expert}.up_proj.weight" for expert in range(3)]
    for expert, tensor in enumerate(found.values()):
        assert tensor.turned
        close(tensor.f32(), weights.astype(np.float32).reshape(3, 40, 64)[expert])
