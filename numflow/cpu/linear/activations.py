"""The right-hand operand of `linear`: activations [T, K] interleaved by token tiles, as int8, pairs of int8 or float32.

Tokens are cut into tiles of `token_tile()` (8 or 4), and the last tile into the smallest power of two that holds
the rest. A tile of M tokens that begins at token t lies at t * K elements:
    int8  x    [K / 4][M][4]        round(v / scale), -127 .. 127
          aux  [K / 32][6][M]       per unit of 32 columns: scale f32 = max |v| / 127; sum f32 = scale * s;
                                    -s i32; -s of its first 16 columns i32; -s of its first and of its last 16 columns
                                    f32, where s is the sum of the int8
    f32   x    [K][M]
A pair is two rows, as if of two tokens: the int8 above, and what they leave over as int8 of 1/254 of their scale. So a
token tile has half as many tokens, their products are sums of two, and a number has 16 bits for its unit.

M neighbouring words are what one step of a register tile reads. Tokens after the last are left as they are.
"""

from dataclasses import dataclass

from numflow.cpu.runtime.kernel import Call, Code
from numflow.cpu.simd.isa import token_tile
from numflow.cpu.weights.layout import AUX_BYTES, UNIT

_CODE = Code("numflow.cpu.linear.activations_kernels")
TOKEN_TILE = token_tile()
PIECES = {"int8": 1, "int16": 2, "f32": 0}  # int8 that a number becomes, by kind of activations; 0: it stays a float32
NAMES = ("f32", "int8", "int16")  # of kernels, by the same
CHUNK = 256  # columns that a thread takes at a time


@dataclass(frozen=True)
class Operand:
    """A view as the right-hand operand of a matrix: addresses of x and aux (0 for float32).

    calls: what makes it from the view; empty if an earlier step has and the view was not written since.
    """

    x: int
    aux: int
    calls: tuple[Call, ...]


def operand_bytes(rows: int, columns: int, pieces: int) -> tuple[int, int]:
    """Bytes of x and of aux for up to `rows` tokens of `columns` columns; either must start at a multiple of 64."""
    numbers = -(-rows // TOKEN_TILE) * TOKEN_TILE * columns * max(1, pieces)
    return (numbers, numbers // UNIT * AUX_BYTES) if pieces else (numbers * 4, 0)


def bind_operand(header: int, rows: int, source: int, stride: int, columns: int, x: int, aux: int,
                 pieces: int) -> Call:
    """The call that makes the operand at `x` (and `aux`, for int8) from float32 rows `stride` elements apart.

    header, rows: address of the batch header and index of the field that counts rows.
    """
    return Call.of(None, _CODE.kernel(f"to_{NAMES[pieces]}"), header, rows, source, stride, columns, x, aux)
