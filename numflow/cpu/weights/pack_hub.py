"""Taking apart rows of numflow.quant.hub_types, as functions for the packing kernels (pack_blocks.py says what each
takes): a block, and what a row has before its blocks.

A scale is no number where one of its 8-bit floats is none, or infinite: kernels need not look for these.
"""

from collections.abc import Callable

from numflow.cpu.simd.value import Value, constant, load, save
from numflow.cpu.weights.pack_planes import codes_of_planes, put_words
from numflow.cpu.weights.tables import FLOATS8, any_not_finite
from numflow.quant.hub_types import HUB_TYPES, SIZES, UNIT, HubType

_WORDS = {1: "u8", 2: "u16", 4: "i32"}


def _header(hub: HubType, raw: Value, head: Value, lane: Value) -> None:
    """d and z of a row's header to those of 16 rows."""
    at, place = 0, 0
    for size in filter(None, (SIZES[hub.scale], SIZES[hub.zeros])):
        save(head + place + lane * size, load(raw + at, _WORDS[size]), size)
        at, place = at + size, place + 16 * size


def _spoil_unless_finite(codes: Value, table: str, hub: HubType, head: Value, lane: Value) -> None:
    """A scale that is no number, where one of u8x16 is none or infinite."""
    place = head - 16 * hub.row_header + (lane << 2)
    with codes.builder.if_then(any_not_finite(codes, table).llvm):
        save(place, constant(place, "f32", float("nan"), 1))


def _of_hub(hub: HubType) -> Callable[[Value, Value, Value, Value], None]:
    def take_apart(raw, out, head, lane):
        at = 0
        if not hub.row_header:
            _header(hub, raw, head, lane)
            at = hub.header_bytes
        for column in range(0, hub.columns, UNIT):
            if hub.by_16:
                save(head + lane, load(raw, "u8"), 1)
                at += 1
            codes = codes_of_planes(raw + at, hub.planes, UNIT, False)
            put_words(out + 16 * column, codes)
            if hub.table in FLOATS8:
                _spoil_unless_finite(codes, hub.table, hub, head, lane)
            at += UNIT * hub.bits // 8
    return take_apart


def row_header(name: str, raw: Value, head: Value, lane: Value) -> None:
    """The header that a row has before its blocks."""
    _header(HUB_TYPES[name], raw, head, lane)


# The function by tensor type.
HUB_BLOCKS = {name: _of_hub(hub) for name, hub in HUB_TYPES.items()}
