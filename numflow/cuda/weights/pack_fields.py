"""Packing of codes and header values (numflow/quant/stored.py) into the planes of layout.py, in NumPy.

It packs types without functions in pack_types.py, and is the reference for the kernels of the others.
"""

import numpy as np

from numflow.cuda.weights.layout import UNIT, Scheme
from numflow.quant.layout import PAIR_LEVELS, Fields
from numflow.quant.stored import FACTORED, GRID, SCALED, SIGNED, SUPER, SUPER16, header_numbers
from numflow.quant.stored_fields import HALVES_OF_E4M3


def planes(scheme: Scheme, codes: np.ndarray, values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """The parts of some rows by name, each as bytes u8 [N, ...]. codes: u8 [N, K]."""
    n = len(codes)
    groups = np.pad(codes, ((0, 0), (0, -codes.shape[1] % UNIT))).reshape(n, -1, 8, 4)
    made = dict(zip(scheme.planes, _planes(scheme, groups, values), strict=True))
    if "head" in scheme.parts:
        made["head"] = _head(scheme, values)
    if scheme.header == SCALED and "above" in scheme.parts:
        made["above"] = _whole_units(scheme, values[1])
    elif "above" in scheme.parts:  # d and e, or d and nothing
        made["above"] = _side_by_side(values[0], values[1] if len(values) == 4 else np.zeros_like(values[0]))
    if "row" in scheme.parts:
        made["row"] = (_row(Fields(scheme.own, values[0][:, 0], values[1], codes)) if scheme.is_own
                       else _whole(scheme, values))
    return {name: np.ascontiguousarray(part).reshape(n, -1).view(np.uint8) for name, part in made.items()}


def _side_by_side(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays, axis=-1)


def _or(fields: np.ndarray, axis: int, step: int) -> np.ndarray:
    """Combine the fields along an axis in one byte, each `step` bits above the previous one."""
    first, *others = np.moveaxis(fields, axis, 0)
    made = first.copy()
    for i, other in enumerate(others):
        made |= other << step * (i + 1)
    return made


def _planes(scheme: Scheme, groups: np.ndarray, values: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """The planes of codes u8 [N, units, 8, 4], in the order of the scheme."""
    n, units = groups.shape[:2]
    if scheme.paired:
        pairs = groups[:, :, 0::2] + PAIR_LEVELS * groups[:, :, 1::2]
        if scheme.in_codes:
            for word in range(2):  # S, then Z
                bits = values[1][:, :, None] >> np.arange(3 * word, 3 * word + 3, dtype=np.uint16) & 1
                pairs[:, :, word, :3] |= bits.astype(np.uint8) << 7
        return [pairs]
    if scheme.bits == 8:
        return [groups[:, :, :4], groups[:, :, 4:]]
    made = []
    if "low" in scheme.planes:
        nibbles = groups & 15
        made.append(_or(nibbles.reshape(n, units, 16, 2), 3, 4) if scheme.book
                    else _or(nibbles.reshape(n, units, 4, 2, 4), 3, 4))
    if "two" in scheme.planes:
        made.append(_or((groups >> (4 if scheme.bits >= 6 else 0) & 3).reshape(n, units, 2, 4, 4), 3, 2))
    if "one" in scheme.planes:
        made.append(_or(groups >> {1: 1, 3: 2, 5: 4, 7: 6}[scheme.bits] & 1, 2, 1))
    return made


def _head(scheme: Scheme, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """The headers of units: the values of each block side by side."""
    if scheme.is_own:
        return values[1] if scheme.header == GRID else values[1].astype(np.uint8)
    if scheme.header == SCALED:
        words = [np.ascontiguousarray(value)[..., None].view("<u2") for value in values if value.dtype != np.uint8]
        return _whole_units(scheme, np.concatenate(words, axis=2))
    if scheme.header == FACTORED:
        return _whole_units(scheme, _CODES_OF_HALVES[values[1]])
    if scheme.header == SUPER16:
        return values[2] | values[3] << 4
    if scheme.header == SIGNED:
        return values[1].view(np.uint8).astype(np.uint16)
    return _side_by_side(*(values[2:] if scheme.header == SUPER else values[1:] if "above" in scheme.parts else values))


def _whole_units(scheme: Scheme, headers: np.ndarray) -> np.ndarray:
    """Headers [N, blocks, ...], padded to the blocks of whole units."""
    return np.pad(headers, ((0, 0), (0, headers.shape[1] % 2 if scheme.by_16 else 0), *[(0, 0)] * (headers.ndim - 2)))


_CODES_OF_HALVES = np.zeros(1 << 16, np.uint8)  # E4M3 codes, indexed by the bits of the same value as float16
_CODES_OF_HALVES[HALVES_OF_E4M3] = np.arange(256)


def _whole(scheme: Scheme, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """Row headers: d and z of each row, f32 [N, 2], or only d."""
    numbers = values[:2] if scheme.zeros else values[:1]
    return _side_by_side(*(header_numbers(part, scheme)[:, 0] for part in numbers))


def _row(fields: Fields) -> np.ndarray:
    """Row headers of numflow's own schemes: B, D, the first zero point and the step between zero points, u32 [N, 4]."""
    base, step, zeros = fields.row_grids()
    span = np.float32((fields.scheme.levels - 1) / (1 << fields.scheme.zero_bits))
    window = np.ldexp(np.float32(1), -(fields.rows & 3).astype(np.int32))
    floats = [part.astype(np.float32).view(np.uint32) for part in (zeros[:, 0], span * window)]
    return _side_by_side(base.astype(np.uint32), np.where(base > 0, step, 0).astype(np.uint32), *floats)
