"""Matrices as other programs quantise and store them, made byte by byte, and their decoded weights.

    tensors, weights, config = MAKERS["gptq"](rng, n, k, **variant)

tensors: suffix of the module's name -> (dtype, array). weights: float32 [n, k], by the format's formula in float64.
"""

import json

import numpy as np

from tests.formats import make
from tests.formats.quantised_more import MORE
from tests.formats.quantised_parts import E2M1, FP4, NF4, e4m3, e5m2, scales_of, two_in_a_byte, wide, words


def gptq(rng, n, k, bits=4, group=32, act=False, v2=False, symmetric=False, scale="F16", g_idx=True, stated=True):
    groups = -(-k // group) if group > 0 else 1
    codes = rng.integers(0, 1 << bits, (k, n))
    zeros = np.full((groups, n), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (groups, n))
    index = np.arange(k) // (group if group > 0 else k)
    index = rng.permutation(index) if act else index
    stored, numbers = wide(scale, scales_of(rng, groups, n))
    weights = numbers[index] * (codes - zeros[index])
    stream = 32 % bits != 0
    tensors = {"qweight": ("I32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T), bits, stream).T)),
               "qzeros": ("I32", words(zeros - (not v2), bits, stream)), "scales": (scale, stored),
               "bias": ("F16", np.zeros(n, np.float16))}
    if g_idx:
        tensors["g_idx"] = ("I32", index.astype("<i4"))
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act, "sym": symmetric,
              "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return tensors, weights.T, config if stated else None


def awq(rng, n, k, group=32, stated=True):
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    stored, numbers = wide("F16", scales_of(rng, k // group, n))
    weights = np.repeat(numbers, group, 0) * (codes - np.repeat(zeros, group, 0))

    def ordered(values):
        return words(values.reshape(len(values), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(values), -1), 4)

    tensors = {"qweight": ("I32", ordered(codes)), "qzeros": ("I32", ordered(zeros)), "scales": ("F16", stored)}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return tensors, weights.T, config if stated else None


def packed(rng, n, k, bits=4, group=32, symmetric=True, scale="BF16", act=False, dense=False):
    groups = k // group if group > 0 else 1
    codes = rng.integers(0, 1 << bits, (n, k))
    zeros = np.full((n, groups), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (n, groups))
    stored, numbers = wide(scale, scales_of(rng, n, groups))
    index = np.arange(k) // (group if group > 0 else k)
    index = rng.permutation(index) if act else index
    tensors = {"weight_packed": ("I32", words(codes, bits, dense)), "weight_scale": (scale, stored),
               "weight_shape": ("I64", np.array([n, k]))}
    if not symmetric:
        packed_zeros = words(np.ascontiguousarray(zeros.T), bits, dense)
        tensors["weight_zero_point"] = ("I32", np.ascontiguousarray(packed_zeros.T))
    if act:
        tensors["weight_g_idx"] = ("I32", index.astype("<i4"))
    weights = numbers[:, index] * (codes - zeros[:, index])
    config = _compressed("pack-quantized", num_bits=bits, symmetric=symmetric)
    return tensors, weights, config | ({"version": "0.18.0"} if dense else {})


def _compressed(form: str, **weights) -> dict:
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def int8(rng, n, k, scale="BF16", zeros=False):
    codes = rng.integers(-128, 128, (n, k))
    stored, numbers = wide(scale, scales_of(rng, n, 1))
    points = rng.integers(-8, 8, (n, 1)) if zeros else np.zeros((n, 1), int)
    tensors = {"weight": ("I8", codes.astype(np.int8)), "weight_scale": (scale, stored)}
    if zeros:
        tensors["weight_zero_point"] = ("I8", points.astype(np.int8))
    return tensors, numbers * (codes - points), _compressed("int-quantized", num_bits=8)


def fp8(rng, n, k, kind="F8_E4M3", way="channel", scale="F32", block=(128, 128)):
    codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
    codes &= 0xBF  # no NaN, nothing huge
    numbers = (e4m3 if kind == "F8_E4M3" else e5m2)(codes)
    config, name = {"quant_method": "fp8"}, "weight_scale"
    if way == "block":
        config["weight_block_size"], name = list(block), "weight_scale_inv"
        stored, scales = wide(scale, scales_of(rng, -(-n // block[0]), -(-k // block[1])))
        scales = np.repeat(np.repeat(scales, block[0], 0)[:n], block[1], 1)[:, :k]
    elif way == "mx":
        config, name = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "weight_scale_inv"
        stored, scale = rng.integers(110, 125, (n, k // 32)).astype(np.uint8), "U8"
        scales = np.repeat(2.0**(stored.astype(int) - 127), 32, 1)
    else:
        stored, scales = wide(scale, scales_of(rng, *{"channel": (n, 1), "tensor": (), "one": (1,)}[way]))
    tensors = {"weight": (kind, codes), name: (scale, stored), "input_scale": ("F32", np.array(0.5, np.float32))}
    return tensors, numbers * scales, config


def nvfp4(rng, n, k, modelopt=False):
    codes, bits = rng.integers(0, 16, (n, k)), rng.integers(40, 100, (n, k // 16)).astype(np.uint8)
    factor = np.float32(0.001 if modelopt else 1500)
    scales = np.repeat(e4m3(bits) * np.float64(factor if modelopt else 1 / factor), 16, 1)
    if modelopt:
        return ({"weight": ("U8", two_in_a_byte(codes)), "weight_scale": ("F8_E4M3", bits),
                 "weight_scale_2": ("F32", np.array(factor)), "input_scale": ("F32", np.array(factor))},
                E2M1[codes] * scales, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return ({"weight_packed": ("U8", two_in_a_byte(codes)), "weight_scale": ("F8_E4M3", bits),
             "weight_global_scale": ("F32", np.array([factor])), "input_global_scale": ("F32", np.array([factor]))},
            E2M1[codes] * scales, _compressed("nvfp4-pack-quantized", num_bits=4))


def mxfp4(rng, n, k):
    codes, powers = rng.integers(0, 16, (n, k)), rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
    weights = E2M1[codes] * np.repeat(2.0**(powers.astype(int) - 127), 32, 1)
    return ({"weight_packed": ("U8", two_in_a_byte(codes)), "weight_scale": ("U8", powers)}, weights,
            _compressed("mxfp4-pack-quantized", num_bits=4))


def bitsandbytes4(rng, n, k, kind="nf4", block=64, double=False):
    table = NF4 if kind == "nf4" else FP4
    codes, count = rng.integers(0, 16, (n, k)), -(-n * k // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    absmax = scales_of(rng, count).astype(np.float32)
    more = {}
    if double:
        inner, stored = np.linspace(-1, 1, 256).astype(np.float32), rng.integers(0, 256, count).astype(np.uint8)
        outer = scales_of(rng, -(-count // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_offset": 0.03, "nested_dtype": "float32"}
        more = {"weight.nested_quant_map": ("F32", inner), "weight.nested_absmax": ("F32", outer)}
        absmax = inner[stored].astype(np.float64) * outer[np.arange(count) // 256] + 0.03
    weights = table[codes] * np.repeat(absmax.astype(np.float64), block)[:n * k].reshape(n, k)
    tensors = {"weight": ("U8", two_in_a_byte(codes.reshape(1, -1), False).reshape(-1, 1)),
               "weight.absmax": ("U8", stored) if double else ("F32", absmax), "weight.quant_map": ("F32", table),
               f"weight.quant_state.bitsandbytes__{kind}":
                   ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8)), **more}
    return tensors, weights, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


def bitsandbytes8(rng, n, k):
    codes, most = rng.integers(-127, 128, (n, k)), scales_of(rng, n).astype(np.float32) * 127
    return ({"weight": ("I8", codes.astype(np.int8)), "SCB": ("F32", most), "weight_format": ("U8", np.uint8(0))},
            codes * most.astype(np.float64)[:, None] / 127, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def hqq(rng, n, k, bits=4, group=32, axis=1, scale="BF16"):
    count = n * k // group
    shape, own = ((count, group), (count, 1)) if axis else ((group, count), (1, count))
    codes = rng.integers(0, 1 << bits, shape)
    stored, scales = wide(scale, scales_of(rng, *own))
    points, zeros = wide(scale, rng.uniform(0, 1 << bits, own))
    if bits == 3:
        padded = np.concatenate([codes, np.zeros((-len(codes) % 10, shape[1]), int)])
        parts = padded.reshape(10, -1, shape[1])
        data, packing, kind = sum(parts[i] << 27 - 3 * i for i in range(10)).astype("<i4"), b"3bit_32", "I32"
    else:
        parts = codes.reshape(8 // bits, -1, shape[1])
        data = sum(part << (len(parts) - 1 - i) * bits for i, part in enumerate(parts)).astype(np.uint8)
        packing, kind = f"{bits}bit_u8".encode(), "U8"
    tensors = {"W_q": (kind, data), "scale": (scale, stored), "zero": (scale, points),
               "shape": ("I64", np.array([n, k])), "nbits": ("I32", np.array(bits, "<i4")),
               "group_size": ("I32", np.array(group, "<i4")), "axis": ("I32", np.array(axis, "<i4")),
               "packing": ("U8", np.frombuffer(packing, np.uint8)), "quant_scale": ("BOOL", np.uint8(0)),
               "view_as_float": ("BOOL", np.uint8(0))}
    return tensors, ((codes - zeros) * scales).reshape(n, k), {"quant_method": "hqq"}


def torchao(rng, n, k, zeros=False):
    tensors, weights, _ = int8(rng, n, k, "F32", zeros)
    names = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "weight_zero_point": "_weight_zero_point"}
    return {names[name]: value for name, value in tensors.items()}, weights, {"quant_method": "torchao"}


# name: (maker, variant)
VARIANTS = {
    **{f"gptq-{bits}": (gptq, {"bits": bits}) for bits in (2, 3, 4, 8)},
    "gptq-act": (gptq, {"act": True}), "gptq-v2": (gptq, {"v2": True}), "gptq-symmetric": (gptq, {"symmetric": True}),
    "gptq-64-act-8": (gptq, {"bits": 8, "group": 64, "act": True}), "gptq-whole": (gptq, {"group": -1}),
    "gptq-128": (gptq, {"group": 128}), "gptq-short-group": (gptq, {"group": 48}),
    "gptq-no-index": (gptq, {"g_idx": False}), "gptq-unsaid": (gptq, {"stated": False, "g_idx": False}),
    "gptq-bf16": (gptq, {"scale": "BF16"}), "gptq-3-act": (gptq, {"bits": 3, "act": True}),
    "awq": (awq, {}), "awq-64": (awq, {"group": 64}), "awq-unsaid": (awq, {"stated": False}),
    **{f"packed-{bits}": (packed, {"bits": bits}) for bits in (2, 3, 4, 8)},
    **{f"packed-dense-{bits}": (packed, {"bits": bits, "dense": True}) for bits in (3, 5, 6, 7)},
    "packed-dense-zeros": (packed, {"bits": 5, "dense": True, "symmetric": False, "group": 16}),
    "packed-zeros": (packed, {"symmetric": False, "group": 64}), "packed-channel": (packed, {"group": -1, "bits": 8}),
    "packed-f16": (packed, {"scale": "F16", "group": 64}), "packed-act": (packed, {"act": True}),
    "packed-channel-zeros": (packed, {"group": -1, "symmetric": False, "scale": "F32"}),
    "packed-16": (packed, {"group": 16}), "packed-8-zeros": (packed, {"bits": 8, "symmetric": False}),
    "int8": (int8, {}), "int8-f32": (int8, {"scale": "F32"}), "int8-zeros": (int8, {"zeros": True}),
    "int8-f16": (int8, {"scale": "F16"}),
    **{f"fp8-{way}": (fp8, {"way": way}) for way in ("channel", "tensor", "one", "block", "mx")},
    "fp8-bf16-block": (fp8, {"way": "block", "scale": "BF16", "block": (32, 48)}),
    "fp8-e5m2": (fp8, {"kind": "F8_E5M2"}), "fp8-bf16": (fp8, {"scale": "BF16"}),
    "nvfp4": (nvfp4, {}), "nvfp4-modelopt": (nvfp4, {"modelopt": True}), "mxfp4": (mxfp4, {}),
    "nf4": (bitsandbytes4, {}), "fp4": (bitsandbytes4, {"kind": "fp4"}),
    "nf4-double": (bitsandbytes4, {"double": True}),
    "nf4-512": (bitsandbytes4, {"block": 512}), "bnb-int8": (bitsandbytes8, {}),
    **{f"hqq-{bits}": (hqq, {"bits": bits}) for bits in (1, 2, 3, 4, 8)}, "hqq-64": (hqq, {"group": 64}),
    "hqq-axis-0": (hqq, {"axis": 0, "group": 64}), "hqq-across": (hqq, {"group": 256, "scale": "F16"}),
    "torchao": (torchao, {}), "torchao-zeros": (torchao, {"zeros": True}), **MORE,
}


def save(path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file; BF16 and 8-bit floats are given as bits."""
    header, data = {}, b""
    for name, (kind, array) in tensors.items():
        piece = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(np.shape(array)),
                        "data_offsets": [len(data), len(data) + len(piece)]}
        data += piece
    path.write_bytes(make.safetensors(header, data))


def made(name: str, n: int, k: int, seed: int = 0):
    """Tensors, float32 weights and configuration of a variant."""
    maker, variant = VARIANTS[name]
    tensors, weights, config = maker(np.random.default_rng(seed), n, k, **variant)
    return tensors, weights.astype(np.float32), config
