"""Lab 2: rotary positions (RoPE).

Attention compares a query with keys by dot products, which do not contain the tokens' positions. RoPE rotates pairs of
columns by an angle that grows with the position. The dot product of two rotated pairs then depends on the distance of
the two tokens only.

    angle of token t, pair i:   positions[t] * inv_freq[i]
    (a, b)  ->  (a cos - b sin,  b cos + a sin)

`rope_angles` computes a table for all tokens of a batch: first the F cosines, then the F sines, all multiplied by
`scale`. `batch.positions` (int32 [T]) is the position of each token in its own sequence; a batch may contain several
sequences.

`rope` rotates the columns [start, start + 2F) of each head and copies all other columns. There are two conventions for
which columns form a pair. A model that was trained with one convention writes nonsense with the other:

    pairing "half":       (start + i,      start + i + F)
    pairing "adjacent":   (start + 2 i,    start + 2 i + 1)

    numflow learn check 2        numflow learn hint 2        numflow learn bench 2
"""

import numpy as np

LAB = {
    "number": 2, "title": "Rotary positions", "minutes": 30, "functions": ["rope_angles", "rope"],
    "grader": "reference",
    "cases": ["rope_angles", "rope-half-in-place", "rope-adjacent-in-place", "rope-half*", "rope-adj*"],
    "hints": [
        "Draw one head of 8 columns, and lines between the columns of a pair: once for \"half\", once for "
        "\"adjacent\". Mark start, start + F, start + 2F and head_dim.",
        "The hard part is to read a and b before either is overwritten. Use y = x.reshape(T, heads, head_dim).copy() "
        "and two arrays of column indices, first and second: y[:, :, first] is a copy.",
        "first = start + arange(F) * (1 or 2), second = first + (F or 1); cos = angles[:, None, :F], sin = "
        "angles[:, None, F:]; y[:, :, first], y[:, :, second] = a * cos - b * sin, b * cos + a * sin."],
}


def rope_angles(inv_freq, *, batch, scale):
    """inv_freq [F] -> [T, 2F]: cosines, then sines."""
    angle = batch.positions.astype(np.float32)[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * np.float32(scale)


def rope(x, angles, *, heads, head_dim, pairing, start):
    """x [T, heads * head_dim], angles [T, 2F] -> [T, heads * head_dim]. pairing: "half" or "adjacent"."""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    first = start + np.arange(half) * (1 if pairing == "half" else 2)
    second = first + (half if pairing == "half" else 1)
    y = x.reshape(len(x), heads, head_dim).copy()
    a, b = y[:, :, first], y[:, :, second]
    y[:, :, first] = a * cos - b * sin
    y[:, :, second] = b * cos + a * sin
    return y.reshape(x.shape)


def _rotated(x, angles, heads, head_dim, first, second):
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    y = x.reshape(len(x), heads, head_dim).copy()
    a, b = y[:, :, first], y[:, :, second]
    y[:, :, first] = a * cos - b * sin
    y[:, :, second] = b * cos + a * sin
    return y.reshape(x.shape)


def rope_angles__sines_first(inv_freq, *, batch, scale):
    """a table with the sines first"""
    return np.roll(rope_angles(inv_freq, batch=batch, scale=scale), len(inv_freq), axis=1)


def rope_angles__no_scale(inv_freq, *, batch, scale):
    """a table that was not multiplied by scale"""
    return rope_angles(inv_freq, batch=batch, scale=1.0)


def rope_angles__scaled_angle(inv_freq, *, batch, scale):
    """angles that are multiplied by scale: multiply the cosines and sines instead"""
    return rope_angles(inv_freq * np.float32(scale), batch=batch, scale=1.0)


def rope_angles__half_scaled(inv_freq, *, batch, scale):
    """sines that are not multiplied by scale, while the cosines are"""
    y = rope_angles(inv_freq, batch=batch, scale=scale)
    y[:, len(inv_freq):] = rope_angles(inv_freq, batch=batch, scale=1.0)[:, len(inv_freq):]
    return y


def rope_angles__from_one(inv_freq, *, batch, scale):
    """positions that begin at 1"""
    angle = (batch.positions + 1).astype(np.float32)[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * np.float32(scale)


def rope_angles__rows(inv_freq, *, batch, scale):
    """row indices of the batch instead of batch.positions, which are positions in each sequence"""
    angle = np.arange(len(batch.positions), dtype=np.float32)[:, None] * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * np.float32(scale)


def rope_angles__divided(inv_freq, *, batch, scale):
    """positions that are divided by inv_freq, which is the inverse already: multiply"""
    return rope_angles(1 / inv_freq, batch=batch, scale=scale)


def rope__always_half(x, angles, *, heads, head_dim, pairing, start):
    """the pairing "half" where `pairing` is "adjacent\""""
    return rope(x, angles, heads=heads, head_dim=head_dim, pairing="half", start=start)


def rope__always_adjacent(x, angles, *, heads, head_dim, pairing, start):
    """the pairing "adjacent" where `pairing` is "half\""""
    return rope(x, angles, heads=heads, head_dim=head_dim, pairing="adjacent", start=start)


def rope__backwards(x, angles, *, heads, head_dim, pairing, start):
    """a rotation in the opposite direction: the signs of the two sine terms are swapped"""
    half = angles.shape[1] // 2
    return rope(x, np.concatenate([angles[:, :half], -angles[:, half:]], axis=1), heads=heads, head_dim=head_dim,
                pairing=pairing, start=start)


def rope__no_minus(x, angles, *, heads, head_dim, pairing, start):
    """a cos + b sin instead of a cos - b sin, which is no rotation"""
    half = angles.shape[1] // 2
    flipped = np.concatenate([angles[:, :half], -angles[:, half:]], axis=1)
    there, back = (rope(x, table, heads=heads, head_dim=head_dim, pairing=pairing, start=start).reshape(
        len(x), heads, head_dim) for table in (angles, flipped))
    first = start + np.arange(half) * (1 if pairing == "half" else 2)
    there[:, :, first] = back[:, :, first]
    return there.reshape(x.shape)


def rope__overwritten(x, angles, *, heads, head_dim, pairing, start):
    """a second column that is computed from the new value of the first: read both before writing either"""
    half = angles.shape[1] // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    first = start + np.arange(half) * (1 if pairing == "half" else 2)
    second = first + (half if pairing == "half" else 1)
    y = x.reshape(len(x), heads, head_dim).copy()
    y[:, :, first] = y[:, :, first] * cos - y[:, :, second] * sin
    y[:, :, second] = y[:, :, second] * cos + y[:, :, first] * sin
    return y.reshape(x.shape)


def rope__neighbours_twice(x, angles, *, heads, head_dim, pairing, start):
    """pairs (i, i + 1), which share columns, for "adjacent": the pairs are (2 i, 2 i + 1)"""
    half = angles.shape[1] // 2
    if pairing == "half":
        return rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=start)
    return _rotated(x, angles, heads, head_dim, start + np.arange(half), start + np.arange(half) + 1)


def rope__half_of_head(x, angles, *, heads, head_dim, pairing, start):
    """pairs (i, i + head_dim / 2) for "half": the pairs are (i, i + F), also if only a part of the head is rotated"""
    half = angles.shape[1] // 2
    if pairing == "adjacent" or start + half + head_dim // 2 > head_dim:
        return rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=start)
    first = start + np.arange(half)
    return _rotated(x, angles, heads, head_dim, first, first + head_dim // 2)


def rope__no_start(x, angles, *, heads, head_dim, pairing, start):
    """a rotation of the columns from 0 on, which ignores start"""
    return rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=0)


