"""Unpacking of stored rows in NumPy: a function `fields(raw, columns)` for each group of types.

Input: rows uint8 [N, row_bytes]. Results: codes [N, columns] and header values, each [N, ...], as stored.py defines
them for the type's kind. Blocks are u8 [N, blocks, bytes of a block].
"""

from collections.abc import Callable

import numpy as np

from numflow.quant.bits import unpack_planes
from numflow.quant.grids import BLOCK, GridType
from numflow.quant.hub_types import SIZES, TABLES, UNIT, HubType
from numflow.quant.inferflow import BYTES, SYMMETRIC, InferflowScheme
from numflow.quant.layout import PAIR_LEVELS, RowScheme, unpack_reference

Fields = tuple[np.ndarray, tuple[np.ndarray, ...]]
Take = Callable[[np.ndarray, int], Fields]


def _by_blocks(block: int) -> Callable[[Callable[..., Fields]], Take]:
    """Decorator: a function of blocks becomes a function of rows with blocks of `block` weights."""
    def of_rows(of_blocks: Callable[..., Fields]) -> Take:
        def fields(raw: np.ndarray, columns: int) -> Fields:
            n = len(raw)
            codes, values = of_blocks(raw.reshape(n, columns // block, raw.shape[1] // (columns // block)))
            return codes.reshape(n, columns), tuple(value.reshape(n, -1) for value in values)

        return fields

    return of_rows


def _half(blocks: np.ndarray, offset: int, times: int = 1) -> np.ndarray:
    """Bits of the float16 at a byte offset, repeated for the units that share it."""
    return np.repeat(np.ascontiguousarray(blocks[..., offset:offset + 2]).view("<u2")[..., 0], times, axis=1)


def _shifted(fields: np.ndarray, *shifts: int) -> np.ndarray:
    """[..., n] as [..., shifts, n]."""
    return fields[..., None, :] >> np.array(shifts, np.uint8)[:, None]


def _nibbles(blocks: np.ndarray, offset: int, high: int = 0) -> np.ndarray:
    """32 codes of 4 bits from a byte offset: 16 low nibbles, then 16 high ones. high: byte offset of bit 4, 0 for
    none."""
    codes = (_shifted(blocks[..., offset:offset + 16], 0, 4) & 15).reshape(*blocks.shape[:2], 32)
    return codes | np.unpackbits(blocks[..., high:high + 4], axis=2, bitorder="little") << 4 if high else codes


def _runs(blocks: np.ndarray, offset: int, size: int, bits: int) -> np.ndarray:
    """256 codes of 1, 2 or 4 bits: runs of 32 columns share the same 32 bytes, in successive bits."""
    shared = blocks[..., offset:offset + size].reshape(*blocks.shape[:2], -1, 32)
    return (_shifted(shared, *range(0, 8, bits)) & (1 << bits) - 1).reshape(*blocks.shape[:2], 256)


@_by_blocks(32)
def q4_0(blocks):
    return _nibbles(blocks, 2), (_half(blocks, 0),)


@_by_blocks(32)
def q4_1(blocks):
    return _nibbles(blocks, 4), (_half(blocks, 0), _half(blocks, 2))


@_by_blocks(32)
def q5_0(blocks):
    return _nibbles(blocks, 6, 2), (_half(blocks, 0),)


@_by_blocks(32)
def q5_1(blocks):
    return _nibbles(blocks, 8, 4), (_half(blocks, 0), _half(blocks, 2))


@_by_blocks(32)
def q8_0(blocks):
    return blocks[..., 2:] ^ 128, (_half(blocks, 0),)


@_by_blocks(256)
def q2_k(blocks):
    scales = blocks[..., :16]
    return _runs(blocks, 16, 64, 2), (_half(blocks, 80), _half(blocks, 82), scales & 15, scales >> 4)


@_by_blocks(256)
def q3_k(blocks):
    low, high = _shifted(blocks[..., 96:104], 0, 4) & 15, _shifted(blocks[..., 104:108], 0, 2, 4, 6) & 3
    scales = (low.reshape(*blocks.shape[:2], 16) | high.reshape(*blocks.shape[:2], 16) << 4) - np.uint8(32)
    return _runs(blocks, 32, 64, 2) | _runs(blocks, 0, 32, 1) << 2, (_half(blocks, 108), scales.view(np.int8))


def _k_header(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """d, e, and eight 6-bit scales and minima from 12 bytes."""
    s, m, both = (blocks[..., offset:offset + 4] for offset in (4, 8, 12))
    scales = np.concatenate([s & 63, both & 15 | s >> 6 << 4], axis=2)
    minima = np.concatenate([m & 63, both >> 4 | m >> 6 << 4], axis=2)
    return _half(blocks, 0), _half(blocks, 2), scales, minima


@_by_blocks(256)
def q4_k(blocks):
    return _runs(blocks, 16, 128, 4), _k_header(blocks)


@_by_blocks(256)
def q5_k(blocks):
    return _runs(blocks, 48, 128, 4) | _runs(blocks, 16, 32, 1) << 4, _k_header(blocks)


@_by_blocks(256)
def q6_k(blocks):
    low = _shifted(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), 0, 4) & 15  # runs 0 and 1, then 2 and 3
    codes = low.reshape(*blocks.shape[:2], 256) | _runs(blocks, 128, 64, 2) << 4
    return codes, (_half(blocks, 208), blocks[..., 192:208].view(np.int8))


@_by_blocks(256)
def iq4_xs(blocks):
    high = (_half(blocks, 2)[..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=3).reshape(high.shape)
    codes = _shifted(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16), 0, 4) & 15
    return codes, (_half(blocks, 0), ((low | high << 4) - np.uint8(32)).view(np.int8))


@_by_blocks(32)
def mxfp4(blocks):
    exponent = blocks[..., 0].astype(np.uint16)  # 2^(e - 128) as bfloat16, whose smallest powers are subnormal
    return _nibbles(blocks, 1), (np.where(exponent > 1, (exponent - 1) << 7, exponent * 32 + 32).astype(np.uint16),)


@_by_blocks(64)
def nvfp4(blocks):
    codes = _shifted(blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8), 0, 4) & 15
    bits = np.arange(256) & 127  # unsigned E4M3; code 127 becomes 0
    halves = np.where(bits >> 3, np.ldexp(8 + bits % 8, (bits >> 3) - 11), bits * 2.0**-10)
    halves[127] = 0
    return codes, (halves.astype(np.float16).view(np.uint16)[blocks[..., :4]],)


@_by_blocks(128)
def q1_0(blocks):
    return np.unpackbits(blocks[..., 2:], axis=2, bitorder="little") << 1, (_half(blocks, 0, 4),)


def q2_0(block: int) -> Take:
    @_by_blocks(block)
    def fields(blocks):
        return blocks[..., 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3, (_half(blocks, 0, block // 32),)

    return fields


@_by_blocks(256)
def tq1_0(blocks):
    digits = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]  # powers of 3: each moves the next base-3 digit to the top
    runs = [(blocks[..., None, first:end] * digits[:count]).reshape(*blocks.shape[:2], -1)
            for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return (np.concatenate(runs, axis=2).astype(np.uint16) * 3 >> 8).astype(np.uint8), (_half(blocks, 52, 8),)


@_by_blocks(256)
def tq2_0(blocks):
    return _runs(blocks, 0, 64, 2), (_half(blocks, 64, 8),)


def of_grids(grid: GridType) -> Take:
    @_by_blocks(BLOCK)
    def fields(blocks):
        d, scales, packed = grid.fields(blocks.reshape(-1, blocks.shape[2]))
        nibbles = np.ascontiguousarray(packed.astype("<u4", copy=False)).view(np.uint8)
        codes = np.stack([nibbles & 15, nibbles >> 4], axis=2)
        shape = *blocks.shape[:2], -1
        return codes.reshape(shape), (np.ascontiguousarray(d).view("<u2").reshape(shape),
                                      scales.astype(np.int8).reshape(shape))

    return fields


HALVES_OF_E4M3 = TABLES["e4m3"].astype(np.float16).view(np.uint16)


def of_hub(hub: HubType) -> Take:
    def fields(raw: np.ndarray, columns: int) -> Fields:
        n, count = len(raw), columns // hub.columns
        row, blocks = raw[:, :hub.row_header], raw[:, hub.row_header:].reshape(n, count, hub.size)
        header = row[:, None] if hub.row_header else blocks[..., :hub.header_bytes]
        units = blocks[..., 0 if hub.row_header else hub.header_bytes:].reshape(n, -1, hub.unit_bytes)
        codes = unpack_planes(units[..., hub.by_16:], hub.planes, UNIT).reshape(n, columns)
        values = [_numbers(header[..., :SIZES[hub.scale]], hub.scale)]
        if hub.zeros:
            values.append(_numbers(header[..., SIZES[hub.scale]:], hub.zeros))
        if hub.by_16:
            values.append(HALVES_OF_E4M3[units[..., 0]])
        return codes, tuple(values)

    return fields


def _numbers(data: np.ndarray, kind: str) -> np.ndarray:
    """Scales or zero points [N, headers] from bytes [N, headers, size]; 16-bit floats as raw bits."""
    return np.ascontiguousarray(data).view({1: "u1", 2: "<u2", 4: "<f4"}[SIZES[kind]])[..., 0]


def own(scheme: RowScheme) -> Take:
    def fields(raw: np.ndarray, columns: int) -> Fields:
        unpacked = unpack_reference(raw, scheme, columns)
        return unpacked.codes, (unpacked.rows[:, None], unpacked.blocks)

    return fields


def inferflow(scheme: InferflowScheme) -> Take:
    @_by_blocks(scheme.block)
    def fields(blocks):
        codes, times = unpack_planes(blocks[..., scheme.header:], scheme.planes, scheme.codes), scheme.block // 32
        if scheme.paired:
            codes = np.stack([codes % PAIR_LEVELS, np.minimum(codes // PAIR_LEVELS, PAIR_LEVELS - 1)], axis=-1)
        if scheme.rule == BYTES:
            return codes, (blocks[..., 1], blocks[..., 0])
        if scheme.rule == SYMMETRIC:
            return codes ^ 128, (_half(blocks, 0),)
        scale, base = (0, 2) if scheme.scale_first else (2, 0)
        return codes, (_half(blocks, scale, times), _half(blocks, base, times))

    return fields


def plain(dtype: str) -> Take:
    def fields(raw: np.ndarray, columns: int) -> Fields:
        return np.ascontiguousarray(raw).view(dtype), ()

    return fields
