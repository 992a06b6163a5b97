"""The right-hand operand of `linear`: activations [T, K] interleaved by token tiles, as int8, pairs of int8, pairs of
bfloat16 or float32.

Tokens are cut into tiles of `token_tile()` (8 or 4). The last tile has the smallest power of two that holds the
remaining tokens. A tile of M tokens that begins at token t lies at t * K elements:
    int8  x    [K / 4][M][4]        round(v / scale), -127 .. 127
          aux  [K / 32][6][M]       per unit of 32 columns: scale f32 = max |v| / 127; sum f32 = scale * s;
                                    -s i32; -s of its first 16 columns i32; -s of its first and of its last 16 columns
                                    f32, where s is the sum of the int8
    bf16  x    [K / 2][M][2]        K is even
    f32   x    [K][M]
A pair of int8 is two rows, as if of two tokens: the int8 above, and the rounding error as int8 with 1/254 of the scale.
So a token tile has half as many tokens, the products of the two rows are added up, and an activation has about 16 bits.

One step of a register tile reads M neighbouring words. Tokens of a tile behind the last token are not written.
"""

from dataclasses import dataclass

from numflow.cpu.runtime.kernel import Argument, Call, Code, Scratch
from numflow.cpu.simd.isa import token_tile
from numflow.cpu.weights.layout import AUX_BYTES, UNIT

_CODE = Code("numflow.cpu.linear.activations_kernels")
TOKEN_TILE = token_tile()
F32, INT8, INT16, BF16 = range(4)  # kinds of operands
NAMES = ("f32", "int8", "int16", "bf16")  # in names of kernels, in the same order
AUTO = "auto"  # pairs of int8 where only rows whose logits are wanted go on, int8 elsewhere (linear.py: activations_of)
# Operand kinds of quantised matrices and of float matrices, by the option "activations".
OPERANDS = {"int8": (INT8, F32), "int16": (INT16, F32), AUTO: (INT8, F32), "bf16": (INT16, BF16), "f32": (F32, F32)}
CHUNK = 256  # columns that a thread handles at a time


@dataclass(frozen=True)
class Operand:
    """A view as the right-hand operand of a matrix: memory of x, and of aux (int8 only, else 0).

    calls: calls that make the operand from the view.
    """

    x: Scratch
    aux: Scratch | int
    calls: tuple[Call, ...]


def operand_bytes(rows: int, columns: int, kind: int) -> tuple[int, int]:
    """Bytes of x and of aux for up to `rows` tokens of `columns` columns; both must start at a multiple of 64."""
    elements = -(-rows // TOKEN_TILE) * TOKEN_TILE * columns * (2 if kind == INT16 else 1)
    if kind in (INT8, INT16):
        return elements, elements // UNIT * AUX_BYTES
    return elements * (2 if kind == BF16 else 4), 0


def bind_operand(header: int, rows: int, source: int, stride: int, columns: int, x: Argument, aux: Argument,
                 kind: int) -> Call:
    """The call that makes the operand at `x` (and `aux`, for int8) from float32 rows `stride` elements apart.

    header, rows: address of the batch header and index of the field that counts rows.
    """
    return Call.of(None, _CODE.kernel(f"to_{NAMES[kind]}"), header, rows, source, stride, columns, x, aux)
