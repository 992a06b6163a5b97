"""Faults of headers and codes that were chosen badly: found from the choices themselves, since no two searches
choose the same."""

from dataclasses import replace

import numpy as np

from numflow.quant.layout import Fields

GOOD = 1.05  # times numflow's error: so far a choice is no fault of its kind
LEAST = 2.0  # times less error with another reading of the same bits: that reading was meant


def fault(found: Fields, own: Fields, x: np.ndarray) -> str:
    """A sentence about the fault of `found`, beside numflow's own fields of the same rows; "" if none is seen."""
    best = squares(own, x).sum()
    error = squares(found, x).sum()
    nearest = replace(found, codes=nearest_codes(found, x))
    for sentence, other in _readings(found, nearest):
        if (better := squares(other, x).sum()) <= GOOD * best and better * LEAST <= error:
            return sentence
    if squares(nearest, x).sum() <= min(GOOD * best, 0.98 * error):
        return "with the same headers the nearest codes would do: the codes are not code = round(x / scale + zero)"
    return _choices(found, own, x, best)


def nearest_codes(fields: Fields, x: np.ndarray) -> np.ndarray:
    """The nearest codes under the scales and zeros of fields, uint8 like theirs."""
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
    """Other readings of the same bits: those of mistakes in packing."""
    scheme, rows, blocks = found.scheme, found.rows.astype(np.int64), found.blocks.astype(np.int64)
    bits = scheme.scale_bits
    s, z = blocks & (1 << bits) - 1, blocks >> bits
    turned = (blocks >> scheme.zero_bits & (1 << bits) - 1) | (blocks & (1 << scheme.zero_bits) - 1) << bits
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
        ("codes that are counted from the other end: code 0 is the smallest weight",
         replace(found, codes=np.clip(scheme.levels - 1 - found.codes.astype(int), 0, 255).astype(np.uint8))),
        ("block headers with Z in the low bits: S is there", with_blocks(turned)),
        ("a Z that counts from the largest zero: scheme.zeros() rises",
         with_blocks(s | (1 << scheme.zero_bits) - 1 - z << bits)),
        ("an S that counts from the largest scale: B + S * D rises", with_blocks((1 << bits) - 1 - s | z << bits)),
        ("base codes that are 108 too large: B is (base code + 108) << 21", recoded(lowered)),
        ("base codes that are 108 too small: B is (base code + 108) << 21", recoded(raised)),
        ("base codes that are one too large", recoded(with_rows(np.maximum(base - 1, 1) << 7 | step << 2 | window))),
        ("base codes that are one too small", recoded(with_rows(np.minimum(base + 1, 511) << 7 | step << 2 | window))),
        ("a step and a window that change places in the row's header",
         recoded(with_rows(base << 7 | (rows & 31) << 2 | rows >> 5 & 3)))]


def _choices(found: Fields, own: Fields, x: np.ndarray, best: float) -> str:
    """The part of a search that was not tried, or was measured by something else."""
    if len(found.rows) > 1 and np.ptp(found.rows) == 0 < np.ptp(own.rows):
        return "every row has the header of row 0: each is to have its own"
    if (wider := _wider(found, own)) and not 1 / 3 < wider < 3:
        return f"scales are {wider:.2g} times numflow's, in the middle{_alike(found, own)}"
    if said := _alike(found, own):
        return said.removeprefix("; ")
    off, least = (np.abs(fields.values().astype(np.float64) - x) for fields in (found, own))
    ends = _ends(found)
    if not ((x < ends[0]) | (x > ends[1])).any():
        return "no weight is clipped: a range a little smaller than that of the block has finer steps"
    if off.max() < least.max():
        return (f"the largest error is {off.max():.3g}, less than numflow's {least.max():.3g}: the sum of squares is "
                "to be small, and so a few weights may be clipped")
    if off.sum() < least.sum():
        return "the sum of errors is less than numflow's: the sum of their squares is to be small"
    if squares(_with_best_blocks(found, x), x).sum() <= GOOD * best:
        return "with the same row headers another S and Z of each block would do"
    return "" if 0.9 < wider < 1.1 else f"scales are {wider:.2g} times numflow's, in the middle"


def _wider(found: Fields, own: Fields) -> float:
    """The scales of `found` relative to numflow's, the median; 0 where there are none."""
    scales, least = found.scales_and_zeros()[0], own.scales_and_zeros()[0]
    both = (scales > 0) & (least > 0)
    return float(np.median(scales[both] / least[both])) if both.any() else 0.0


def _ends(fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and largest weights that are rounded to a code and not clipped, as large as the weights."""
    scale, zero = (np.repeat(a, fields.scheme.block, axis=1) for a in fields.scales_and_zeros())
    return scale * (-0.5 - zero), scale * (fields.scheme.levels - 0.5 - zero)


def _with_best_blocks(found: Fields, x: np.ndarray) -> Fields:
    """The same row headers with the S, Z and codes that fit each block best."""
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


def _alike(found: Fields, own: Fields) -> str:
    """Sentences about choices that were not tried: all headers or codes have in common what numflow's have not."""
    scheme = found.scheme
    parts = [("window", lambda f: f.rows & 3), ("step code", lambda f: f.rows >> 2 & 31),
             ("S", lambda f: f.blocks & (1 << scheme.scale_bits) - 1), ("Z", lambda f: f.blocks >> scheme.scale_bits)]
    said = [f"every {'row' if name in ('window', 'step code') else 'block'} has the {name} {part(found).flat[0]}"
            for name, part in parts if np.ptp(part(found)) == 0 < np.ptp(part(own))]
    if found.codes.max() < own.codes.max():
        said.append(f"no code is above {found.codes.max()}, and there are 0 .. {scheme.levels - 1}")
    return "".join(f"; {each}" for each in said)
