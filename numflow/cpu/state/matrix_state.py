"""Layout of matrix states: for each head, the state at the start of the current block and the tail, its tokens so far.

Blocks of 16 tokens begin at fixed positions. Within a block, the stored state is the state at the block's start; the
tail has keys, written rows and cumulative decays of the tokens since. At the block's end the tail is added to the
state, which is then rounded to its type. So the stored bytes and a token's bits depend on positions only, never on how
a text is cut into batches. A token reads the state once and writes only its own row of the tail.

    state        f32, f16 or bf16 [dk][dv padded], or rows of int8 [dv padded] with a float32 scale behind each row
    rows         f32 [16][dv padded]    u, the row that each token has written
    tail_decay   f32 [16]               cumulative decay of each token, if a head has one decay
    state_decay  f32 [dk padded]        cumulative decay of the state, by column, or one in the first element
    active_tail  f32                    0 or 1: the current one of two tails of keys

Behind all heads, the tails of keys:

    keys         f32 [dk][16 tokens]    by column. One tail per head, decayed in place with decays by column; or two
                                        tails per key head, if that is less memory

Heads may share the tail of their key head, even heads of two threads, which then write the same values. One thread may
process the last block of a text while another processes the first, so a new tail overwrites the tail before the last.
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
    """Offsets and sizes in bytes.

    rows, tail_decay, state_decay, active_tail: offsets from a head's state. keys: offset of the tails in a slot.
    row, head, tail, slot: sizes of a row of the state, of a head, of the keys of a tail, of all heads and tails.
    shared: whether heads share tails.
    """

    kind: int
    row: int
    rows: int
    tail_decay: int
    state_decay: int
    active_tail: int
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
        tail_decay = rows + 4 * STATE_BLOCK * columns
        state_decay = tail_decay + 4 * STATE_BLOCK
        active_tail = _lines(state_decay + 4 * padded(k_dim))
        head = active_tail + LINE
        tail, shared = 4 * STATE_BLOCK * k_dim, 2 * param(step, "key_heads")
        tails = heads if fades_by_column(network, step) else min(shared, heads)
        return cls(STATE_TYPES.index(state.dtype), row, rows, tail_decay, state_decay, active_tail, head, heads * head,
                   tail, int(tails < heads), heads * head + tails * tail)


def slot_bytes(network: Network, dtype: str) -> dict[State, int]:
    """Bytes of a slot of each state: matrix states by MatrixLayout, scans as f32 [groups of 16 heads][dk][16]."""
    matrices, scans = matrix_states(network), scan_states(network)

    def size(state: State) -> int:
        if state.name in matrices:
            return MatrixLayout.of(state, matrices[state.name], network).slot
        return 4 * (padded(state.shape[0]) * state.shape[1] if state.name in scans else state.size)
    return {state: size(state) for state in stored_states(network, dtype).values()}


def _lines(nbytes: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE
