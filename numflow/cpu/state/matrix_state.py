"""Layout of matrix states: of each head the state at the border of blocks, and the tokens since then.

Blocks of 16 tokens begin at fixed positions. Within a block the state is what it was at its border, and its tail: keys,
what was written, and how much of each is left now. At the block's end the tail is worked into the state, which is then
rounded to its type. So what is stored, and a token's bits, depend on positions only, never on how a text was cut, and
a token reads the state once and writes only its own row of the tail.

    state  f32, f16 or bf16 [dk][dv padded], or rows of int8 [dv padded] with a float32 scale behind each
    rows   f32 [16][dv padded]    what each token has written (u)
    left   f32 [16]               what is left of each token now, where a head has one decay
    fade   f32 [dk padded]        what is left of the state at the border, by column or in the first number
    turn   f32                    0 or 1: which of two tails of keys is the head's

Behind all heads, the tails of keys:

    keys   f32 [dk][16 tokens]    by column; one tail for each head, of decays for each column faded up to now, or two
                                  for each key head where that is less

Heads may share the tail of their key head, also those of two threads, which write the same numbers. One thread may be
at the last block of a text while another is at the first, so a new tail takes the place of the one before the last.
"""

from dataclasses import dataclass

from numflow.cpu.memory.buffers import LINE, padded
from numflow.network.states import fades_by_column, matrix_states, scan_states, stored_states
from numflow.ops import Network, State, Step, param
from numflow.quant.state import STATE_BLOCK, STATE_TYPES, row_bytes

F32, F16, BF16, Q8 = range(len(STATE_TYPES))
assert STATE_BLOCK == 16  # lanes of a vector


@dataclass(frozen=True)
class MatrixLayout:
    """Offsets in bytes from where a head's state begins, and from where a slot begins to the tails of keys. row: bytes
    of a row of the state; head: of a head; tail: of the keys of a tail; shared: whether heads share them; slot: bytes
    of all heads and tails."""

    kind: int
    row: int
    rows: int
    left: int
    fade: int
    turn: int
    head: int
    keys: int
    tail: int
    shared: int
    slot: int

    @classmethod
    def of(cls, state: State, step: Step, network: Network) -> "MatrixLayout":
        """The layout of a state [heads, dk, dv] of a `linear_attention`."""
        heads, k_dim, v_dim = state.shape
        columns = padded(v_dim)
        row = row_bytes(state.dtype, columns)
        rows = _lines(k_dim * row)
        left = rows + 4 * STATE_BLOCK * columns
        fade = left + 4 * STATE_BLOCK
        turn = _lines(fade + 4 * padded(k_dim))
        head = turn + LINE
        tail, shared = 4 * STATE_BLOCK * k_dim, 2 * param(step, "key_heads")
        tails = heads if fades_by_column(network, step) else min(shared, heads)
        return cls(STATE_TYPES.index(state.dtype), row, rows, left, fade, turn, head, heads * head, tail,
                   int(tails < heads), heads * head + tails * tail)


def slot_bytes(network: Network, dtype: str) -> dict[State, int]:
    """Bytes of a slot of each state: of matrices by their layout, of scans [groups of 16 heads][dk][16] float32."""
    matrices, scans = matrix_states(network), scan_states(network)

    def size(state: State) -> int:
        if state.name in matrices:
            return MatrixLayout.of(state, matrices[state.name], network).slot
        return 4 * (padded(state.shape[0]) * state.shape[1] if state.name in scans else state.size)
    return {state: size(state) for state in stored_states(network, dtype).values()}


def _lines(nbytes: int) -> int:
    """Whole cache lines."""
    return -(-nbytes // LINE) * LINE
