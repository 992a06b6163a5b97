"""Packing: from a matrix as stored in a file to the packed layout (layout.py), bit for bit."""

from collections.abc import Callable

import numpy as np

from numflow.cpu.memory.arena import Arena
from numflow.cpu.memory.buffers import aligned
from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.weights.layout import PACK_SCRATCH, SPREAD, Packed, scheme_of, tiles_of
from numflow.cpu.weights.outliers import pack_outliers
from numflow.errors import NetworkError
from numflow.formats.mapped import release_pages
from numflow.formats.types import tensor_type, to_f32
from numflow.network.weights.source import RawMatrix
from numflow.quant import SCHEMES as QUANT_SCHEMES
from numflow.quant.apart import take_apart, with_outliers
from numflow.quant.grids import BLOCK, GRIDS, compact
from numflow.quant.grids import spread as to_codes
from numflow.quant.stored import STORED, kept_as

_SMALL = 1 << 21        # bytes below which one thread packs
_PART_BYTES = 1 << 24   # bytes packed at a time
_EXPAND_BYTES = 1 << 24  # bytes of expanded rows at a time
_ARENA = Arena()
KERNELS = ("numflow.cpu.weights.pack_kernels", "numflow.cpu.weights.pack_own_kernels")
# Kernels of float types; every other type has a stamp of its own.
_NAMES = {"F32": "pack_32_bits", "F16": "pack_16_bits", "BF16": "pack_16_bits"}
STAMPS = {f"pack_{name.lower()}": ("pack_own" if stored.kind.is_own else "pack_type", (name,))
          for name, stored in STORED.items() if name not in _NAMES}
STAMPS |= {f"pack_{(name + SPREAD).lower()}": ("pack_type", (name + SPREAD,)) for name in GRIDS}
_CODE = Code(*KERNELS, stamps=STAMPS)


def pack(raw: RawMatrix, threads: int = 1, spread: bool = False) -> Packed:
    """A stored matrix [N, K] in the packed layout, with the same weights. spread: grid types with a code per weight.

    Types without kernels of their own are expanded to floats (quant.stored.EXPANDED). Types with blocks of 16 columns
    are expanded to float32 if a row does not end with a whole unit of 32. `expanded_from` of the result then has the
    file's type.

    Raises:
        NetworkError: the stored rows do not fit the shape and the type.
        FormatError: the type cannot be expanded.
    """
    (n, columns), apart, outliers = raw.shape, with_outliers(raw.type, QUANT_SCHEMES), raw.outliers
    if apart and n and raw.rows.shape[0] == n:
        _, outliers = take_apart(raw.rows, apart, columns)
    stored = apart.base.name if apart else raw.type
    if n % raw.groups or raw.rows.shape[0] != n:
        raise NetworkError(f"matrix {raw.name!r} of shape {list(raw.shape)} in {raw.groups} groups has "
                           f"{raw.rows.shape[0]} stored rows")
    wanted = tensor_type(raw.type)
    if stored in STORED and (columns % wanted.block or raw.rows.shape[1] != wanted.row_bytes(columns)):
        raise NetworkError(f"matrix {raw.name!r}: rows of {raw.rows.shape[1]} bytes, not {columns} {raw.type} numbers")
    kind = kept_as(stored, columns)
    native = stored in STORED and kind == STORED[stored].kind
    tiles = raw.groups * tiles_of(n // raw.groups)
    scheme = scheme_of(kind, spread)
    codes, headers = (_ARENA.zeros(tiles * size) for size in scheme.tile_bytes(columns))
    packed = Packed(scheme.name, stored if native else kind.name.upper(), raw.shape, raw.groups, codes, headers,
                    None if native else raw.type, None if outliers is None else pack_outliers(outliers, raw.groups))
    if not native:
        _convert(raw, packed, threads, 4 * columns, lambda rows: _expanded(raw, rows, packed.type))
    elif stored in GRIDS:
        grid, form = GRIDS[stored], compact if scheme.indexed else to_codes
        size = columns // BLOCK * (grid.compact_bytes if scheme.indexed else grid.spread_bytes)
        _convert(raw, packed, threads, size, lambda rows: form(rows, stored, columns, threads))
    else:
        _pack(raw, packed, threads)
    return packed


def _pack(raw: RawMatrix, packed: Packed, threads: int) -> None:
    """Pack as stored, some whole tiles at a time, so that only these rows of a mapped file are in memory twice."""
    step = max(16, _PART_BYTES // max(1, raw.rows.shape[1]) // 16 * 16) if raw.groups == 1 else len(raw.rows)
    for begin in range(0, len(raw.rows), step):
        rows = raw.rows[begin:begin + step]
        _run(rows, packed, begin // 16, raw.groups, threads)
        release_pages(rows)


def _convert(raw: RawMatrix, packed: Packed, threads: int, size: int,
             change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Pack `change(rows)`, some whole tiles at a time, so that the whole matrix is never in memory twice.

    size: bytes of a row of `change(rows)`.
    """
    group_rows = raw.shape[0] // raw.groups
    step = max(16, _EXPAND_BYTES // size // 16 * 16)
    for group in range(raw.groups):
        for first in range(0, group_rows, step):
            begin = group * group_rows + first
            end = min(begin + step, (group + 1) * group_rows)
            rows = raw.rows[begin:end]
            _run(change(rows), packed, group * packed.group_tiles + first // 16, 1, threads)
            release_pages(rows)


def _expanded(raw: RawMatrix, rows: np.ndarray, kind: str) -> np.ndarray:
    """Some rows as F32 or F16."""
    values = np.ascontiguousarray(to_f32(rows, raw.type), np.float32)
    if values.shape[1] != raw.shape[1]:
        raise NetworkError(f"matrix {raw.name!r}: rows of {values.shape[1]} {raw.type} numbers, not {raw.shape[1]}")
    return (values if kind == "F32" else values.astype(np.float16)).view(np.uint8)


def _run(rows: np.ndarray, packed: Packed, tile: int, groups: int, threads: int) -> None:
    """Pack stored rows of `groups` equal groups into the tiles from `tile` on."""
    if rows.strides[1] != 1:
        rows = np.ascontiguousarray(rows)
    columns, threads = packed.shape[1], 1 if rows.nbytes < _SMALL else threads
    code_bytes, header_bytes = packed.scheme.tile_bytes(columns)
    scratch = aligned(threads * PACK_SCRATCH, np.uint8)
    form = SPREAD if packed.kind.endswith(SPREAD) else ""
    kernel = _CODE.kernel(_NAMES.get(packed.type, f"pack_{packed.type.lower()}{form}"))
    call = Call.of(None, kernel, rows.ctypes.data, rows.strides[0], rows.shape[0] // groups, groups, columns,
                   packed.codes.ctypes.data + tile * code_bytes,
                   packed.headers.ctypes.data + tile * header_bytes, code_bytes, header_bytes, scratch,
                   keep=(rows, packed))
    if threads == 1:
        call()
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda thread: call(thread, threads), range(threads)))
