"""Taking apart blocks of numflow.quant.hub_types: a header, then codes, as functions for the packing kernels
(pack_blocks.py says what each takes)."""

from collections.abc import Callable

from numflow.cpu.simd.value import Value, load, save
from numflow.quant.hub_types import HUB_TYPES, HubType

_NIBBLES = 0x0F0F0F0F


def _of_hub(hub: HubType) -> Callable[[Value, Value, Value, Value], None]:
    size = 4 if hub.scale == "F32" else 2
    flip = 0 if hub.zero or hub.table else 128  # bytes with a sign become codes

    def take_apart(raw, out, head, lane):
        save(head + lane * size, load(raw, "i32" if size == 4 else "u16"), size)
        if hub.zero:
            save(head + 32 + lane * 2, load(raw + 2, "u16"), 2)
        for column in range(0, hub.block, 16):
            if hub.by_16:
                save(head + 64 + column + lane, load(raw + 4 + column // 16, "u8"), 1)
            if hub.bits == 8:
                codes = load(raw + hub.header_bytes + column, "u8", 16)
                words = ((codes + flip) if flip else codes).as_("i32", 4)
            else:
                words = load(raw + hub.header_bytes + column // 32 * 16, "i32", 4) >> 4 * (column // 16 % 2) & _NIBBLES
            for i in range(4):
                save(out + 64 * (column // 4 + i), words.lane(i))
    return take_apart


# The function by tensor type.
HUB_BLOCKS = {name: _of_hub(hub) for name, hub in HUB_TYPES.items()}
