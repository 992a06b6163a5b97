"""Diagnosis of badly chosen headers and codes. Two good searches choose differently, so the choices themselves are
examined instead of a comparison with expected ones."""

from dataclasses import replace

import numpy as np

from numflow.quant.layout import Fields

GOOD = 1.05  # error relative to numflow's up to which a choice is good
LEAST = 2.0  # improvement from which on another reading of the same bits is taken as the intended one


def fault(found: Fields, reference: Fields, x: np.ndarray) -> str:
    """A sentence on the fault of `found`, compared with numflow's fields of the same rows; "" if none is found."""
    best = squares(reference, x).sum()
    error = squares(found, x).sum()
    nearest = replace(found, codes=nearest_codes(found, x))
    for sentence, other in _readings(found, nearest):
        if (better := squares(other, x).sum()) <= GOOD * best and better * LEAST <= error:
            return sentence
    if squares(nearest, x).sum() <= min(GOOD * best, 0.98 * error):
        return "the headers are good with the nearest codes, but the codes are not round(x / scale + zero)"
    return _choices(found, reference, x, best)


def nearest_codes(fields: Fields, x: np.ndarray) -> np.ndarray:
    """The nearest codes for the scales and zeros of fields, uint8."""
    block = fields.scheme.block
    scale, zero = (np.repeat(a, block, axis=1) for a in fields.scales_and_zeros())
    with np.errstate(all="ignore"):
        codes = np.rint(np.where(scale == 0, 0, x / scale) + np.where(scale == 0, 0, zero))
    return np.clip(np.nan_to_num(codes), 0, fields.scheme.levels - 1).astype(np.uint8)


def squares(fields: Fields, x: np.ndarray) -> np.ndarray:
    """Sums of squared errors by row."""
    with np.errstate(all="ignore"):
        off = fields.values().astype(np.float64) - x
        return np.nan_to_num((off * off).sum(axis=1), nan=np.inf)


def _readings(found: Fields, nearest: Fields) -> list[tuple[str, Fields]]:
    """(sentence, fields) for other readings of the same bits, which correspond to packing mistakes."""
    scheme, rows, blocks = found.scheme, found.rows.astype(np.int64), found.blocks.astype(np.int64)
    bits = scheme.scale_bits
    s, z = blocks & (1 << bits) - 1, blocks >> bits
    swapped = (blocks >> scheme.zero_bits & (1 << bits) - 1) | (blocks & (1 << scheme.zero_bits) - 1) << bits
    base, step, window = rows >> 7, rows >> 2 & 31, rows & 3

    def with_rows(value):
        return replace(nearest, rows=np.clip(value, 0, 65535).astype(np.uint16))

    def with_blocks(value):
        return replace(found, blocks=value.astype(np.uint16))

    def recoded(fields):
        return replace(fields, codes=found.codes)

    lowered = with_rows(np.where(base > 108, base - 108, 1) << 7 | step << 2 | window)
    raised = with_rows(np.minimum(base + 108, 511) << 7 | step << 2 | window)
    return [
        ("the codes are counted from the other end: code 0 is the smallest weight",
         replace(found, codes=np.clip(scheme.levels - 1 - found.codes.astype(int), 0, 255).astype(np.uint8))),
        ("the block headers have Z in the low bits: the low bits are S", with_blocks(swapped)),
        ("Z counts from the largest zero: scheme.zeros() is rising",
         with_blocks(s | (1 << scheme.zero_bits) - 1 - z << bits)),
        ("S counts from the largest scale: B + S * D is rising", with_blocks((1 << bits) - 1 - s | z << bits)),
        ("the base codes are 108 too large: B is (base code + 108) << 21", recoded(lowered)),
        ("the base codes are 108 too small: B is (base code + 108) << 21", recoded(raised)),
        ("the base codes are one too large", recoded(with_rows(np.maximum(base - 1, 1) << 7 | step << 2 | window))),
        ("the base codes are one too small", recoded(with_rows(np.minimum(base + 1, 511) << 7 | step << 2 | window))),
        ("step code and window are swapped in the row headers",
         recoded(with_rows(base << 7 | (rows & 31) << 2 | rows >> 5 & 3)))]