def rope__zeros(x, angles, *, heads, head_dim, pairing, start):
    """zeros in the columns that are not rotated: copy them from x"""
    y = rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=start).reshape(len(x), heads, head_dim)
    rotated = np.zeros(head_dim, bool)
    rotated[start:start + angles.shape[1]] = True
    return np.where(rotated, y, np.float32(0)).reshape(x.shape)


def rope_angles__first_position(inv_freq, *, batch, scale):
    """the position of the first token for all tokens"""
    table = rope_angles(inv_freq, batch=batch, scale=scale)
    return np.repeat(table[:1], len(table), axis=0)


def rope_angles__one_frequency(inv_freq, *, batch, scale):
    """one frequency for all pairs: pair i has inv_freq[i]"""
    return rope_angles(np.full_like(inv_freq, inv_freq[0]), batch=batch, scale=scale)


def rope__first_head(x, angles, *, heads, head_dim, pairing, start):
    """a rotation of the first head only: rotate columns [start, start + 2F) of every head"""
    y = x.copy()
    y[:, :head_dim] = rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=start)[:, :head_dim]
    return y


def rope_angles__degrees(inv_freq, *, batch, scale):
    """angles that are converted to degrees: cos and sin take radians"""
    angles = np.degrees(batch.positions[:, None] * inv_freq)
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * scale).astype(np.float32)


def rope__at_the_end(x, angles, *, heads, head_dim, pairing, start):
    """a rotation of the last 2F columns of a head instead of the columns from start on"""
    return rope(x, angles, heads=heads, head_dim=head_dim, pairing=pairing, start=head_dim - angles.shape[1])


def bench(functions):
    """2048 tokens, 32 heads of 128 columns."""
    from numflow.learn.graders.reference import bars

    def build(b):
        (x,) = b.inputs(4096)
        angles = b.buffer(128)
        inv_freq = (10000.0 ** (-np.arange(0, 128, 2) / 128)).astype(np.float32)
        b.step("rope_angles", (), (angles,), {"inv_freq": b.weight("inv_freq", inv_freq)})
        y = b.buffer(4096)
        b.step("rope", (x, angles), (y,), heads=32, head_dim=128)
        return y

    return bars(functions, LAB, build, 2048, moved=2 * 2048 * 4096 * 4)
