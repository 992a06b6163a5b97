"""Lab 6: rounding, and two codes in 7 bits.

A block of 32 neighbouring weights is stored as 32 codes 0 .. levels - 1, a scale and a zero point:

    weight = zero + scale * code        zero: the smallest weight of the block; scale: (largest - zero) / (levels - 1)

`quantise` chooses the code that is nearest to each weight. A block of equal weights has scale 0 and codes 0.

8 levels need 3 bits per weight, 16 levels need 4. With 11 levels two codes fit into 7 bits, as 11 * second + first
<= 120 < 128: 3.5 bits per weight. (12 levels have 144 pairs, too many for 7 bits.) `pack` stores the codes of 32
weights in 14 bytes. They form 16 pairs of neighbouring columns; `first` is the code of the even column. As 7 bits are
not a whole byte, the bits of the 16 pairs are stored in three bit planes, one after the other:

    2 bytes     bit 6 of each pair       pair 8 k + j in bit j of byte k
    4 bytes     bits 4 and 5             pair 4 k + j in bits 2 j, 2 j + 1 of byte k
    8 bytes     bits 0 to 3              pair 2 k + j in bits 4 j .. 4 j + 3 of byte k

    numflow learn check 6        numflow learn hint 6        numflow learn bench 6
"""

import numpy as np

LAB = {
    "number": 6, "title": "Rounding, and two codes in 7 bits", "minutes": 45, "functions": ["quantise", "pack"],
    "grader": "own",
    "hints": [
        "Draw a line from the smallest to the largest weight of a block, with 11 marks. How many steps are between the "
        "marks?",
        "pack: compute the pairs first, uint8 [N, blocks, 16]. For the plane of width 2, reshape them to [N, blocks, "
        "4, 4], shift each element of the last axis to its bits, and join them with np.bitwise_or.reduce.",
        "scale = (max - min) / (levels - 1), codes = rint((x - min) / scale). The plane of width w at bit s: (pairs >> "
        "s & (1 << w) - 1) << (w * j) for j = 0 .. 8 // w - 1, or-ed. Concatenate planes (1, 6), (2, 4), (4, 0)."],
}
BLOCK = 32


def quantise(x, levels):
    """x f32 [N, K] -> codes u8 [N, K], scale f32 [N, K / 32], zero f32 [N, K / 32]."""
    g = x.reshape(len(x), -1, BLOCK)
    zero = g.min(axis=2)
    scale = (g.max(axis=2) - zero) / np.float32(levels - 1)
    step = np.where(scale > 0, scale, np.float32(1))
    codes = np.rint((g - zero[:, :, None]) / step[:, :, None])
    return codes.astype(np.uint8).reshape(x.shape), scale, zero


def pack(codes):
    """codes u8 [N, K], 0 .. 10 -> u8 [N, K / 32 * 14]."""
    return _packed(codes[:, 0::2] + 11 * codes[:, 1::2], ((1, 6), (2, 4), (4, 0)))


