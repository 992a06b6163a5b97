"""Products of tcgen05: tcgen05.mma of 128 rows, and tcgen05.cp of block scales. tensor.py has the state and the checks.

Scales of 128 rows of A or B: in column c of lanes l, l + 32, l + 64 and l + 96 the scales of row 32 c + l.
"""

import numpy as np

from .bulk import PIECE, WARP
from .findings import Fault
from .operands import address, getter, wide
from .races import READ
from .tensor import BINDERS, COLUMNS, LANES, one_of_each_warp
from .tiles import ROW, TURNED
from .warps import E4M3, READERS

SWIZZLES = {0: 0, 2: 1, 4: 2, 6: 3}             # layout types of a matrix descriptor, as the swizzle modes of wgmma
KINDS = {"kind_f8f6f4": ({0: "e4m3", 1: "e5m2"}, 32), "kind_mxf4nvf4": ({1: "e2m1"}, 64),
         "kind_mxf4": ({1: "e2m1"}, 64)}        # by kind: formats of the operands, columns of a product
HALVES = {"kind_f8f6f4": 2, "kind_mxf4nvf4": 4, "kind_mxf4": 4}   # multiplications that take as long as one of float16
OPERANDS = {2: "bytes", 4: "fours"}
VECTORS = {"kind_mxf4nvf4": ("scale_vec_4X", 4, 0), "kind_mxf4": ("scale_vec_2X", 2, 1)}  # scales of a row, and format
QUARTER, SCALES = 32, 4                         # lanes of a warp; columns of the scales of 128 rows
NONE = np.zeros(0, np.int64)


