"""More matrices as other programs store them, made byte by byte; interface as in quantised_files.py."""

import numpy as np

from tests.formats.quantised_parts import E2M1, bf16, e4m3, scales_of, two_in_a_byte, wide, words

E2M3 = np.array([m / 8 for m in range(8)] + [(8 + m) * 2.0**(e - 3) for e in range(3) for m in range(8)])
E2M3 = np.concatenate([E2M3, -E2M3])


def _planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] in bit planes: for each 32 codes, the low bits of all, then the higher bits."""
    widths = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]
    blocks, low, found = codes.reshape(len(codes), -1, 32), 0, []
    for width in widths:
        found.append(words(blocks >> low & (1 << width) - 1, width))
        low += width
    return np.concatenate(found, axis=2).reshape(len(codes), -1)


def planar(rng, n, k, bits=5, group=32, act=False):
    """GPTQModel's gptq_p, which stores zero points without an offset."""
    codes, zeros = rng.integers(0, 1 << bits, (k, n)), rng.integers(0, 1 << bits, (k // group, n))
    index = np.arange(k) // group
    index = rng.permutation(index) if act else index
    stored, numbers = wide("F16", scales_of(rng, k // group, n))
    tensors = {"qweight": ("I32", np.ascontiguousarray(_planes(np.ascontiguousarray(codes.T), bits).T)),
               "qzeros": ("I32", _planes(zeros, bits)), "scales": ("F16", stored),
               "g_idx": ("I32", index.astype("<i4"))}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": "gptq_p"}
    return tensors, (numbers[index] * (codes - zeros[index])).T, config


def borrowing(rng, n, k, bits=4, group=32):
    """GPTQModel's gptq with zero points of 0: 1 is subtracted from each code of a word at once, with borrows between
    codes."""
    codes, zeros = rng.integers(0, 1 << bits, (k, n)), rng.integers(0, 3, (k // group, n))
    stored, numbers = wide("F16", scales_of(rng, k // group, n))
    if bits == 3:
        qzeros = words(zeros - 1 & 7, 3, True)
    else:
        qzeros = (words(zeros, bits).view("<u4") - np.uint32(0xFFFFFFFF // ((1 << bits) - 1))).view("<i4")
    tensors = {"qweight": ("I32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T), bits, bits == 3).T)),
               "qzeros": ("I32", qzeros), "scales": ("F16", stored)}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": "gptq", "sym": False,
              "meta": {"quantizer": ["gptqmodel:5.0.0"]}}
    return tensors, (np.repeat(numbers, group, 0) * (codes - np.repeat(zeros, group, 0))).T, config


def gemv(rng, n, k, group=64):
    """AWQ's version gemv, padded to more groups than the matrix has."""
    groups, room = k // group, -(-k // group // 16) * 16
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, groups))
    stored, numbers = wide("F16", scales_of(rng, n, groups))
    padded = np.pad(stored, ((0, 0), (0, room - groups)))
    tensors = {"qweight": ("I32", words(codes, 4)), "scales": ("F16", padded),
               "qzeros": ("I32", words(np.pad(zeros, ((0, 0), (0, room - groups))), 4))}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv"}
    return tensors, np.repeat(numbers, group, 1) * (codes - np.repeat(zeros, group, 1)), config


def gemv_fast(rng, n, k, group=64):
    """AWQ's version gemv_fast: column 8a + 2b + d of 32 is code 8b + 4d + a; 64 columns of four rows make 64 words."""
    groups, room = k // group, -(-k // group // 16) * 16
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, groups))
    stored, numbers = wide("F16", scales_of(rng, n, groups))
    offsets, values = wide("F16", -zeros * numbers)
    row, column = np.divmod(np.arange(n * k), k)
    at = column // 32 * 32 + column % 8 // 2 * 8 + column % 2 * 4 + column % 32 // 8
    place = row % 4 * 64 + at % 64
    data = np.zeros((n // 4, k), np.uint16)
    np.bitwise_or.at(data, (row // 4, at // 64 * 64 + place // 4),
                     (codes.reshape(-1) << place % 4 * 4).astype(np.uint16))
    padded = {name: ("F16", np.ascontiguousarray(np.pad(x, ((0, 0), (0, room - groups))).T))
              for name, x in (("scales", stored), ("qzeros", offsets))}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv_fast"}
    return ({"qweight": ("I16", data.view(np.int16)), **padded},
            codes * np.repeat(numbers, group, 1) + np.repeat(values, group, 1), config)


def auto_round(rng, n, k, form="auto_round", bits=4, group=32, key="packing_format"):
    """AutoRound's layouts of GPTQ; some store zero points without an offset."""
    codes, zeros = rng.integers(0, 1 << bits, (k, n)), rng.integers(1, 1 << bits, (k // group, n))
    stored, numbers = wide("F16", scales_of(rng, k // group, n))
    less = "gptq" in form
    tensors = {"qweight": ("I32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T), bits, True).T)),
               "qzeros": ("I32", words(zeros - less, bits, True)), "scales": ("F16", stored)}
    config = {"quant_method": "intel/auto-round", "bits": bits, "group_size": group, key: form}
    return tensors, (np.repeat(numbers, group, 0) * (codes - np.repeat(zeros, group, 0))).T, config


def fours_of_fp8(rng, n, k, scale="F8_E8M0"):
    """4-bit experts in a model with FP8 matrices."""
    codes, powers = rng.integers(0, 16, (n, k)), rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
    scales = 2.0**(powers.astype(int) - 127)
    tensors = {"weight": ("I8", two_in_a_byte(codes).view(np.int8)),
               "weight_scale_inv": (scale, powers if scale != "F32" else scales.astype(np.float32))}
    return tensors, E2M1[codes] * np.repeat(scales, 32, 1), {"quant_method": "fp8", "weight_block_size": [128, 128]}


def mxfp6(rng, n, k):
    codes, powers = rng.integers(0, 64, (n, k)), rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
    bits = (codes[..., None] >> np.arange(6) & 1).astype(np.uint8).reshape(n, -1)
    data = np.packbits(bits, axis=1, bitorder="little")
    return ({"weight_packed": ("U8", data), "weight_scale": ("U8", powers)},
            E2M3[codes] * np.repeat(2.0**(powers.astype(int) - 127), 32, 1),
            {"quant_method": "compressed-tensors", "format": "mxfp6-pack-quantized"})


def modelopt(rng, n, k, algorithm="W4A16_AWQ", group=64):
    """ModelOpt's layouts with input scales, and FP8 blocks with 4-dimensional scales."""
    config, factors = {"quant_method": "modelopt", "quant_algo": algorithm}, scales_of(rng, k).astype(np.float32) * 100
    tensors = {"pre_quant_scale": ("F32", factors)}
    if algorithm == "FP8_PB_WO":
        codes = rng.integers(0, 0x60, (n, k)).astype(np.uint8)
        stored = scales_of(rng, 2, 1, k // group, 1).astype(np.float32)
        return ({"weight": ("F8_E4M3", codes), "weight_scale": ("F32", stored)},
                e4m3(codes) * np.repeat(np.repeat(stored[:, 0, :, 0].astype(np.float64), n // 2, 0), group, 1), config)
    if algorithm == "NVFP4_AWQ":
        codes, bits = rng.integers(0, 16, (n, k)), rng.integers(40, 100, (n, k // 16)).astype(np.uint8)
        tensors |= {"weight": ("U8", two_in_a_byte(codes)), "weight_scale": ("F8_E4M3", bits),
                    "weight_scale_2": ("F32", np.array(0.25, np.float32))}
        return tensors, E2M1[codes] * np.repeat(e4m3(bits) * 0.25, 16, 1) * factors, config
    if algorithm == "W8A8_SQ_PER_CHANNEL":
        codes, stored = rng.integers(-127, 128, (n, k)), scales_of(rng, n).astype(np.float32)
        tensors |= {"weight": ("I8", codes.astype(np.int8)), "weight_scale": ("F32", stored)}
        return tensors, codes * stored[:, None].astype(np.float64) * factors, config
    codes, stored = rng.integers(-8, 8, (n, k)), scales_of(rng, n, k // group).astype(np.float32)
    tensors |= {"weight": ("U8", (codes[0::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8)),
                "weight_scale": ("F32", stored)}
    if algorithm == "W4A8_AWQ":
        tensors["weight_scale_2"] = ("F32", np.array(0.25, np.float32))  # of the FP8 they are multiplied in
    return tensors, codes * np.repeat(stored.astype(np.float64), group, 1) * factors, config


def _tiles(scales: np.ndarray) -> np.ndarray:
    """Scales [rows, groups] in tiles of 128 rows and 4 groups, the order of tensor cores."""
    (rows, groups), found = scales.shape, []
    padded = np.pad(scales, ((0, -rows % 128), (0, -groups % 4)))
    for row in range(0, rows, 128):
        for group in range(0, groups, 4):
            tile = padded[row:row + 128, group:group + 4]
            found.append(np.stack([tile[r % 4 * 32 + r // 4] for r in range(128)]))
    return np.stack(found).reshape(-(-rows // 128) * 32, -(-groups // 4) * 16)


def torchao4(rng, n, k, kind="int4", group=32, tiles=False):
    """torchao's 4-bit tensors, and 8-bit ones with powers of two as scales."""
    config = {"quant_method": "torchao"}
    if kind == "int4":
        codes = rng.integers(-8, 8, (n, k))
        stored, numbers = wide("BF16", scales_of(rng, k // group, n))
        other, offsets = wide("BF16", rng.uniform(-0.1, 0.1, (k // group, n)))
        data = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8).view(np.int8)
        return ({"_weight_qdata": ("I8", data), "_weight_scale": ("BF16", stored),
                 "_weight_zero_point": ("BF16", other)},
                codes * np.repeat(numbers.T, group, 1) + np.repeat(offsets.T, group, 1), config)
    codes, name = rng.integers(0, 16, (n, k)), "_weight_qdata"
    data, numbers = ("U8", two_in_a_byte(codes)), E2M1[codes]
    if kind == "nvfp4":
        bits, factor = rng.integers(40, 100, (n, k // 16)).astype(np.uint8), np.float32(0.003)
        return ({name: data, "_weight_scale": ("F8_E4M3", _tiles(bits) if tiles else bits),
                 "_weight_per_tensor_scale": ("F32", np.array(factor)), "_weight_act_pre_scale": ("BF16", bf16(
                     np.full(k, 2.0)))}, 2 * numbers * np.repeat(e4m3(bits) * np.float64(factor), 16, 1), config)
    powers = rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
    if kind == "mxfp8":
        bytes8 = rng.integers(0, 0x70, (n, k)).astype(np.uint8)
        data, numbers = ("F8_E4M3", bytes8), e4m3(bytes8)
    return ({name: data, "_weight_scale": ("F8_E8M0", _tiles(powers) if tiles else powers)},
            numbers * np.repeat(2.0**(powers.astype(int) - 127), 32, 1), config)


def mlx(rng, n, k, bits=4, group=64, mode="affine", biases="biases", own=False):
    codes = rng.integers(0, 1 << bits, (n, k))
    data = words(codes, bits, True).view("<u4")
    config = {"bits": bits, "group_size": group}
    if own:  # bits that this layer has by itself
        config = {"bits": 2, "group_size": group, "model.layers.0.mlp.up_proj": config, "lm_head": False}
    if mode == "nvfp4":
        steps = rng.integers(0, 100, (n, k // 16)).astype(np.uint8)
        return ({"weight": ("U32", data), "scales": ("U8", steps)}, E2M1[codes] * np.repeat(e4m3(steps), 16, 1),
                config | {"mode": mode})
    if mode in ("mxfp4", "mxfp8"):
        codes = codes if bits == 4 else codes & 0xBF  # none of which is no number
        data, powers = words(codes, bits, True).view("<u4"), rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
        return ({"weight": ("U32", data), "scales": ("U8", powers)},
                (E2M1[codes] if bits == 4 else e4m3(codes)) * np.repeat(2.0**(powers.astype(int) - 127), 32, 1),
                config | {"mode": mode})
    if mode == "mixed":  # this layer is affine, the others are not
        config = {"bits": 4, "group_size": 32, "mode": "mxfp4", "model.layers.0.mlp.up_proj": config}
    stored, numbers = wide("BF16", scales_of(rng, n, k // group))
    stored[1], numbers[1] = 0, 0  # all one number
    other, offsets = wide("BF16", rng.uniform(-0.1, 0.1, (n, k // group)))
    if biases == "qbiases":
        config["quant_method"] = "metal"
    return ({"weight": ("U32", data), "scales": ("BF16", stored), biases: ("BF16", other)},
            codes * np.repeat(numbers, group, 1) + np.repeat(offsets, group, 1), config)


def bitnet(rng, n, k, times=False):
    codes, stored = rng.integers(-1, 2, (n, k)), np.array([1.75])
    data = sum(codes[i * n // 4:(i + 1) * n // 4] + 1 << 2 * i for i in range(4)).astype(np.uint8)
    config = {"quant_method": "bitnet", "quantization_mode": "offline"}
    return ({"weight": ("U8", data), "weight_scale": ("BF16", bf16(stored))}, codes * (1.75 if times else 1 / 1.75),
            config | ({"linear_class": "autobitlinear"} if times else {}))


def quark(rng, n, k, dtype="fp8_e4m3"):
    config = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": dtype, "qscheme": "per_tensor"}}}
    if dtype == "fp4":
        codes, powers = rng.integers(0, 16, (n, k)), rng.integers(115, 125, (n, k // 32)).astype(np.uint8)
        return ({"weight": ("U8", two_in_a_byte(codes)), "weight_scale": ("U8", powers)},
                E2M1[codes] * np.repeat(2.0**(powers.astype(int) - 127), 32, 1), config)
    scale = np.array(0.25, np.float32)
    tensors = {"weight_scale": ("F32", scale), "input_scale": ("F32", scale), "output_scale": ("F32", scale)}
    if dtype == "int8":
        codes = rng.integers(-128, 128, (n, k))
        tensors |= {"weight": ("I8", codes.astype(np.int8)), "weight_zero_point": ("I8", np.zeros((), np.int8))}
        return tensors, codes * 0.25, config
    bits = rng.integers(0, 0x70, (n, k)).astype(np.uint8)
    return tensors | {"weight": ("F8_E4M3", bits)}, e4m3(bits) * 0.25, config


def by_eight(rng, n, k, method="w8a8_int8"):
    """8-bit weights under SGLang's method names."""
    config, codes = {"quant_method": method}, rng.integers(-127, 128, (n, k))
    if method == "blockwise_int8":
        stored = scales_of(rng, -(-n // 32), -(-k // 128)).astype(np.float32)
        scales = np.repeat(np.repeat(stored.astype(np.float64), 32, 0)[:n], 128, 1)[:, :k]
        return ({"weight": ("I8", codes.astype(np.int8)), "weight_scale_inv": ("F32", stored)}, codes * scales,
                config | {"weight_block_size": [32, 128]})
    stored = scales_of(rng, n, 1).astype(np.float32)
    if method == "w8a8_fp8":
        bits = rng.integers(0, 0x70, (n, k)).astype(np.uint8)
        return {"weight": ("F8_E4M3", bits), "weight_scale": ("F32", stored)}, e4m3(bits) * stored.astype(float), config
    return ({"weight": ("I8", codes.astype(np.int8)), "weight_scale": ("F32", stored)}, codes * stored.astype(float),
            config)


MORE = {
    **{method: (by_eight, {"method": method}) for method in ("w8a8_int8", "w8a8_fp8", "blockwise_int8")},
    **{f"gptq-planes-{bits}": (planar, {"bits": bits}) for bits in (3, 4, 5, 6, 7)},
    "gptq-planes-act": (planar, {"bits": 6, "act": True}),
    **{f"gptq-borrowed-{bits}": (borrowing, {"bits": bits}) for bits in (2, 3, 4, 8)},
    "awq-gemv": (gemv, {}), "awq-gemv-32": (gemv, {"group": 32}),
    "awq-gemv-fast": (gemv_fast, {}), "awq-gemv-fast-32": (gemv_fast, {"group": 32}),
    "auto-round": (auto_round, {}), "auto-round-less": (auto_round, {"form": "auto_round:auto_gptq"}),
    "auto-round-older": (auto_round, {"form": "auto_round:exllamav2", "key": "backend"}),
    "auto-round-older-less": (auto_round, {"form": "auto_round:gptq:exllamav2", "key": "backend"}),
    "auto-round-5": (auto_round, {"bits": 5}), "mxfp6": (mxfp6, {}),
    "fp8-fours": (fours_of_fp8, {}), "fp8-fours-f32": (fours_of_fp8, {"scale": "F32"}),
    **{f"modelopt-{name.lower()}": (modelopt, {"algorithm": name})
       for name in ("W4A16_AWQ", "W4A8_AWQ", "NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL", "FP8_PB_WO")},
    "torchao-int4": (torchao4, {}), "torchao-nvfp4": (torchao4, {"kind": "nvfp4"}),
    **{f"torchao-{kind}-tiles": (torchao4, {"kind": kind, "tiles": True}) for kind in ("nvfp4", "mxfp4", "mxfp8")},
    **{f"mlx-{bits}": (mlx, {"bits": bits}) for bits in (2, 3, 4, 6, 8)}, "mlx-own": (mlx, {"own": True}),
    "mlx-metal": (mlx, {"biases": "qbiases", "group": 32}), "mlx-mxfp4": (mlx, {"mode": "mxfp4", "group": 32}),
    "mlx-nvfp4": (mlx, {"mode": "nvfp4", "group": 16}), "mlx-mxfp8": (mlx, {"mode": "mxfp8", "bits": 8, "group": 32}),
    "mlx-mixed": (mlx, {"mode": "mixed", "bits": 8}),
    "bitnet": (bitnet, {}), "bitnet-times": (bitnet, {"times": True}),
    **{f"quark-{dtype}": (quark, {"dtype": dtype}) for dtype in ("fp8_e4m3", "int8", "fp4")},
}
