"""Warp-wide instructions: shuffles, votes, ldmatrix, mma. Binders as in effects.py."""

import numpy as np

from .convert import _from_bfloat, _from_half, float8_values
from .effects import effect
from .findings import Fault
from .operands import address, getter, wide
from .parse import Pair, Vector
from .races import READ

WARP = 32
LANES = np.arange(WARP)
U32, U64, F32 = np.uint32, np.uint64, np.float32
E4M3, _E5M2 = float8_values(4), float8_values(5)


@effect("shfl")
def _shuffle(step):
    value, by, clamp = (wide(operand, kind) for operand, kind in zip(step.operands[1:4], ("b32", "u32", "u32")))
    to, how = step.operands[0], next(part for part in step.parts if part in ("bfly", "down", "up", "idx"))

    def run(machine, mask):
        machine.whole_warps(mask)
        given = value(machine).reshape(-1, WARP)
        count, limits = (get(machine).reshape(-1, WARP).astype(np.int64) for get in (by, clamp))
        segment, limit = limits >> 8 & 31, limits & 31
        low = LANES & segment
        high = low | limit & ~segment
        source = {"bfly": LANES ^ count, "down": LANES + count, "up": LANES - count,
                  "idx": low | count & ~segment & 31}[how]
        inside = source >= high if how == "up" else source <= high
        source = np.where(inside, source, LANES)
        result = np.take_along_axis(given, source, 1).ravel()
        machine.put(to.first if isinstance(to, Pair) else to, result, mask)
        if isinstance(to, Pair):
            machine.put(to.second, np.broadcast_to(inside, source.shape).ravel(), mask)
    return run


@effect("vote")
def _vote(step):
    asked, to = wide(step.operands[1], "pred"), step.operands[0]
    how = next((part for part in step.parts if part in ("ballot", "all", "any", "uni")), None)

    def run(machine, mask):
        machine.whole_warps(mask)
        votes = asked(machine).reshape(-1, WARP)
        if how == "ballot":
            result = (votes.astype(U64) << LANES.astype(U64)).sum(1).astype(U32)
        else:
            result = {"all": votes.all(1), "any": votes.any(1), "uni": votes.all(1) | ~votes.any(1)}[how]
        machine.put(to, np.repeat(result, WARP), mask)
    return run


@effect("redux")
def _reduce(step):
    value, to = wide(step.operands[1], step.type), step.operands[0]
    how = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}[next(part for part in step.parts if part not in ("sync", step.type))]

    def run(machine, mask):
        machine.whole_warps(mask)
        given = value(machine).reshape(-1, WARP)
        machine.put(to, np.repeat(how.reduce(given, 1, dtype=given.dtype), WARP), mask)
    return run


@effect("activemask")
def _active(step):
    def run(machine, mask):
        active = np.broadcast_to(machine.active(mask), machine.n).reshape(-1, WARP)
        machine.put(step.operands[0], np.repeat((active.astype(U64) << LANES.astype(U64)).sum(1).astype(U32), WARP),
                    mask)
    return run


