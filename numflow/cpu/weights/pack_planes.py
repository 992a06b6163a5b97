"""Codes that files hold as planes of bits (numflow/quant/bits.py), and in pairs: reading them, and Inferflow's blocks.

What is here is code to build packing kernels of, as in pack_blocks.py.
"""

import functools
from collections.abc import Callable

from numflow.cpu.simd.value import Value, load, save
from numflow.cpu.weights.decode_own import of_pair
from numflow.quant.bits import Plane
from numflow.quant.inferflow import BYTES, INFERFLOW_SCHEMES, SYMMETRIC, InferflowScheme
from numflow.quant.layout import PAIR_LEVELS


def codes_of_planes(raw: Value, planes: tuple[Plane, ...], count: int, paired: bool) -> Value:
    """`count` codes whose planes begin at `raw`, u8 lanes; of pairs both weights, adjacent, so twice as many."""
    parts, at = [], 0
    for plane in planes:
        parts.append(_fields(raw + at, plane, count))
        at += plane.bytes(count)
    codes = functools.reduce(Value.__or__, parts)
    if not paired:
        return codes
    first, second = of_pair(codes, 0), of_pair(codes, 1)
    second = second.compare("<", PAIR_LEVELS).choose(second, PAIR_LEVELS - 1)  # no encoder makes pairs beyond 120
    return first.join(second).pick([i // 2 + count * (i % 2) for i in range(2 * count)])


def _fields(raw: Value, plane: Plane, count: int) -> Value:
    """The bits of a plane of so many codes, in their place in each code."""
    size, each = plane.bytes(count), 8 // plane.width
    places = [(i % size, i // size) if plane.split else divmod(i, each) for i in range(count)]
    packed = load(raw, "u8", size).pick([byte for byte, _ in places])
    return ((packed >> [plane.width * i for _, i in places]) & ((1 << plane.width) - 1)) << plane.shift


def put_words(out: Value, codes: Value) -> None:
    """Codes u8 lanes as words of 4 columns, 64 bytes apart."""
    words = codes.as_("i32", codes.lanes // 4)
    for word in range(words.lanes):
        save(out + 64 * word, words.lane(word))


def pair_planes(groups: list[Value]) -> list[Value]:
    """Pairs of groups in 7 bits."""
    return _of_seven_bits([groups[2 * p] + groups[2 * p + 1] * PAIR_LEVELS for p in range(4)])


def four_planes(groups: list[Value]) -> list[Value]:
    """Fours of groups of 3 levels in 7 bits."""
    return _of_seven_bits([functools.reduce(lambda high, low: high * 3 + low, reversed(groups[4 * q:4 * q + 4]))
                           for q in range(4)])


def _of_seven_bits(codes: list[Value]) -> list[Value]:
    """3 vectors of codes, their top bits those of code 3, and half a vector with its low bits (layout.py)."""
    *pairs, last = codes
    nibbles = last & 15
    half = nibbles.part(0, 32) | nibbles.part(32, 32) << 4
    return [*(pair | (last >> (4 + p)) << 7 for p, pair in enumerate(pairs)), half]


def _of_bytes(scheme: InferflowScheme) -> Callable[[Value, Value, Value, Value], None]:
    def take_apart(raw, out, head, lane):
        for half in range(2):  # a unit is two blocks
            block = raw + half * scheme.size
            for place, field in ((0, 1), (32, 0)):  # scale, base
                save(head + place + 16 * half + lane, load(block + field, "u8"), 1)
            put_words(out + 256 * half, codes_of_planes(block + scheme.header, scheme.planes, scheme.codes, False))
    return take_apart


def _inferflow(scheme: InferflowScheme) -> Callable[[Value, Value, Value, Value], None]:
    def take_apart(raw, out, head, lane):
        scale, base = (0, 2) if scheme.scale_first or scheme.rule == SYMMETRIC else (2, 0)
        codes = codes_of_planes(raw + scheme.header, scheme.planes, scheme.codes, scheme.paired)
        if scheme.rule == SYMMETRIC:
            save(head + lane * 2, load(raw + scale, "u16"), 2)
            put_words(out, codes + 128)
            return
        for unit in range(scheme.block // 32):  # a header for each
            save(head + 64 * unit + lane * 2, load(raw + scale, "u16"), 2)
            save(head + 64 * unit + 32 + lane * 2, load(raw + base, "u16"), 2)
        put_words(out, codes)
    return take_apart


# The function by scheme, as BLOCKS of pack_blocks.py.
INFERFLOW_BLOCKS = {name: _of_bytes(scheme) if scheme.rule == BYTES else _inferflow(scheme)
                    for name, scheme in INFERFLOW_SCHEMES.items()}