def _multiply(step):
    """tcgen05.mma of 128 rows, both tiles K-major in shared memory, float32 results; with the scales of blocks."""
    kind = next((part for part in step.parts if part in KINDS), None)
    scaled = kind in VECTORS
    if kind is None or len(step.operands) != 5 + 2 * scaled or scaled != ("block_scale" in step.parts) \
            or (scaled and VECTORS[kind][0] not in step.parts):
        raise Fault(f"no such tcgen05 here: {step.text}")
    depth = KINDS[kind][1]
    where, adds = address(step.operands[0]), getter(step.operands[-1], "pred")
    scales_of = [address(operand) for operand in step.operands[4:-1]]
    tiles_of = [wide(operand, "u64") for operand in step.operands[1:3]]
    instruction_of = wide(step.operands[3], "u32")

    def run(machine, mask):
        lanes, places = one_of_each_warp(machine, step, mask), machine.spread(np.asarray(where(machine)))
        for lane in lanes.tolist():
            block = lane // machine.grid.threads
            across, kinds = _instruction(step, int(instruction_of(machine)[lane]), kind)
            first_lane, index = machine.tensor.place(step, int(places[lane]), across, block)
            if first_lane:
                raise Fault(f"a product of 128 rows in lane {first_lane} of tensor memory: {step.text}")
            parts = [_tile(machine, step, int(get(machine)[lane]), rows, lane)
                     for get, rows in zip(tiles_of, (LANES, across))]
            scales = [_scales(machine, step, int(machine.spread(np.asarray(get(machine)))[lane]), rows, block, kind)
                      for get, rows in zip(scales_of, (LANES, across))]
            machine.tensor.start(step, lane, index, np.unique(np.concatenate([pieces for pieces, _ in parts])),
                                 np.concatenate([NONE, *(columns for columns, _ in scales)]))
            left, right = (READERS[name](np.ascontiguousarray(data).reshape(-1).view(np.uint32)).reshape(len(data), -1)
                           for name, (_, data) in zip(kinds, parts))
            if scaled:
                left, right = (side * np.repeat(by, depth // by.shape[1], 1)
                               for side, (_, by) in zip((left, right), scales))
            columns = slice(int(index[0]) - block * COLUMNS, int(index[0]) - block * COLUMNS + across)
            words, written = machine.tensor.words[block, :, columns], machine.tensor.written[block, :, columns]
            accumulates = bool(np.broadcast_to(adds(machine), machine.n)[lane])
            if accumulates and machine.checks.unwritten and not written.all():
                machine.note(f"a product is added to tensor memory that is not written: {step.text}")
            product = left @ right.T
            words[:] = words + product if accumulates else product
            written[:] = True
            if machine.counters:
                machine.counters.products[f"tcgen05 of {OPERANDS[HALVES[kind]]}"] += LANES * across * depth
                machine.timeline.product(lane // WARP, LANES * across * depth / HALVES[kind])
    return run


def _instruction(step, word: int, kind: str) -> tuple[int, list[str]]:
    """Columns of a product, and formats of its operands, from the instruction descriptor.

    Bits 4 and 5 are the format of the results, or with scales the byte at which those of B begin; bit 23 is the format
    of the scales.
    """
    kinds, across = [KINDS[kind][0].get(word >> at & 7) for at in (7, 10)], 8 * (word >> 17 & 63)
    reserved = word & (0b1111 | 1 << 6 | 0b1111 << 13 | 7 << 29)              # sparsity, negation, transposition
    results, scales = (0, VECTORS[kind][2]) if kind in VECTORS else (1, 0)
    if reserved or None in kinds or word >> 4 & 3 != results or word >> 23 & 1 != scales \
            or word >> 24 & 31 != LANES >> 4 or not 16 <= across <= 256 or across % 16:
        raise Fault(f"an instruction descriptor {word:#x} that does not fit: {step.text}")
    return across, kinds


def _tile(machine, step, word: int, rows: int, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """32 bytes of each row of a tile by its matrix descriptor: pieces of shared memory, and bytes [rows, 32]."""
    start, lead, stride, mode = _descriptor(step, word)
    if mode and start // ROW[mode] * ROW[mode] % (8 * ROW[mode]):
        raise Fault(f"a tile begins within the pattern of its swizzle: {step.text}")
    row, chunk = np.arange(rows)[:, None], np.arange(2)
    place = start + row // 8 * stride + row % 8 * ROW[mode] + chunk * (16 if mode else lead)
    place = (place ^ (place >> 7 & TURNED[mode]) << 4).ravel()
    pieces, data = _read(machine, step, place, lane)
    return pieces, data.reshape(rows, 32)


def _descriptor(step, word: int) -> tuple[int, int, int, int]:
    """Fields of a matrix descriptor: address, leading and stride offsets, swizzle mode of wgmma."""
    start, lead, stride = ((word >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    mode = SWIZZLES.get(word >> 61)
    if mode is None or word >> 46 & 7 != 1 or word >> 49 & 0xFFF or word & (3 << 14 | 3 << 30):
        raise Fault(f"a matrix descriptor {word:#x} that does not fit: {step.text}")
    return start, lead, stride, mode


def _read(machine, step, place: np.ndarray, lane: int) -> tuple[np.ndarray, np.ndarray]:
    """Read pieces of shared memory for a lane, with the checks of the asynchronous proxy: their indices, and bytes
    [pieces, 16]."""
    shared, lanes = machine.shared, np.full(place.size, lane, np.int32)
    offset = shared.offsets(place, PIECE, machine.block[lanes], "shared read")
    words = offset[:, None] // 4 + np.arange(4)
    if shared.in_flight and shared.pending[words].any():
        machine.note(f"shared memory is read before a copy into it has landed: {step.text}")
    if machine.tiles.unfenced[words].any():
        machine.note(f"a tile was written without a fence.proxy.async afterwards: {step.text}")
    if machine.checks.unwritten and not shared.is_written(offset, PIECE):
        machine.note(f"shared memory is read before it is written: {step.text}")
    machine._log(machine.log_shared, step, offset, PIECE, READ, lanes)
    machine.bulk._check_copied(step, offset // PIECE, lanes // WARP)
    if machine.counters:
        machine.counters.of("shared", "read").add(1, place.size // 8, place.size // 8, PIECE * place.size)
    return offset // PIECE, shared.bytes[offset[:, None] + np.arange(PIECE)]


def _scales(machine, step, where: int, rows: int, block: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The columns of scale words, and the scales of each row in them, float32 [rows, scales]."""
    lane, index = machine.tensor.place(step, where, -(-rows // QUARTER), block)
    columns = index - block * COLUMNS
    words = machine.tensor.words[block][:, columns].view(np.uint32)
    if lane:
        raise Fault(f"scales in lane {lane} of tensor memory: {step.text}")
    if machine.checks.unwritten and not machine.tensor.written[block][:, columns].all():
        machine.note(f"scales in tensor memory are read before they are written: {step.text}")
    bytes_ = np.ascontiguousarray(words[:QUARTER].T).reshape(-1)[:rows].view(np.uint8).reshape(rows, 4)
    bytes_ = bytes_[:, :VECTORS[kind][1]]
    if VECTORS[kind][2]:
        return index, np.ldexp(np.float32(1), bytes_.astype(np.int32) - 127)
    return index, np.where(bytes_ & 128, np.float32("nan"), E4M3[bytes_ & 127])


def _copy(step):
    """tcgen05.cp of 32 rows of 16 bytes to each quarter of the lanes."""
    if {"32x128b", "warpx4"} - set(step.parts) or len(step.operands) != 2:
        raise Fault(f"no such tcgen05 here: {step.text}")
    where, source = address(step.operands[0]), wide(step.operands[1], "u64")

    def run(machine, mask):
        places = machine.spread(np.asarray(where(machine)))
        for lane in one_of_each_warp(machine, step, mask).tolist():
            block = lane // machine.grid.threads
            first_lane, index = machine.tensor.place(step, int(places[lane]), SCALES, block)
            start, _, stride, mode = _descriptor(step, int(source(machine)[lane]))
            if mode or first_lane:
                raise Fault(f"no such tcgen05 here: {step.text}")
            row = np.arange(QUARTER)
            pieces, data = _read(machine, step, start + row // 8 * stride + row % 8 * PIECE, lane)
            machine.tensor.start(step, lane, index, pieces, NONE)
            columns = slice(int(index[0]) - block * COLUMNS, int(index[0]) - block * COLUMNS + SCALES)
            words = np.ascontiguousarray(data).view(np.float32)
            machine.tensor.words[block, :, columns] = np.tile(words, (LANES // QUARTER, 1))
            machine.tensor.written[block, :, columns] = True
    return run


BINDERS.update({"mma": _multiply, "cp": _copy})