@effect("ldmatrix")
def _load_matrices(step):
    """ldmatrix: 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l // 8, and receives
    elements 2 (l % 4) and 2 (l % 4) + 1 of row l // 4; with .trans, of column l // 4."""
    to, place = step.operands[0], address(step.operands[1])
    registers = to.parts if isinstance(to, Vector) else (to,)
    transposed = "trans" in step.parts

    def run(machine, mask):
        machine.whole_warps(mask)
        lanes = machine.lanes(machine.active(mask) & (machine.lane % WARP < 8 * len(registers)))
        memory, offset = machine.check_access(step, "shared", place(machine), 16, lanes, READ)
        row = np.zeros(machine.n, np.int64)
        row[lanes] = offset
        row = row.reshape(-1, WARP)
        for number, register in enumerate(registers):
            if transposed:
                even, odd = (memory.view(np.uint16)[row[:, 8 * number + 2 * (LANES % 4) + side] // 2 + LANES // 4]
                             for side in (0, 1))
                result = even.astype(U32) | odd.astype(U32) << U32(16)
            else:
                result = memory.view(U32)[row[:, 8 * number + LANES // 4] // 4 + LANES % 4]
            machine.put(register, result.ravel(), mask)
    return run


@effect("movmatrix")
def _transpose_matrix(step):
    given, to = wide(step.operands[1], "b32"), step.operands[0]

    def run(machine, mask):
        machine.whole_warps(mask)
        matrix = given(machine).view(np.uint16).reshape(-1, 8, 8)
        machine.put(to, np.ascontiguousarray(matrix.transpose(0, 2, 1)).view(U32).ravel(), mask)
    return run


@effect("mma")
def _multiply(step):
    """mma: D = A B + C of shape m16n8kK. Lane l has rows l // 4 and l // 4 + 8 (PTX ISA, "Matrix Fragments")."""
    if "block_scale" in step.parts:
        return _multiply_scaled(step)
    shape = next((part for part in step.parts if part.startswith("m16n8k")), None)
    kinds = step.parts[-4:]
    if shape is None or kinds[1] not in READERS or "e2m1" in kinds or "f16" in (kinds[0], kinds[3]):
        raise Fault(f"no such mma here: {step.text}")
    per = 2 if kinds[1] in ("f16", "bf16") else 4
    total, kind = (np.int32, "s32") if kinds[1] in ("s8", "u8") else (F32, "f32")
    d = step.operands[0].parts
    a, b = ([wide(register, "b32") for register in operand.parts] for operand in step.operands[1:3])
    c = [wide(register, kind) for register in step.operands[3].parts]
    depth, row, column = int(shape[6:]), LANES // 4, LANES % 4
    read_a, read_b = READERS[kinds[1]], READERS[kinds[2]]

    def run(machine, mask):
        machine.whole_warps(mask)
        warps = machine.n // WARP
        a_matrix, b_matrix = np.empty((warps, 16, depth), total), np.empty((warps, 8, depth), total)
        for number, get in enumerate(a):
            value = read_a(get(machine)).reshape(-1, WARP, per)
            for each in range(per):
                a_matrix[:, row + 8 * (number & 1), per * column + each + 4 * per * (number >> 1)] = value[:, :, each]
        for number, get in enumerate(b):
            value = read_b(get(machine)).reshape(-1, WARP, per)
            for each in range(per):
                b_matrix[:, row, per * column + each + 4 * per * number] = value[:, :, each]
        product = np.matmul(a_matrix, b_matrix.transpose(0, 2, 1))
        if machine.counters:
            name = "mma" if per == 2 else "mma of bytes"
            machine.counters.products[name] += 16 * 8 * depth * int(machine.whole_warps(mask).sum())
        for number, (register, get) in enumerate(zip(d, c)):
            fragment = product[:, row + 8 * (number >> 1), 2 * column + (number & 1)].ravel()
            machine.put(register, fragment + get(machine), mask)
    return run


def _multiply_scaled(step):
    """mma with block scales: D = (A * scales) (B * scales) + C of shape m16n8k64, for 4-bit floats.

    In each quad of lanes, a selector names the two lanes that supply the scales of rows l // 4 and l // 4 + 8 of A, and
    another one the lane that supplies those of column l // 4 of B.
    """
    how = {"kind_mxf4nvf4": ("scale_vec_4X", "ue4m3", 4), "kind_mxf4": ("scale_vec_2X", "ue8m0", 2)}
    vector, kind, count = next((how[part] for part in step.parts if part in how), ("", "", 0))
    if {vector, kind, "m16n8k64"} - set(step.parts) or step.parts[-5:-1] != ("f32", "e2m1", "e2m1", "f32"):
        raise Fault(f"no such mma here: {step.text}")
    d = step.operands[0].parts
    a, b, scales_a, scales_b = ([wide(register, "b32") for register in step.operands[place].parts]
                                for place in (1, 2, 4, 6))
    c = [wide(register, "f32") for register in step.operands[3].parts]
    choices = [getter(part, "u16") for place in (5, 7) for part in step.operands[place].parts]

    def scales(get, machine):
        bytes_ = get(machine).view(np.uint8).reshape(-1, 8, 4, 4)[..., :count]   # warp, quad, lane of it
        if kind == "ue8m0":
            return np.ldexp(F32(1), bytes_.astype(np.int32) - 127)
        return np.where(bytes_ & 128, F32("nan"), E4M3[bytes_ & 127])

    def run(machine, mask):
        machine.whole_warps(mask)
        lanes = machine.lanes(machine.active(mask))
        byte_a, pair, byte_b, lane = (set(np.broadcast_to(choice(machine), machine.n)[lanes].tolist())
                                      for choice in choices)
        if byte_a | byte_b != {0} or len(pair) > 1 or len(lane) > 1 or max(pair) > 1 or max(lane) > 3:
            raise Fault(f"scale selectors that are not implemented: {step.text}")
        warps, (pair,), (lane,) = machine.n // WARP, pair, lane
        left, right = np.empty((warps, 16, 64), F32), np.empty((warps, 8, 64), F32)
        row, column = LANES // 4, LANES % 4
        for number, get in enumerate(a):
            value = READERS["e2m1"](get(machine)).reshape(-1, WARP, 8)
            for each in range(8):
                left[:, row + 8 * (number & 1), 8 * column + each + 32 * (number >> 1)] = value[:, :, each]
        for number, get in enumerate(b):
            value = READERS["e2m1"](get(machine)).reshape(-1, WARP, 8)
            for each in range(8):
                right[:, row, 8 * column + each + 32 * number] = value[:, :, each]
        own = scales(scales_a[0], machine)[:, :, 2 * pair:2 * pair + 2].transpose(0, 2, 1, 3).reshape(warps, 16, count)
        others = scales(scales_b[0], machine)[:, :, lane]
        product = np.matmul(left * np.repeat(own, 64 // count, 2),
                            (right * np.repeat(others, 64 // count, 2)).transpose(0, 2, 1))
        if machine.counters:
            machine.counters.products["mma of fours"] += 16 * 8 * 64 * int(machine.whole_warps(mask).sum())
        for number, (register, get) in enumerate(zip(d, c)):
            own = product[:, row + 8 * (number >> 1), 2 * column + (number & 1)].ravel()
            machine.put(register, own + get(machine), mask)
    return run


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
READERS = {"e2m1": lambda bits: np.concatenate([_E2M1, -_E2M1])[bits[:, None] >> 4 * np.arange(8, dtype=U32) & 15],
           "s8": lambda bits: bits.view(np.int8), "u8": lambda bits: bits.view(np.uint8),
           "f16": lambda bits: _from_half(bits.view(np.uint16)),
           "bf16": lambda bits: _from_bfloat(bits.view(np.uint16)),
           "e4m3": lambda bits: E4M3[bits.view(np.uint8)], "e5m2": lambda bits: _E5M2[bits.view(np.uint8)]}
