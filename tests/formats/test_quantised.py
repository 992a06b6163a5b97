"""Checkpoints quantised by other programs: decoded weights of every format; errors of one line for damaged files."""

import json
import random

import numpy as np
import pytest

from numflow.cpu.weights.layout import SCHEMES
from numflow.cuda.weights import layout as cuda
from numflow.errors import FormatError, NumflowError
from numflow.formats import open_checkpoint
from numflow.formats.quantised import coded
from numflow.quant.stored import STORED
from tests.formats.quantised_files import VARIANTS, e5m2, made, packed, save
from tests.quant.small import write_model

MODULE = "model.layers.0.mlp.up_proj"
PLAIN = {"model.norm.weight": ("F32", np.ones(4, np.float32))}


def folder_of(tmp_path, tensors, config, plain=PLAIN, files=1):
    """A folder with one quantised module, in one file or with its tensors split over several."""
    named = [*({f"{MODULE}.{name}": value for name, value in tensors.items()} | plain).items()]
    if files == 1:
        save(tmp_path / "model.safetensors", dict(named))
    for i in range(files if files > 1 else 0):
        save(tmp_path / f"model-{i}.safetensors", dict(named[i::files]))
    (tmp_path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    return tmp_path


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_format_gives_the_weights_it_stands_for(tmp_path, name):
    tensors, weights, config = made(name, 64, 192)
    checkpoint = open_checkpoint(folder_of(tmp_path, tensors, config))
    assert set(checkpoint.tensors) == {f"{MODULE}.weight", *PLAIN}
    assert checkpoint.quantised and "quantization_config" not in checkpoint.config
    tensor = checkpoint.tensors[f"{MODULE}.weight"]
    close(tensor.f32(), weights)
    close(tensor.f32([5, 2]), weights[[5, 2]])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("bits", [3, 5])
def test_the_version_tells_layouts_of_equally_many_words_apart(tmp_path, bits, dense):
    tensors, weights, config = packed(np.random.default_rng(2), 20, 48, bits=bits, group=16, symmetric=False,
                                      dense=dense)
    assert tensors["weight_packed"][1].shape == (20, {3: 5, 5: 8}[bits])
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.thin(3)
def test_rows_are_made_some_at_a_time(tmp_path, name, monkeypatch):
    tensors, weights, config = made(name, 160, 64 if "whole" in name else 256, seed=1)
    monkeypatch.setattr(coded, "_AT_ONCE", 1)
    if name == "gptq-short-group":
        pytest.skip("256 is no case of it")
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)


@pytest.mark.parametrize(("name", "kind"), [
    ("mxfp4", "MXFP4"), ("packed-f16", "I4_F16_64"), ("int8-f16", "I8_F16_ROW"), ("packed-4", "I4_BF16_32"),
    ("int8", "I8_BF16_ROW"), ("packed-16", "I4_BF16_16"), ("packed-3", "I3_BF16_32"), ("gptq-4", "U4_F16_32"),
    ("gptq-2", "U2_F16_32"), ("gptq-3-act", "U3_F16_32"), ("gptq-128", "U4_F16_128"), ("gptq-whole", "U4_F16_ROW"),
    ("gptq-8", "Z8_F16_32"), ("gptq-short-group", "U4_F16_16"), ("awq-64", "U4_F16_64"),
    ("packed-zeros", "U4_BF16_64"), ("packed-8-zeros", "U8_BF16_32"), ("packed-channel-zeros", "U4_F32_ROW"),
    ("torchao-zeros", "U8_F32_ROW"), ("bnb-int8", "I8_F32_ROW"), ("fp8-block", "E4M3_128"), ("fp8-mx", "E4M3_32"),
    ("fp8-e5m2", "E5M2_ROW"), ("nf4", "NF4_64"), ("nf4-double", "NF4_64"), ("fp4", "FP4_64"), ("nvfp4", "E2M1_ROW"),
    ("nvfp4-modelopt", "E2M1_ROW"), ("hqq-64", "Z4_BF16_64"), ("hqq-8", "Z8_BF16_32"), ("hqq-1", "Z1_BF16_32"),
    ("hqq-across", "Z4_F16_ROW")])
