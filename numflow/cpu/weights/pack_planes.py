"""Codes that files store as bit planes (numflow/quant/bits.py) and as pairs, and the unpacking of Inferflow's blocks.

The functions emit code of packing kernels, as in pack_blocks.py.
"""

import functools
from collections.abc import Callable

from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.decode_own import unpack_pair
from numflow.quant.bits import Plane
from numflow.quant.inferflow import BYTES, INFERFLOW_SCHEMES, SYMMETRIC, InferflowScheme
from numflow.quant.layout import PAIR_LEVELS


def codes_of_planes(raw: Value, planes: tuple[Plane, ...], count: int, paired: bool) -> Value:
    """`count` codes whose planes begin at `raw`, u8 lanes; pairs give two neighbouring codes each, 2 * count codes."""
    parts, offset = [], 0
    for plane in planes:
        parts.append(_fields(raw + offset, plane, count))
        offset += plane.bytes(count)
    codes = functools.reduce(Value.__or__, parts)
    if not paired:
        return codes
    first, second = unpack_pair(codes, 0), unpack_pair(codes, 1)
    second = second.compare("<", PAIR_LEVELS).choose(second, PAIR_LEVELS - 1)  # encoders make no pairs above 120
    return first.join(second).permute([i // 2 + count * (i % 2) for i in range(2 * count)])


def _fields(raw: Value, plane: Plane, count: int) -> Value:
    """The bits that a plane has of `count` codes, shifted to their position in the code."""
    size, per_byte = plane.bytes(count), 8 // plane.width
    positions = [(i % size, i // size) if plane.split else divmod(i, per_byte) for i in range(count)]  # byte, field
    packed = load(raw, "u8", size).permute([byte for byte, _ in positions])
    return ((packed >> [plane.width * i for _, i in positions]) & ((1 << plane.width) - 1)) << plane.shift


def put_words(out: Value, codes: Value) -> None:
    """Store codes, u8 lanes, as words of 4 columns, 64 bytes apart."""
    words = codes.as_("i32", codes.lanes // 4)
    for word in range(words.lanes):
        save(out + 64 * word, words.lane(word))


def pair_planes(groups: list[Value]) -> list[Value]:
    """Column groups as 7-bit pairs of codes."""
    return _of_seven_bits([groups[2 * p] + groups[2 * p + 1] * PAIR_LEVELS for p in range(4)])


def four_planes(groups: list[Value]) -> list[Value]:
    """Column groups of codes of 3 levels, four codes in 7 bits."""
    return _of_seven_bits([functools.reduce(lambda high, low: high * 3 + low, reversed(groups[4 * q:4 * q + 4]))
                           for q in range(4)])


def _of_seven_bits(codes: list[Value]) -> list[Value]:
    """3 vectors of 7-bit codes, whose top bits are the 3 high bits of the fourth, and half a vector with the low 4 bits
    of the fourth (layout.py)."""
    *pairs, last = codes
    nibbles = last & 15
    half = nibbles.part(0, 32) | nibbles.part(32, 32) << 4
    return [*(pair | (last >> (4 + p)) << 7 for p, pair in enumerate(pairs)), half]


def _of_bytes(scheme: InferflowScheme) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        for half in range(2):  # a unit is two blocks
            block = raw + half * scheme.size
            for target, source in ((0, 1), (32, 0)):  # scale, base
                save(header + target + 16 * half + lane, load(block + source, "u8"), 1)
            put_words(out + 256 * half, codes_of_planes(block + scheme.header, scheme.planes, scheme.codes, False))
    return unpack


def _inferflow(scheme: InferflowScheme) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        scale, base = (0, 2) if scheme.scale_first or scheme.rule == SYMMETRIC else (2, 0)
        codes = codes_of_planes(raw + scheme.header, scheme.planes, scheme.codes, scheme.paired)
        if scheme.rule == SYMMETRIC:
            save(header + lane * 2, load(raw + scale, "u16"), 2)
            put_words(out, codes + 128)
            return
        for unit in range(scheme.block // 32):  # one header per unit
            save(header + 64 * unit + lane * 2, load(raw + scale, "u16"), 2)
            save(header + 64 * unit + 32 + lane * 2, load(raw + base, "u16"), 2)
        put_words(out, codes)
    return unpack


# Unpacking function by scheme, like BLOCKS of pack_blocks.py.
INFERFLOW_BLOCKS = {name: _of_bytes(scheme) if scheme.rule == BYTES else _inferflow(scheme)
                    for name, scheme in INFERFLOW_SCHEMES.items()}
