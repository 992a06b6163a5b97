"""Compiled kernels for Inferflow's schemes (inferflow.py), with the same bytes and values as the NumPy reference."""

import numpy as np

from numflow.quant.bits_kernels import pack_block, plane_table, unpack_block
from numflow.quant.inferflow import BYTES as ON_GRID
from numflow.quant.inferflow import (
    MID_RISE,
    PAIR_LEVELS,
    SYMMETRIC,
    InferflowScheme,
    header_bytes,
    stored_headers,
)
from numflow.quant.scheme import checked_bytes, checked_weights
from numflow.quant.threads import kernel, over_rows

_LONGEST = 64  # weights in the largest block


def encode(x: np.ndarray, scheme: InferflowScheme, name: str = "matrix", threads: int | None = None) -> np.ndarray:
    """float32 [N, K] -> uint8 [N, row_bytes]; errors as `inferflow.encode_reference`."""
    x = checked_weights(x, scheme, name)
    rows, blocks = x.shape[0], x.shape[1] // scheme.block
    out = np.empty((rows, blocks, scheme.size), np.uint8)
    base, scale = np.empty((2, rows, blocks), np.float32)
    over_rows(_encode, rows, threads, x, scheme.block, scheme.rule, scheme.levels, int(scheme.paired),
              plane_table(scheme.planes, scheme.codes, scheme.header), base, scale, out)
    out[:, :, :scheme.header] = header_bytes(base.ravel(), scale.ravel(), scheme, name).reshape(rows, blocks, -1)
    return out.reshape(rows, -1)


def decode(raw: np.ndarray, scheme: InferflowScheme, columns: int, threads: int | None = None) -> np.ndarray:
    """uint8 [N, row_bytes] -> float32 [N, columns]"""
    raw = checked_bytes(raw, scheme, columns)
    rows = raw.shape[0]
    base, scale = (field.reshape(rows, -1) for field in stored_headers(raw.reshape(-1, scheme.size), scheme))
    x = np.empty((rows, columns), np.float32)
    over_rows(_decode, rows, threads, raw.reshape(rows, -1, scheme.size), scheme.block, scheme.rule, int(scheme.paired),
              plane_table(scheme.planes, scheme.codes, scheme.header), np.ascontiguousarray(base),
              np.ascontiguousarray(scale), x)
    return x


@kernel
def _encode(x, block, rule, levels, paired, planes, base, scale, out, begin, end):
    """x f32 [N, K]; base, scale f32 [N, blocks]; out u8 [N, blocks, size], without headers."""
    codes = np.empty(_LONGEST, np.uint8)
    for row in range(begin, end):
        for b in range(base.shape[1]):
            weights = x[row, b * block:(b + 1) * block]
            start, scale[row, b] = _range(weights, rule, levels)
            base[row, b] = start + scale[row, b] * np.float32(0.5) if rule == MID_RISE else start
            inverse = np.float32(0) if scale[row, b] < np.float32(1e-5) else np.float32(1) / scale[row, b]
            if rule == SYMMETRIC:
                for i in range(block):
                    ratio = weights[i] * inverse
                    code = np.floor(abs(ratio) + np.float32(0.5))
                    codes[i] = np.uint8(np.int64(-code if ratio < 0 else code) & 255)
            else:
                rounding = np.float32(0.0001) if rule == MID_RISE else np.float32(0.5)
                for i in range(block):
                    code = np.floor((weights[i] - start) * inverse + rounding)
                    codes[i] = np.uint8(min(max(code, np.float32(0)), np.float32(levels - 1)))
            count = block
            if paired:
                count = block // 2
                for i in range(count):
                    codes[i] = codes[2 * i] + PAIR_LEVELS * codes[2 * i + 1]
            pack_block(codes, count, planes, out[row, b])


@kernel
def _range(weights, rule, levels):
    """Lower end of code 0, and the scale."""
    low = high = weights[0]
    for i in range(1, weights.size):  # the first of equals: min() and max() may return the other zero
        low = weights[i] if weights[i] < low else low
        high = weights[i] if weights[i] > high else high
    if rule == SYMMETRIC:
        return np.float32(0), max(abs(low), abs(high)) / np.float32(127)
    if rule == ON_GRID:
        low = np.floor(low * np.float32(100)) / np.float32(100)
    return low, (high - low) / np.float32(levels if rule == MID_RISE else levels - 1)


@kernel
def _decode(raw, block, rule, paired, planes, base, scale, x, begin, end):
    """raw u8 [N, blocks, size]; base, scale f32 [N, blocks]; x f32 [N, K]."""
    codes = np.empty(_LONGEST, np.int64)
    count = block // 2 if paired else block
    for row in range(begin, end):
        for b in range(base.shape[1]):
            unpack_block(raw[row, b], count, planes, codes)
            if paired:
                for i in range(count - 1, -1, -1):  # backwards, because pairs are expanded in place
                    pair = codes[i]
                    codes[2 * i], codes[2 * i + 1] = pair % PAIR_LEVELS, pair // PAIR_LEVELS
            for i in range(block):
                code = codes[i] - 256 if rule == SYMMETRIC and codes[i] > 127 else codes[i]
                x[row, b * block + i] = base[row, b] + np.float32(code) * scale[row, b]