def test_types_that_hold_a_format_exactly_are_kept(tmp_path, name, kind):
    """Memory use is at most 1.1 times the bytes of the file, on the CPU and on GPUs."""
    tensors, _, config = made(name, 64, 512 if "nvfp4" in name else 256)
    tensor = open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"]
    tensor = tensor.ordered.tensor if tensor.ordered else tensor
    assert tensor.type.name == kind
    assert tensor.raw() is tensor.raw() and tensor.raw().nbytes == tensor.nbytes
    scheme, most = STORED[kind].kind.name, 1.1 * sum(np.asarray(array).nbytes for _, array in tensors.values())
    assert 4 * sum(SCHEMES[scheme].tile_bytes(tensor.columns)) <= most
    assert name == "gptq-short-group" or 64 * cuda.SCHEMES[scheme].row_bytes(tensor.columns) <= most


@pytest.mark.parametrize(("name", "columns"), [("gptq-act", 192), ("hqq-axis-0", 192), ("int8", 200)])
def test_others_are_float32(tmp_path, name, columns):
    tensors, weights, config = made(name, 64, columns)
    tensor = open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"]
    assert tensor.type.name == "F32"
    if name == "gptq-act":  # but for its columns in the order of groups
        assert tensor.ordered.tensor.type.name == "U4_F16_32"
        close(tensor.ordered.tensor.f32(), weights[:, tensor.ordered.order])


def test_a_group_may_be_larger_than_a_row(tmp_path):
    tensors, weights, config = made("gptq-whole", 64, 192)
    folder = folder_of(tmp_path, tensors, config | {"group_size": 1 << 70})
    close(open_checkpoint(folder).tensors[f"{MODULE}.weight"].f32(), weights)


def test_the_last_group_may_be_short(tmp_path):
    tensors, weights, config = made("gptq-short-group", 64, 224)
    close(open_checkpoint(folder_of(tmp_path, tensors, config)).tensors[f"{MODULE}.weight"].f32(), weights)


def test_a_stack_of_experts_in_blocks(tmp_path):
    """NAME_blocks and NAME_scales, of a model whose unquantised experts are stored transposed."""
    tensors, weights, _ = made("mxfp4", 12, 64)
    stack = {"gate_up_proj_blocks": ("U8", tensors["weight_packed"][1].reshape(3, 4, 2, 16)),
             "gate_up_proj_scales": ("U8", tensors["weight_scale"][1].reshape(3, 4, 2)),
             "gate_up_proj_bias": ("F32", np.ones((3, 4), np.float32))}
    checkpoint = open_checkpoint(folder_of(tmp_path, stack, {"quant_method": "mxfp4"}))
    tensor = checkpoint.tensors[f"{MODULE}.gate_up_proj"]
    assert tensor.turned and tensor.type.name == "MXFP4"
    close(tensor.f32(), weights.reshape(3, 4, 64))
    assert f"{MODULE}.gate_up_proj_bias" in checkpoint.tensors


@pytest.mark.parametrize("scale", [(3, 4, 1), (3, 1, 1), (3,), (3, 2, 2)])
def test_a_stack_of_experts_of_8_bits(tmp_path, scale):
    codes = np.arange(3 * 4 * 64).astype(np.uint8).reshape(3, 4, 64) & 0x3F
    scales = np.random.default_rng(0).random(scale)
    config = {"quant_method": "fp8", "weight_block_size": [2, 32]}
    stack = {"down_proj": ("F8_E5M2", codes), "down_proj_scale": ("F32", scales.astype(np.float32))}
    tensor = open_checkpoint(folder_of(tmp_path, stack, config)).tensors[f"{MODULE}.down_proj"]
    spread = scales.reshape(3, 1, 1) if scale == (3,) else scales
    if scale == (3, 2, 2):
        spread = np.repeat(np.repeat(scales, 2, 1), 32, 2)
    close(tensor.f32(), (e5m2(codes) * spread).astype(np.float32))


def test_parts_of_a_matrix_may_lie_in_different_files(tmp_path):
    tensors, weights, config = made("gptq-act", 64, 192)
    folder = folder_of(tmp_path, tensors, config, files=3)
    close(open_checkpoint(folder).tensors[f"{MODULE}.weight"].f32(), weights)
    tensors["scales"] = ("F16", tensors["scales"][1][1:])
    with pytest.raises(FormatError, match=r"model-2.safetensors: tensor '.*up_proj.scales'"):
        open_checkpoint(folder_of(tmp_path, tensors, config, files=3))


# Damage: variant, change of (tensors, config), what the line says.

def _short(name, axis=0):
    def change(tensors, config):
        kind, array = tensors[name]
        tensors[name] = kind, np.take(array, range(array.shape[axis] - 1), axis)
    return change


