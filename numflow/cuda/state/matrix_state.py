"""Layout of matrix states on a device: of each head the state at the border of blocks, and the tokens since then.

Blocks of 16 tokens begin at fixed positions. Within a block the state is what it was at its border, and its tail: keys,
what was written, and how much of each is left now. At the block's end the tail is worked into the state, which is then
rounded to its type. So a token reads the state once and writes only its own row of the tail, and its bits depend on
positions only, never on how a text was cut.

    state  f32, f16 or bf16 [dk][dv], or rows of int8 [dv] with a float32 scale behind each; rows of whole words
    keys   f32 [dk][16 tokens]  by column, of decays for each column faded up to now
    rows   f32 [16][dv]         what each token has written (u)
    left   f32 [16]             what is left of each token now, where a head has one decay
    fade   f32 [dk]             what is left of the state at the border, by column or in the first number
"""

from collections.abc import Callable
from typing import NamedTuple

from numflow.cuda.lang.arithmetic import float_of, float_to_half, half_to_float, pack_bfloats, round_to_int
from numflow.cuda.lang.intrinsics import as_u16, as_words, lane_index, shuffle_xor
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.network.states import matrix_states, stored_states
from numflow.ops import Network, State
from numflow.quant.state import STATE_BLOCK, row_bytes


class MatrixLayout(NamedTuple):
    """Numbers of 4 bytes of a row of the state, from where a head begins to each part, and of a head."""

    row: u32
    keys: u32
    rows: u32
    left: u32
    fade: u32
    head: u32


def matrix_layout(state: State) -> MatrixLayout:
    """The layout of a state [heads, dk, dv]; parts begin on 16 bytes."""
    _, k_dim, v_dim = state.shape
    row = -(-row_bytes(state.dtype, v_dim) // 4)
    places = [0]
    for size in (k_dim * row, STATE_BLOCK * k_dim, STATE_BLOCK * v_dim, STATE_BLOCK, k_dim):
        places.append(places[-1] + -(-size // 4) * 4)
    return MatrixLayout(row, *places[1:])


def slot_numbers(network: Network, dtype: str) -> dict[str, tuple[State, int]]:
    """By name the network's states, the matrices of a type, and numbers of 4 bytes of a slot of each."""
    matrices = matrix_states(network)
    return {name: (state, state.shape[0] * matrix_layout(state).head if name in matrices else state.size)
            for name, state in stored_states(network, dtype).items()}


@device
def _read_f32(row, column, scale_at):
    return row[column]


@device
def _read_f16(row, column, scale_at):
    return half_to_float(as_u16(row)[column])


@device
def _read_bf16(row, column, scale_at):
    return float_of(u32(u32(as_u16(row)[column]) << u32(16)))


@device
def _read_q8(row, column, scale_at):
    word = as_words(row)[column >> u32(2)]
    return f32(i32(u32(word << u32(24 - 8 * (column & u32(3))))) >> 24) * row[scale_at]


@device
def _write_f32(row, column, value):
    row[column] = value


@device
def _write_f16(row, column, value):
    as_u16(row)[column] = float_to_half(value)


@device
def _write_bf16(row, column, value):
    as_u16(row)[column] = pack_bfloats(value, f32(0)) & u32(0xFFFF)


@device
def write_q8(row, column, columns, value, inverse):
    """A number of a row as int8; all lanes of a warp call it for neighbouring columns, 4 of them in a word."""
    lane, byte = u32(lane_index()), u32(0)
    if column < columns:
        byte = u32(u32(round_to_int(value * inverse)) & u32(0xFF))
    word = i32(u32(byte << u32(8 * (lane & u32(3)))))
    word = i32(word | shuffle_xor(word, 1))
    word = i32(word | shuffle_xor(word, 2))
    if lane & u32(3) == 0 and column < columns:
        as_words(row)[column >> u32(2)] = u32(word)


_READ = {"f32": _read_f32, "f16": _read_f16, "bf16": _read_bf16, "q8": _read_q8}
_WRITE = {"f32": _write_f32, "f16": _write_f16, "bf16": _write_bf16}


def reader(dtype: str) -> DeviceFunction:
    """read(row, column, scale_at) -> f32; row: pointer to f32, scale_at: place of a q8 row's scale."""
    return _READ[dtype]


def writer(dtype: str) -> Callable | None:
    """write(row, column, value), None for q8, whose rows are written as a whole (write_q8)."""
    return _WRITE.get(dtype)
