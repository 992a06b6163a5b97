"""Values of small float types, and codes packed in words and bytes, as in files of quantised matrices."""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0], np.float32)
FP4 = np.array([0, 0.0052083333, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25], np.float32)
FP4 = np.concatenate([FP4, -FP4])


def e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0**(exponent.astype(int) - 7))
    return np.where(codes & 128, -size, size)


def e5m2(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float64)


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of values truncated to bfloat16."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def wide(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values as stored in a type, and the stored values in float64."""
    if kind == "BF16":
        bits = bf16(values)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    stored = values.astype({"F16": np.float16, "F32": np.float32}[kind])
    return stored, stored.astype(np.float64)


def words(codes: np.ndarray, bits: int, stream: bool = False) -> np.ndarray:
    """Codes along the last axis in 32-bit words, lowest bits first; stream: codes may cross word boundaries."""
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        each = 32 // bits
        pieces = [row] if stream else [row[at:at + each] for at in range(0, len(row), each)]
        data = b""
        for piece in pieces:
            value = sum(code << bits * i for i, code in enumerate(piece))
            data += value.to_bytes(-(-len(piece) * bits // 32) * 4, "little")
        rows.append(np.frombuffer(data, "<i4"))
    return np.stack(rows).reshape(*codes.shape[:-1], -1)


def scales_of(rng, *shape: int) -> np.ndarray:
    return rng.uniform(0.002, 0.02, shape)


def two_in_a_byte(codes: np.ndarray, low_first: bool = True) -> np.ndarray:
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first | second << 4 if low_first else first << 4 | second).astype(np.uint8)