def _typed(name, kind, dtype):
    def change(tensors, config):
        tensors[name] = kind, tensors[name][1].astype(dtype)
    return change


def _group(value):
    return lambda tensors, config: config.update(group_size=value)


def _without(name):
    return lambda tensors, config: tensors.pop(name)


def _index(at, value):
    def change(tensors, config):
        tensors["g_idx"][1][at] = value
    return change


def _state(**changes):
    def change(tensors, config):
        name = "weight.quant_state.bitsandbytes__nf4"
        state = json.dumps({**json.loads(tensors[name][1].tobytes()), **changes})
        tensors[name] = "U8", np.frombuffer(state.encode(), np.uint8)
    return change


DAMAGE = [
    ("gptq-4", _short("scales"), "scales.*3 groups|scales.*5 groups"),
    ("gptq-4", _short("scales", 1), "scales.*expected"),
    ("gptq-4", _short("qzeros"), "groups, but qzeros"), ("gptq-4", _short("qzeros", 1), "qzeros.*fits no codes"),
    ("gptq-4", _short("qweight"), "fits no codes"), ("gptq-4", _short("qweight", 1), "scales.*expected"),
    ("gptq-4", _group(40), "groups, expected 5: 192 inputs in groups of 40"),
    ("gptq-act", _index(7, 6), "g_idx.*groups 0 .. 6, expected 0 .. 5"),
    ("gptq-act", _index(0, -1), "g_idx.*groups -1"),
    ("gptq-4", _without("qzeros"), "needs .*qzeros"), ("gptq-4", _without("qweight"), "codes of which are not there"),
    ("gptq-4", _typed("scales", "I32", "i4"), "scales.*is I32.*expected F16 or BF16 or F32"),
    ("gptq-4", _typed("qweight", "I64", "i8"), "qweight.*is I64"),
    ("gptq-4", _typed("g_idx", "F32", "f4"), "g_idx.*is F32"),
    ("awq", _short("scales"), "scales.*5 groups, expected 6"), ("awq", _group(80), "groups of 80|expected 3"),
    ("awq", _short("scales", 1), "scales.*expected"), ("awq", _short("qzeros"), "qzeros.*expected"),
    ("packed-4", _short("weight_scale", 1), "weight_scale.*divides 192"),
    ("packed-4", _short("weight_packed", 1), "no 64 x 192"),
    ("packed-4", _without("weight_scale"), "needs .*weight_scale"),
    ("packed-4", _without("weight_shape"), "weight_shape"),
    ("packed-act", lambda tensors, _: tensors["weight_g_idx"][1].__setitem__(3, 99), "weight_g_idx.*groups 0 .. 99"),
    ("packed-zeros", _short("weight_zero_point"), "weight_zero_point.*expected"),
    ("int8", _short("weight_scale"), r"weight_scale.*\[64, 1\]"), ("int8", _without("weight_scale"), "without scales"),
    ("fp8-block", _short("weight_scale_inv", 1), "weight_scale_inv.*blocks of 128 x 128"),
    ("fp8-channel", _without("weight_scale"), "without scales"),
    ("fp8-channel", _typed("weight", "U8", "u1"), "weight"),
    ("fp8-mx", _short("weight_scale_inv"), "weight_scale_inv"), ("nvfp4", _short("weight_scale", 1), "weight_scale"),
    ("nvfp4", _without("weight_global_scale"), "needs .*weight_scale_2"),
    ("nf4", _short("weight.absmax"), "absmax.*expected"), ("nf4", _state(shape=[64, 64]), "expected 2048 bytes"),
    ("nf4", _state(shape=[1 << 70, 1 << 70]), "expected .* bytes"), ("nf4", _state(blocksize=0), "blocksize"),
    ("nf4", _state(shape="x"), "expected shape"), ("nf4", _short("weight.quant_map"), "quant_map.*16"),
    ("nf4", _without("weight.quant_state.bitsandbytes__nf4"), "quant_state"),
    ("nf4-double", _state(nested_offset=None), "nested_offset"),
    ("nf4-double", _without("weight.nested_absmax"), "nested_absmax"),
    ("bnb-int8", _short("SCB"), "SCB.*expected"),
    ("bnb-int8", lambda t, c: t.update(weight_format=("U8", np.uint8(1))), "rows"),
    ("hqq-4", _short("scale"), "scale.*expected"), ("hqq-4", _short("W_q"), "W_q.*expected"),
    ("hqq-4", lambda t, c: t.update(packing=("U8", np.frombuffer(b"5bit_u8", np.uint8))), "packing '5bit_u8'"),
    ("hqq-4", lambda t, c: t.update(quant_scale=("BOOL", np.uint8(1))), "quant_scale.*is set"),
    ("torchao", _without("_weight_scale"), "needs .*_weight_scale"),
    ("torchao", _typed("_weight_qdata", "U8", "u1"), "is U8"),
    ("torchao", lambda t, c: t.update(_weight_qdata=("I8", np.zeros((64, 0), np.int8))), "there are none"),
]