def _packed(pairs, planes):
    pairs = pairs.astype(np.uint8).reshape(len(pairs), -1, BLOCK // 2)
    found = []
    for width, shift in planes:
        fields = (pairs >> np.uint8(shift) & np.uint8((1 << width) - 1)).reshape(*pairs.shape[:2], -1, 8 // width)
        found.append(np.bitwise_or.reduce(fields << np.arange(0, 8, width, dtype=np.uint8), axis=-1))
    return np.concatenate(found, axis=2).reshape(len(pairs), -1)


def quantise__cut_off(x, levels):
    """codes that are truncated instead of rounded: the error is twice as large"""
    _, scale, zero = quantise(x, levels)
    g, step = x.reshape(len(x), -1, BLOCK), np.where(scale > 0, scale, np.float32(1))
    return np.floor((g - zero[:, :, None]) / step[:, :, None]).astype(np.uint8).reshape(x.shape), scale, zero


def quantise__levels(x, levels):
    """a scale of (largest - smallest) / levels: 11 marks have 10 steps between them"""
    return quantise(x, levels + 1)


def quantise__levels_cut(x, levels):
    """a scale of (largest - smallest) / levels with clipped codes: 11 marks have 10 steps between them"""
    codes, scale, zero = quantise(x, levels + 1)
    return np.minimum(codes, levels - 1).astype(np.uint8), scale, zero


def quantise__zero_of_row(x, levels):
    """the smallest weight of the row instead of the smallest of each block"""
    g = x.reshape(len(x), -1, BLOCK)
    zero = np.repeat(g.min(axis=(1, 2))[:, None], g.shape[1], axis=1)
    scale = (g.max(axis=2) - zero) / np.float32(levels - 1)
    step = np.where(scale > 0, scale, np.float32(1))
    return np.rint((g - zero[:, :, None]) / step[:, :, None]).astype(np.uint8).reshape(x.shape), scale, zero


def quantise__whole_row(x, levels):
    """one scale for the whole row: each block of 32 weights has its own scale"""
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    scale = (high - low) / np.float32(levels - 1)
    codes = np.rint((x - low) / np.where(scale > 0, scale, np.float32(1))).astype(np.uint8)
    ones = np.ones((1, x.shape[1] // BLOCK), np.float32)
    return codes, scale * ones, low * ones


def quantise__symmetric(x, levels):
    """a range from -largest |x| to largest |x|: half of it may be empty"""
    g = x.reshape(len(x), -1, BLOCK)
    most = np.abs(g).max(axis=2)
    scale = 2 * most / np.float32(levels - 1)
    step = np.where(scale > 0, scale, np.float32(1))
    return np.rint((g + most[:, :, None]) / step[:, :, None]).astype(np.uint8).reshape(x.shape), scale, -most


def quantise__zero_code(x, levels):
    """a zero in units of codes, -smallest / scale: here zero is the weight of code 0"""
    codes, scale, zero = quantise(x, levels)
    return codes, scale, -zero / np.where(scale > 0, scale, np.float32(1))


def quantise__from_nothing(x, levels):
    """a range that begins at 0 instead of the smallest weight"""
    g = np.maximum(x.reshape(len(x), -1, BLOCK), np.float32(0))
    scale = g.max(axis=2) / np.float32(levels - 1)
    step = np.where(scale > 0, scale, np.float32(1))
    return np.rint(g / step[:, :, None]).astype(np.uint8).reshape(x.shape), scale, np.zeros_like(scale)


def pack__swapped(codes):
    """two codes of a pair that are swapped: a pair is 11 * second + first, not 11 * first + second"""
    return _packed(11 * codes[:, 0::2] + codes[:, 1::2], ((1, 6), (2, 4), (4, 0)))


def pack__ten(codes):
    """10 * second + first: there are 11 codes 0 .. 10, so different pairs become equal"""
    return _packed(codes[:, 0::2] + 10 * codes[:, 1::2], ((1, 6), (2, 4), (4, 0)))


def pack__low_plane_first(codes):
    """planes in the order of 4, 2 and 1 bits: the plane of bit 6 comes first"""
    return _packed(codes[:, 0::2] + 11 * codes[:, 1::2], ((4, 0), (2, 4), (1, 6)))


def pack__halves(codes):
    """pairs of a column of a block's first half and one of its second half: a pair is two neighbouring columns"""
    g = codes.reshape(len(codes), -1, 2, BLOCK // 2)
    return _packed((g[:, :, 0] + 11 * g[:, :, 1]).reshape(len(codes), -1), ((1, 6), (2, 4), (4, 0)))


def pack__high_bits_first(codes):
    """fields that fill each byte from its highest bit down: the first field begins at bit 0"""
    pairs = (codes[:, 0::2] + 11 * codes[:, 1::2]).astype(np.uint8).reshape(len(codes), -1, BLOCK // 2)
    found = []
    for width, shift in ((1, 6), (2, 4), (4, 0)):
        fields = (pairs >> np.uint8(shift) & np.uint8((1 << width) - 1)).reshape(*pairs.shape[:2], -1, 8 // width)
        found.append(np.bitwise_or.reduce(fields << np.arange(8 - width, -1, -width, dtype=np.uint8), axis=-1))
    return np.concatenate(found, axis=2).reshape(len(codes), -1)


def quantise__not_divided(x, levels):
    """a scale that is not divided by levels - 1"""
    blocks, zero = x.reshape(len(x), -1, BLOCK), x.reshape(len(x), -1, BLOCK).min(axis=2)
    scale = blocks.max(axis=2) - zero
    codes = np.rint((blocks - zero[:, :, None]) / np.where(scale > 0, scale, 1)[:, :, None])
    return codes.astype(np.uint8).reshape(x.shape), scale, zero


def pack__planes_of_rows(codes):
    """planes of a whole row: each block of 32 weights has its three planes in its own 14 bytes"""
    blocks = pack(codes).reshape(len(codes), -1, 14)
    return np.concatenate([blocks[:, :, part].reshape(len(codes), -1)
                           for part in (slice(0, 2), slice(2, 6), slice(6, 14))], axis=1)


def pack__next_bits(codes):
    """bits 3 and 4 in the plane of bits 4 and 5"""
    pairs = (codes[:, 0::2] + 11 * codes[:, 1::2]).reshape(len(codes), -1, 16)
    planes = pack(codes).reshape(len(codes), -1, 14).copy()
    two = (pairs >> 3 & 3).reshape(*pairs.shape[:2], 4, 4)
    planes[:, :, 2:6] = (two << np.arange(0, 8, 2, dtype=np.uint8)).sum(axis=3)
    return planes.reshape(len(codes), -1)


def pack__sixteen(codes):
    """16 * second + first, which needs 8 bits: 11 * second + first needs 7"""
    pairs = (codes[:, 0::2] + 16 * (codes[:, 1::2] & 7)).reshape(len(codes), -1, 16)
    out = np.zeros((*pairs.shape[:2], 14), np.uint8)
    for j in range(16):
        out[:, :, j // 8] |= (pairs[:, :, j] >> 6 & 1) << j % 8
        out[:, :, 2 + j // 4] |= (pairs[:, :, j] >> 4 & 3) << 2 * (j % 4)
        out[:, :, 6 + j // 2] |= (pairs[:, :, j] & 15) << 4 * (j % 2)
    return out.reshape(len(codes), -1)


def grade(functions):
    """Grade `quantise` on several kinds of blocks, then `pack` against numflow's own packing."""
    from numflow.learn.graders.calls import Call, grade_calls
    from numflow.quant.bits import pack_planes
    from numflow.quant.layout import ROW_SCHEMES

    rng = np.random.default_rng(6)
    rows = rng.standard_normal((3, 96)).astype(np.float32)
    flat = np.repeat(np.float32([[1.5, 0.0, -2.0]]), BLOCK, axis=1)
    names = ("codes", "scale", "zero")
    calls = [Call(f"quantise-{name}-{levels}", "quantise", (x, levels), quantise(x, levels), names, bound=1e-5)
             for name, x, levels in (("a-line", np.linspace(-1, 2, BLOCK, dtype=np.float32)[None], 11),
                                     ("normal", rows, 11), ("normal", rows, 4), ("normal", rows, 16),
                                     ("all-positive", np.abs(rows) + 1, 11), ("all-the-same", flat, 11))]
    one = np.zeros((1, BLOCK), np.uint8)
    one[0, 1] = 10
    for name, codes in (("zeros", 0 * one), ("one-code", one), ("tens", 0 * one + 10), (
            "random", rng.integers(0, 11, (2, 96), dtype=np.uint8))):
        pairs = (codes[:, 0::2] + 11 * codes[:, 1::2]).reshape(len(codes), -1, 16)
        expected = pack_planes(pairs, ROW_SCHEMES["q3h"].planes).reshape(len(codes), -1)
        calls.append(Call(f"pack-{name}", "pack", (codes,), expected))
    return grade_calls(functions, calls)


def story(functions, model):
    """Text of a model whose matrices are rounded to 3.5 bits by `quantise`."""
    from numflow.learn.graders.stories import with_weights

    def rounded(w):
        codes, scale, zero = functions["quantise"](w, 11)
        return np.repeat(zero, BLOCK, axis=1) + np.repeat(scale, BLOCK, axis=1) * codes

    return with_weights(model, rounded, BLOCK)


def bench(functions):
    """Errors of normal weights: yours for several numbers of levels, and numflow's schemes, which search for ranges."""
    from numflow.quant.layout import ROW_SCHEMES
    from numflow.quant.search import search_reference

    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    ones, bars = np.ones((1, 256), np.float32), []
    for levels, bits, name in ((8, "3", "q3"), (11, "3.5", "q3h"), (16, "4", "q4")):
        codes, scale, zero = functions["quantise"](x, levels)
        yours = codes * np.repeat(scale, BLOCK, axis=1) + np.repeat(zero, BLOCK, axis=1)
        own = search_reference(x, ROW_SCHEMES[name], ones, True, "x").values()
        bars += [(f"{bits} bits, yours", 100 * float(np.std(yours - x))), (name, 100 * float(np.std(own - x)))]
    return {"what": "error, relative to the weights; yours has 2 bits more for float32 headers", "unit": "%",
            "bars": bars}