def _choices(found: Fields, reference: Fields, x: np.ndarray, best: float) -> str:
    """A sentence on candidates that a search has not tried, or on another error measure that it has minimised."""
    if len(found.rows) > 1 and np.ptp(found.rows) == 0 < np.ptp(reference.rows):
        return "every row has the header of row 0: choose a header for each row"
    if (wider := _wider(found, reference)) and not 1 / 3 < wider < 3:
        return f"the median of the scales is {wider:.2g} times numflow's{_alike(found, reference)}"
    if said := _alike(found, reference):
        return said.removeprefix("; ")
    off, least = (np.abs(fields.values().astype(np.float64) - x) for fields in (found, reference))
    ends = _ends(found)
    if not ((x < ends[0]) | (x > ends[1])).any():
        return "no weight is clipped: a range that is a little smaller than the block's has finer steps"
    if off.max() < least.max():
        return (f"the largest error is {off.max():.3g}, less than numflow's {least.max():.3g}: minimise the sum of "
                "squares, for which a few weights may be clipped")
    if off.sum() < least.sum():
        return "the sum of absolute errors is less than numflow's: minimise the sum of squares"
    if squares(_with_best_blocks(found, x), x).sum() <= GOOD * best:
        return "the row headers are good, but another S and Z of the blocks would be better"
    return "" if 0.9 < wider < 1.1 else f"the median of the scales is {wider:.2g} times numflow's"


def _wider(found: Fields, reference: Fields) -> float:
    """Median ratio of the scales of `found` to numflow's; 0 if there are none."""
    scales, least = found.scales_and_zeros()[0], reference.scales_and_zeros()[0]
    both = (scales > 0) & (least > 0)
    return float(np.median(scales[both] / least[both])) if both.any() else 0.0


def _ends(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and largest weight that is not clipped, for every element."""
    scale, zero = (np.repeat(a, fields.scheme.block, axis=1) for a in fields.scales_and_zeros())
    return scale * (-0.5 - zero), scale * (fields.scheme.levels - 0.5 - zero)


def _with_best_blocks(found: Fields, x: np.ndarray) -> Fields:
    """The same row headers with the best S, Z and codes of each block."""
    scheme = found.scheme
    least = np.full(found.blocks.shape, np.inf)
    blocks, codes = found.blocks.copy(), found.codes.copy()
    for value in range(1 << scheme.scale_bits + scheme.zero_bits):
        tried = replace(found, blocks=np.full_like(blocks, value))
        tried = replace(tried, codes=nearest_codes(tried, x))
        off = (tried.values().astype(np.float64) - x) ** 2
        error = off.reshape(*blocks.shape, scheme.block).sum(axis=2)
        better = error < least
        least, blocks = np.where(better, error, least), np.where(better, tried.blocks, blocks)
        codes = np.where(np.repeat(better, scheme.block, axis=1), tried.codes, codes)
    return replace(found, blocks=blocks, codes=codes)


def _alike(found: Fields, reference: Fields) -> str:
    """Sentences on values that are equal in all headers or codes of `found`, but not in numflow's."""
    scheme = found.scheme
    parts = [("window", lambda f: f.rows & 3), ("step code", lambda f: f.rows >> 2 & 31),
             ("S", lambda f: f.blocks & (1 << scheme.scale_bits) - 1), ("Z", lambda f: f.blocks >> scheme.scale_bits)]
    said = [f"every {'row' if name in ('window', 'step code') else 'block'} has the {name} {part(found).flat[0]}"
            for name, part in parts if np.ptp(part(found)) == 0 < np.ptp(part(reference))]
    if found.codes.max() < reference.codes.max():
        said.append(f"no code is above {found.codes.max()}, but codes are 0 .. {scheme.levels - 1}")
    return "".join(f"; {each}" for each in said)
