"""Upload of a stored matrix to a device: floats are copied; quantised rows are repacked by a kernel for each type.

Rows of types without such a kernel are repacked on the host (pack_fields.py). Nothing is re-quantised: codes and
headers are those of the file, bit for bit. Rows are uploaded in stages, so that the device never holds a matrix twice.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from numflow.cuda.device.call import ceil
from numflow.cuda.device.device import MOST_BLOCKS, Device, Launch, Ref, within_reach
from numflow.cuda.lang.intrinsics import block_x, block_y, thread_index
from numflow.cuda.lang.kernel import Kernel, kernel
from numflow.cuda.lang.scalar import u8, u16, u32
from numflow.cuda.weights.layout import SCHEMES, UNIT, Matrix, Scheme
from numflow.cuda.weights.operand import padded
from numflow.cuda.weights.outliers import slots_of
from numflow.cuda.weights.pack_fields import planes
from numflow.cuda.weights.pack_types import PACKED, codes_of, headers_of
from numflow.errors import NetworkError
from numflow.formats.types import tensor_type
from numflow.network.weights.source import RawMatrix
from numflow.quant import SCHEMES as QUANT_SCHEMES
from numflow.quant.apart import Outliers, take_apart, with_outliers
from numflow.quant.grids import BLOCK, GRIDS, spread
from numflow.quant.stored import STORED, kept_as

STAGE = 64 << 20  # bytes of rows that are uploaded at a time
PART = 4 << 20    # weights that a CPU thread packs at a time
PARTS = ("low", "high", "two", "one", "head", "above", "row")  # in the order of kernel parameters


def upload(raw: RawMatrix, device: Device) -> Matrix:
    """Upload a stored matrix [N, K] to a device.

    Raises:
        NetworkError: the stored rows do not match the shape and the type.
        FormatError: a type that cannot be converted to floats.
    """
    (n, columns), rows = raw.shape, raw.rows
    if n % raw.groups or rows.shape[0] != n:
        raise NetworkError(f"matrix {raw.name!r} of shape {list(raw.shape)} in {raw.groups} groups has "
                           f"{rows.shape[0]} stored rows")
    apart = with_outliers(raw.type, QUANT_SCHEMES)
    stored = apart.base.name if apart else raw.type
    kept = kept_as(stored, columns)
    wanted = stored_bytes(raw.type, columns) if stored in STORED else rows.shape[1]
    if rows.shape[1] != wanted:
        raise NetworkError(f"matrix {raw.name!r}: rows of {rows.shape[1]} bytes, not {columns} {raw.type} numbers")
    if kept.is_float:
        if stored in STORED and STORED[stored].kind == kept:
            return _upload_floats(raw, rows, kept.name, device, None)
        values = raw.f32() if kept.name == "f32" else raw.f32().astype(np.float16)
        return _upload_floats(raw, values.view(np.uint8), kept.name, device, raw.type)
    base, outliers = raw, raw.outliers
    if apart:
        rows, outliers = take_apart(rows, apart, columns)
        base = replace(raw, type=apart.base.name, rows=rows)
    matrix = replace(_upload_codes(base, device), type=raw.type)
    return matrix if outliers is None else _with_outliers(matrix, outliers, device)


def _with_outliers(matrix: Matrix, outliers: Outliers, device: Device) -> Matrix:
    slots = slots_of(outliers)
    if slots.size == 0:
        return matrix
    memory = device.alloc(slots.nbytes)
    device.upload(memory.at(), slots)
    return replace(matrix, outliers=slots.shape[1], nbytes=matrix.nbytes + memory.nbytes,
                   parts={**matrix.parts, "outliers": memory.at()})


def stored_bytes(kind: str, columns: int) -> int:
    """Bytes of a stored row of `columns` weights; -1 if they are not a whole number of blocks."""
    stored = tensor_type(kind)
    return -1 if columns % stored.block else stored.row_bytes(columns)


def _upload_floats(raw: RawMatrix, rows: np.ndarray, kind: str, device: Device, expanded: str | None) -> Matrix:
    (n, columns), size, pitch = raw.shape, 4 if kind == "f32" else 2, padded(raw.shape[1])
    memory = device.alloc(within_reach(f"matrix {raw.name}", n * pitch * size))
    step = max(1, STAGE // (pitch * size))
    for first in range(0, n, step):
        some = rows[first:first + step]
        if pitch != columns:
            some = np.pad(some, ((0, 0), (0, (pitch - columns) * size)))
        device.upload(memory.at(first * pitch * size), some)
    return Matrix(kind, raw.type, raw.shape, raw.groups, pitch, memory.nbytes, {"codes": memory.at()}, expanded)


def _upload_codes(raw: RawMatrix, device: Device) -> Matrix:
    (n, columns), scheme, parts, at = raw.shape, SCHEMES[STORED[raw.type].kind.name], {}, 0
    columns = padded(columns)
    for name, (size, per) in scheme.parts.items():
        parts[name], at = at, at + ceil(n * size * (columns // per if per else 1), 256) * 256
    memory = device.alloc(within_reach(f"matrix {raw.name}", at))
    refs = {name: memory.at(offset) for name, offset in parts.items()}
    (_pack_there if raw.type in PACKED else _pack_here)(raw, refs, device)
    return Matrix(scheme.name, raw.type, raw.shape, raw.groups, columns, memory.nbytes, refs)


def _pack_there(raw: RawMatrix, refs: dict[str, Ref], device: Device) -> None:
    """Pack on the device, by the type's kernel."""
    (n, columns), grids, units = raw.shape, raw.type in GRIDS, raw.shape[1] // UNIT
    row_bytes = columns // BLOCK * GRIDS[raw.type].spread_bytes if grids else raw.rows.shape[1]
    step = min(max(1, STAGE // row_bytes), MOST_BLOCKS[1])  # the grid's y dimension is the row
    stage = device.alloc(min(n, step) * row_bytes)
    pack = pack_kernel(raw.type)
    for first in range(0, n, step):
        some = raw.rows[first:first + step]
        device.upload(stage.at(), spread(some, raw.type, columns) if grids else some)
        device.launch(Launch(pack, (ceil(units, 32), len(some), 1), (
            stage.at(), *(refs.get(name) for name in PARTS), row_bytes, first, units)))
    device.free(stage)


def _pack_here(raw: RawMatrix, refs: dict[str, Ref], device: Device) -> None:
    """Pack on the host, on all CPU cores, from the type's fields."""
    from numflow.quant.threads import default_threads

    (n, columns), stored = raw.shape, STORED[raw.type]
    step, scheme = max(1, PART // columns), SCHEMES[stored.kind.name]

    def packed(first: int) -> dict[str, np.ndarray]:
        return planes(scheme, *stored.fields(raw.rows[first:first + step], columns))

    with ThreadPoolExecutor(default_threads()) as pool:
        for first, parts in zip(range(0, n, step), pool.map(packed, range(0, n, step)), strict=True):
            for name, part in parts.items():
                whole = np.pad(part.reshape(-1), (0, 3)) if part.size % 4 else part  # kernels read whole words
                device.upload(refs[name] + first * part.shape[1], whole)


@functools.cache
def pack_kernel(kind: str) -> Kernel:
    """The packing kernel of a tensor type: one thread for each unit reads the codes one by one and writes the
    planes."""
    scheme: Scheme = SCHEMES[STORED[kind].kind.name]
    code, (head, above, constant) = codes_of(kind), headers_of(kind)
    bits, book, pair = scheme.bits, bool(scheme.book), scheme.paired
    has = {name: name in scheme.parts for name in PARTS}
    has_low, has_two, has_one, has_head, has_above, has_row = (has[name] for name in PARTS if name != "high")
    wide = has_head and scheme.parts["head"][0] == 4
    two_shift = 4 if bits == 6 else 0
    one_shift = {1: 1, 5: 4}.get(bits, 2)

    @kernel(f"pack_{kind.lower()}", 32)
    def _pack(raw: u8.ptr, low: u32.ptr, high: u32.ptr, two: u32.ptr, one: u32.ptr, head_: u16.ptr, above_: u32.ptr,
              row_: u32.ptr, row_bytes: u32, first: u32, units: u32):
        unit, row = u32(block_x() * 32 + thread_index()), block_y()
        if unit >= units:
            return
        # The unit's row in the file, and its index in the planes.
        source = raw + row * row_bytes
        place = (row + first) * units + unit
        # The plane `low`: lower bits of 32 codes. Pairs and bytes have orders of their own.
        if has_low:
            for j in range(4):
                word, upper = u32(0), u32(0)
                for i in range(8):
                    c = code(source, unit, u32(8 * j + i), units)
                    if pair:
                        word = u32(word + (c << u32(8 * i) if i < 4 else u32(c * 11) << u32(8 * (i - 4))))
                    elif bits == 8:
                        if i < 4:
                            word = u32(word | c << u32(8 * i))
                        else:
                            upper = u32(upper | c << u32(8 * (i - 4)))
                    elif book:
                        word = u32(word | c << u32(4 * i))
                    else:
                        word = u32(word | (c & u32(15)) << u32(8 * (i & 3) + 4 * (i >> 2)))
                if pair and j < 2:
                    bits_ = head(source, unit, units) >> u32(3 * j) & u32(7)
                    word = u32(word | (bits_ & u32(1)) << u32(7) | (bits_ & u32(2)) << u32(14)
                               | (bits_ & u32(4)) << u32(21))
                # Write the words; 8-bit codes have a second plane.
                if bits == 8:  # two words for 8 columns: groups 2j and 2j + 1
                    if j < 2:
                        low[4 * place + 2 * j], low[4 * place + 2 * j + 1] = word, upper
                    else:
                        high[4 * place + 2 * j - 4], high[4 * place + 2 * j - 3] = word, upper
                else:
                    low[4 * place + j] = word
        # The planes of 2 bits and of 1 bit.
        if has_two:
            for j in range(2):
                word = u32(0)
                for i in range(16):
                    c = code(source, unit, u32(16 * j + i), units) >> u32(two_shift)
                    word = u32(word | (c & u32(3)) << u32(8 * (i & 3) + 2 * (i >> 2)))
                two[2 * place + j] = word
        if has_one:
            word = u32(0)
            for i in range(32):
                c = code(source, unit, u32(i), units) >> u32(one_shift)
                word = u32(word | (c & u32(1)) << u32(8 * (i & 3) + (i >> 2)))
            one[place] = word
        # Headers of the unit, of 8 units, of the row.
        if has_head:
            value = head(source, unit, units)
            if wide:
                head_[2 * place], head_[2 * place + 1] = u16(value), u16(value >> u32(16))
            else:
                head_[place] = u16(value)
        if has_above and unit & u32(7) == 0:
            above_[place >> u32(3)] = above(source, unit)
        if has_row and unit == 0:
            for i in range(4):
                row_[4 * (row + first) + i] = constant(source, u32(i))

    return _pack