@pytest.mark.parametrize(("name", "change", "said"), DAMAGE)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, name, change, said):
    tensors, _, config = made(name, 64, 192)
    change(tensors, config)
    with pytest.raises(FormatError, match=said) as error:
        for tensor in open_checkpoint(folder_of(tmp_path, tensors, config)).tensors.values():
            tensor.f32()
    assert MODULE in str(error.value) and "model.safetensors" in str(error.value) and "\n" not in str(error.value)


# Methods.

@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("quantised"))


@pytest.fixture
def with_config(plain, tmp_path):
    """A function: the model's folder with keys added to config.json."""
    def model(**keys):
        config = json.loads((plain / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
        (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
        return tmp_path

    return model


@pytest.mark.parametrize("method", ["of tomorrow", "aqlm", "", "vptq", 7])
@pytest.mark.parametrize("place", ["quantization_config", "text_config"])
def test_an_unknown_method_is_named_beside_plain_tensors_too(with_config, method, place):
    stated = {"quant_method": method, "bits": 4}
    keys = {place: stated} if place == "quantization_config" else {place: {"quantization_config": stated}}
    said = f"'{method}'" if method and method != 7 else "a method that it does not name"
    with pytest.raises(FormatError, match=f"quantised by {said}.*quantization_config of config.json.*, which is"):
        open_checkpoint(with_config(**keys))


@pytest.mark.parametrize(("stated", "said"), [
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not read"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "of tomorrow"}}}, "'of tomorrow' is not"),
    ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
    ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ({"quant_method": "awq", "version": "marlin"}, "version 'marlin'"),
    ({"quant_method": "awq", "checkpoint_format": "llm-awq"}, "checkpoint_format 'llm-awq'"),
    ({"quant_method": "gptq", "format": "bitblas"}, "format 'bitblas'"),
    ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation 'hadamard' is not read"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
    ({"quant_method": "auto-round", "backend": "auto_round:marlin"}, "backend 'auto_round:marlin'"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:fp8", "data_type": "mx_int4"}, "'mx_int4'"),
    ({"quant_method": "auto-round", "extra_config": {"a": {"data_type": "nvfp4_v2"}}}, "data_type 'nvfp4_v2'"),
    ({"quant_method": "fp8", "fmt": "e4m3fnuz"}, "fmt 'e4m3fnuz'"),
    ({"quant_method": "bitnet", "quantization_mode": "online"}, "quantization_mode 'online'"),
    ({"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm"),
    ({"bits": 4, "group_size": 64, "mode": "mxfp6"}, "mode 'mxfp6'"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "weight.dtype 'int4'"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_group"}}},
     "qscheme 'per_group'"),
    ({"quant_method": "quark", "layer_quant_config": {"*": {"weight": [{"dtype": "uint2"}]}}}, "'uint2'"),
    ({"quant_method": "quark", "algo_config": [{"name": "rotation"}]}, "algo_config 'rotation'"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
    ({"quant_method": "modelopt", "quant_algo": "W4A4_AWQ"}, "'W4A4_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
      "quantized_layers": {"a": {"quant_algo": "INT4_AWQ"}}}, "quantized_layers.a.quant_algo 'INT4_AWQ'"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav3"}, "exllamav3"),
])
def test_a_format_that_is_not_read_is_named(with_config, stated, said):
    with pytest.raises(FormatError, match=said):
        open_checkpoint(with_config(quantization_config=stated))


@pytest.mark.parametrize("keys", [
    {"quantization_config": {"load_in_4bit": True}}, {"compression_config": {"format": "int-quantized"}},
    {"quantization_config": {"quant_method": "GPTQ", "bits": 4}}, {"quantization_config": None},
    {"quantization_config": {}}])
def test_plain_tensors_beside_a_known_method_are_plain(with_config, keys):
    assert open_checkpoint(with_config(**keys)).tensors["lm_head.weight"].type.name == "F32"


def test_the_method_may_stand_in_a_file_of_its_own(tmp_path):
    tensors, weights, config = made("gptq-v2", 64, 192)
    folder_of(tmp_path, tensors, None)
    del config["quant_method"]
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    close(checkpoint.tensors[f"{MODULE}.weight"].f32(), weights)
    assert checkpoint.quantised == "GPTQ (quantize_config.json)"
    (tmp_path / "quantize_config.json").unlink()
    tensors, weights, _ = made("nvfp4-modelopt", 64, 192)
    folder_of(tmp_path, tensors, None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    close(open_checkpoint(tmp_path).tensors[f"{MODULE}.weight"].f32(), weights)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W1"}}))
    with pytest.raises(FormatError, match="quant_algo 'W1' is not read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [5, "gptq", [1], True])
def test_what_is_no_object_is_refused(with_config, value):
    with pytest.raises(FormatError, match="quantization_config: expected an object with quant_method"):
        open_checkpoint(with_config(quantization_config=value))


def test_two_tensors_of_one_name(tmp_path):
    tensors, weights, config = made("gptq-4", 64, 192)
    with pytest.raises(FormatError, match=r"stands for '.*up_proj.weight', which is in the file too"):
        open_checkpoint(folder_of(tmp_path, tensors | {"weight": ("F32", weights)}, config))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_headers_and_configurations_at_random(tmp_path, name):
    """Random changes of types, shapes and names of tensors, values of small tensors, and configuration values."""
    rng, read = random.Random(name), 0
    for _ in range(60):
        tensors, _, config = made(name, 64, 192)
        for _ in range(rng.randint(1, 3)):
            _change(rng, tensors, config)
        try:
            for tensor in open_checkpoint(folder_of(tmp_path, tensors, config)).tensors.values():
                assert tensor.f32().size == np.prod(tensor.shape)
            read += 1
        except NumflowError as error:
            assert "\n" not in str(error)
    assert read < 60


_SIZES = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}


@pytest.mark.parametrize("axis", [0, 1])
def test_a_matrix_without_numbers(tmp_path, axis):
    name = next(name for name, (maker, _) in VARIANTS.items() if maker.__name__ == "bitsandbytes8")
    tensors, _, config = made(name, 64, 192)
    tensors = {key: (kind, np.take(array, range(0), axis) if np.ndim(array) == 2 or (axis == 0 and np.ndim(array))
                     else array) for key, (kind, array) in tensors.items()}
    with pytest.raises(FormatError, match=r"stands for a matrix of \[(0, 192|64, 0)\], which has no numbers"):
        open_checkpoint(folder_of(tmp_path, tensors, config))


def test_codes_that_do_not_pass_from_word_to_word(tmp_path):
    """Six 5-bit codes per word, without a g_idx that tells the number of inputs."""
    rng = np.random.default_rng(0)
    tensors = {"qweight": ("I32", rng.integers(0, 1 << 30, (48, 64)).astype(np.int32)),
               "qzeros": ("I32", rng.integers(0, 1 << 30, (6, 11)).astype(np.int32)),
               "scales": ("F16", np.full((6, 64), 0.5, np.float16))}
    folder_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 5, "group_size": 48})
    (weight,) = (x for name, x in open_checkpoint(tmp_path).tensors.items() if x.f32().ndim == 2)
    code, zero = (int(tensors[name][1][0, 0]) & 31 for name in ("qweight", "qzeros"))
    assert weight.shape == (64, 288) and weight.f32()[0, 0] == 0.5 * (code - zero - 1)


def _change(rng, tensors, config):
    if not tensors:
        return
    name = rng.choice(sorted(tensors))
    kind, array = tensors[name]
    data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    way = rng.randrange(5)
    if way == 0:
        del tensors[name]
    elif way == 1:
        other = rng.choice([other for other, size in _SIZES.items() if data.size % size == 0])
        tensors[name] = other, data.view(f"V{_SIZES[other]}")
    elif way == 2 and np.size(array) and np.ndim(array):
        axis = rng.randrange(np.ndim(array))
        tensors[name] = kind, np.take(array, range(rng.randrange(array.shape[axis])), axis)
    elif way == 3:
        changed = data.copy()
        changed[rng.randrange(data.size) if data.size else slice(0)] = rng.randrange(256)
        tensors[name] = kind, changed.view(np.asarray(array).dtype).reshape(np.shape(array))
    elif config:
        config[rng.choice(sorted(config))] = rng.choice([0, -1, 3, 1 << 70, "x", None, [], {}, [128, 128], 1.5, True])
