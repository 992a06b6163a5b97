"""Unpacking of the types of numflow.quant.hub_types: blocks, and the header of a row before its blocks.

The functions emit code of packing kernels; pack_blocks.py explains their arguments. If one 8-bit float of a row or
block is infinite or NaN, its scale becomes NaN: kernels then need no check for non-finite codes.
"""

from collections.abc import Callable

from numflow.cpu.simd.value import Value, constant, load, save
from numflow.cpu.weights.pack_planes import codes_of_planes, put_words
from numflow.cpu.weights.tables import FLOATS8, any_not_finite
from numflow.quant.hub_types import HUB_TYPES, SIZES, UNIT, HubType

_WORDS = {1: "u8", 2: "u16", 4: "i32"}


def _header(hub: HubType, raw: Value, header: Value, lane: Value) -> None:
    """Copy d and z of a row's header to the headers of 16 rows."""
    source, target = 0, 0
    for size in filter(None, (SIZES[hub.scale], SIZES[hub.zeros])):
        save(header + target + lane * size, load(raw + source, _WORDS[size]), size)
        source, target = source + size, target + 16 * size


def _spoil_unless_finite(codes: Value, table: str, hub: HubType, header: Value, lane: Value) -> None:
    """Set the scale to NaN if one of u8x16 is infinite or NaN."""
    address = header - 16 * hub.row_header + (lane << 2)
    with codes.builder.if_then(any_not_finite(codes, table).llvm):
        save(address, constant(address, "f32", float("nan"), 1))


def _of_hub(hub: HubType) -> Callable[[Value, Value, Value, Value], None]:
    def unpack(raw, out, header, lane):
        offset = 0
        if not hub.row_header:
            _header(hub, raw, header, lane)
            offset = hub.header_bytes
        for column in range(0, hub.columns, UNIT):
            if hub.by_16:
                save(header + lane, load(raw, "u8"), 1)
                offset += 1
            codes = codes_of_planes(raw + offset, hub.planes, UNIT, False)
            put_words(out + 16 * column, codes)
            if hub.table in FLOATS8:
                _spoil_unless_finite(codes, hub.table, hub, header, lane)
            offset += UNIT * hub.bits // 8
    return unpack


def row_header(name: str, raw: Value, header: Value, lane: Value) -> None:
    """Copy the header that a row has before its blocks."""
    _header(HUB_TYPES[name], raw, header, lane)


# Unpacking function by tensor type.
HUB_BLOCKS = {name: _of_hub(hub) for name, hub in HUB_TYPES.items()}
