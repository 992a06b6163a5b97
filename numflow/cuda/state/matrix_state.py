"""Layout of matrix states on a device: for each head the state at the last chunk boundary, and the tokens since then.

Chunks of 16 tokens begin at positions that are multiples of 16. Within a chunk, the state matrix is the one at the
chunk's beginning; the tokens of the chunk are in the tail: their keys, their u and their decays. At the end of the
chunk the tail is added to the state matrix, which is then rounded to its data type. So a token reads the state matrix
once and writes only its own row of the tail. The resulting bits depend on positions only, not on how a prompt was cut.

    state  f32, f16 or bf16 [dk][dv], or rows of int8 [dv] followed by a float32 scale; rows of whole 32-bit words
    keys   f32 [dk][16 tokens]  by column; with a decay for each key column, decayed up to the current token
    rows   f32 [16][dv]         u of each token
    tail_decay   f32 [16]       decay from each token to the current one, if a head has a single decay
    state_decay  f32 [dk]       decay of the state since the chunk's beginning, by key column or in element 0
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
    """Sizes and offsets in 32-bit words: of a row of the state, from a head's beginning to each part, and of a head."""

    row: u32
    keys: u32
    rows: u32
    tail_decay: u32
    state_decay: u32
    head: u32


def matrix_layout(state: State) -> MatrixLayout:
    """The layout of a state [heads, dk, dv]. Each part is aligned to 16 bytes."""
    _, k_dim, v_dim = state.shape
    row = -(-row_bytes(state.dtype, v_dim) // 4)
    offsets = [0]
    for size in (k_dim * row, STATE_BLOCK * k_dim, STATE_BLOCK * v_dim, STATE_BLOCK, k_dim):
        offsets.append(offsets[-1] + -(-size // 4) * 4)
    return MatrixLayout(row, *offsets[1:])


def slot_words(network: Network, dtype: str) -> dict[str, tuple[State, int]]:
    """The network's states by name, with the 32-bit words of a slot. dtype: data type of the state matrices."""
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
    """Write one value of a row as int8. All lanes of a warp call it, for adjacent columns; 4 lanes share a word."""
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
    """read(row, column, scale_at) -> f32. row: pointer to f32; scale_at: word offset of a q8 row's scale."""
    return _READ[dtype]


def writer(dtype: str) -> Callable | None:
    """write(row, column, value); None for q8, whose rows are written as a whole (write_q8)."""
    return _WRITE.get(dtype)
