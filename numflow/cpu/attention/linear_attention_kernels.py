"""Kernels of linear attention (linear_attention.py)."""

from numflow.cpu.attention.linear_attention import COLUMNS, SLOTS
from numflow.cpu.runtime.access import f32_ptr, i32_ptr, i64, share
from numflow.cpu.runtime.kernel import N_SEQUENCES, POSITIONS, STARTS, kernel
from numflow.cpu.simd.float32 import fma, load_part, splat, store_part, sum_lanes
from numflow.cpu.simd.functions import exp
from numflow.cpu.simd.vector import inline, load_f32, merged, store_f32, zero_f32
from numflow.cpu.state.state_access import slot_of


@kernel
def linear_attention(args, thread, n_threads):
    """Every token adds k v."""
    _columns_of_heads(args, thread, n_threads, None)


@kernel
def delta_rule(args, thread, n_threads):
    """Every token adds k beta (v - what the state says of k)."""
    _columns_of_heads(args, thread, n_threads, True)


@merged
def _columns_of_heads(args, thread, n_threads, delta):
    """Items: heads times 32 value columns times sequences, so that threads share long sequences too."""
    sequences = i64(i64(args, SLOTS.header), N_SEQUENCES)
    groups = (i64(args, SLOTS.v_dim) + COLUMNS - 1) // COLUMNS
    scratch = i64(args, SLOTS.scratch) + thread * i64(args, SLOTS.scratch_bytes)
    begin, end = share(i64(args, SLOTS.heads) * groups * sequences, thread, n_threads)
    for item in range(begin, end):
        part = item // sequences
        _columns(args, scratch, item % sequences, part // groups, part % groups * COLUMNS, delta)


@merged
def _columns(args, scratch, sequence, head, first, delta):
    """All tokens of a sequence for 32 value columns of a head."""
    starts, k_dim = i32_ptr(i64(i64(args, SLOTS.header), STARTS)), i64(args, SLOTS.k_dim)
    begin, end = starts[sequence], starts[sequence + 1]
    operands = scratch + 4 * COLUMNS * k_dim
    size, left = 4 * _padded(k_dim), i64(args, SLOTS.v_dim) - first
    if begin < end:
        memory = _state(args, sequence, head) + 4 * first
        _prepare(args, operands, begin, head)
        said, said_more = _load(args, scratch, memory, operands + 3 * size, left, _is_new(args, begin))
        for t in range(begin, end):
            here, ahead = operands + (t - begin) % 2 * 4 * size, operands + (t - begin + 1) % 2 * 4 * size
            if t + 1 < end:
                _prepare(args, ahead, t + 1, head)
            at = 4 * (head * i64(args, SLOTS.v_dim) + first)
            v = i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride) + at
            u, more = load_part(v, left), load_part(v + 64, left - 16)
            skip = _skip(args, head)
            skipped, skipped_more = u * skip, more * skip
            if delta is not None:
                beta = f32_ptr(i64(args, SLOTS.beta) + 4 * t * i64(args, SLOTS.beta_stride))[head]
                u, more = (u - said) * beta, (more - said_more) * beta
            if i64(args, SLOTS.scaled):
                step = _step(args, t, head)
                u, more = u * step, more * step
            found, found_more, said, said_more = _token(scratch, here, ahead, size, k_dim, u, more, delta)
            y = i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride) + at
            store_part(y, found + skipped, left)
            store_part(y + 64, found_more + skipped_more, left - 16)
        for n in range(k_dim):
            row = memory + 4 * n * i64(args, SLOTS.v_dim)
            store_part(row, load_f32(scratch + 128 * n), left)
            store_part(row + 64, load_f32(scratch + 128 * n + 64), left - 16)


@inline
def _token(scratch, here, ahead, size, k_dim, u, more, delta):
    """One pass over the rows of the state: fade, add k u, and what it then says of q; also of the next token's k."""
    found, found_more, said, said_more = zero_f32(), zero_f32(), zero_f32(), zero_f32()
    decay, k, q, asked = f32_ptr(here), f32_ptr(here + size), f32_ptr(here + 2 * size), f32_ptr(ahead + 3 * size)
    for n in range(k_dim):
        row = scratch + 128 * n
        s, t = fma(k[n], u, load_f32(row) * decay[n]), fma(k[n], more, load_f32(row + 64) * decay[n])
        found, found_more = fma(q[n], s, found), fma(q[n], t, found_more)
        if delta is not None:
            said, said_more = fma(asked[n], s, said), fma(asked[n], t, said_more)
        store_f32(row, s)
        store_f32(row + 64, t)
    return found, found_more, said, said_more


@inline
def _load(args, scratch, memory, asked, left, new):
    """The state's columns into scratch memory, zeros where the sequence is new; what they say of the first k."""
    said, said_more = zero_f32(), zero_f32()
    for n in range(i64(args, SLOTS.k_dim)):
        row, s, t = memory + 4 * n * i64(args, SLOTS.v_dim), zero_f32(), zero_f32()
        if not new:
            s, t = load_part(row, left), load_part(row + 64, left - 16)
        said, said_more = fma(f32_ptr(asked)[n], s, said), fma(f32_ptr(asked)[n], t, said_more)
        store_f32(scratch + 128 * n, s)
        store_f32(scratch + 128 * n + 64, t)
    return said, said_more


@inline
def _prepare(args, to, t, head):
    """Of a token and head the rows decay, k, q and decay * k, f32 [dk] each."""
    k_dim, size = i64(args, SLOTS.k_dim), 4 * _padded(i64(args, SLOTS.k_dim))
    at = 4 * _key_head(args, head) * k_dim
    q = i64(args, SLOTS.q) + 4 * t * i64(args, SLOTS.q_stride) + at
    k = i64(args, SLOTS.k) + 4 * t * i64(args, SLOTS.k_stride) + at
    for i in range(0, k_dim, 16):
        decay, key = _decay(args, t, head, i), load_part(k + 4 * i, k_dim - i)
        store_f32(to + 4 * i, decay)
        store_f32(to + size + 4 * i, key)
        store_f32(to + 2 * size + 4 * i, load_part(q + 4 * i, k_dim - i))
        store_f32(to + 3 * size + 4 * i, decay * key)


@kernel
def scan(args, thread, n_threads):
    """Heads of one value column; lanes are key columns. Items: 16 heads times sequences."""
    sequences, heads = i64(i64(args, SLOTS.header), N_SEQUENCES), i64(args, SLOTS.heads)
    scratch = i64(args, SLOTS.scratch) + thread * i64(args, SLOTS.scratch_bytes)
    begin, end = share((heads + 15) // 16 * sequences, thread, n_threads)
    for item in range(begin, end):
        first = item // sequences * 16
        for head in range(first, min(first + 16, heads)):
            _channel(args, scratch, item % sequences, head)


@merged
def _channel(args, scratch, sequence, head):
    """All tokens of a sequence for one head of one value column."""
    starts, k_dim = i32_ptr(i64(i64(args, SLOTS.header), STARTS)), i64(args, SLOTS.k_dim)
    begin, end, at = starts[sequence], starts[sequence + 1], 4 * _key_head(args, head) * k_dim
    memory, skip = _state(args, sequence, head), _skip(args, head)
    if begin < end:
        for i in range(0, k_dim, 16):
            store_f32(scratch + 4 * i, zero_f32() if _is_new(args, begin) else load_part(memory + 4 * i, k_dim - i))
        for t in range(begin, end):
            q = i64(args, SLOTS.q) + 4 * t * i64(args, SLOTS.q_stride) + at
            k = i64(args, SLOTS.k) + 4 * t * i64(args, SLOTS.k_stride) + at
            v, found = f32_ptr(i64(args, SLOTS.v) + 4 * t * i64(args, SLOTS.v_stride))[head], zero_f32()
            u = v * _step(args, t, head) if i64(args, SLOTS.scaled) else v
            for i in range(0, k_dim, 16):
                s = load_f32(scratch + 4 * i) * _decay(args, t, head, i)
                s = fma(load_part(k + 4 * i, k_dim - i), u, s)
                found = fma(load_part(q + 4 * i, k_dim - i), s, found)
                store_f32(scratch + 4 * i, s)
            y = f32_ptr(i64(args, SLOTS.y) + 4 * t * i64(args, SLOTS.y_stride))
            y[head] = sum_lanes(found) + v * skip
        for i in range(0, k_dim, 16):
            store_part(memory + 4 * i, load_f32(scratch + 4 * i), k_dim - i)


@inline
def _padded(k_dim):
    return (k_dim + 15) // 16 * 16


@inline
def _key_head(args, head):
    """The key head that a head uses: neighbours share one, or (tiled) every key_heads-th does."""
    key_heads = i64(args, SLOTS.key_heads)
    return head % key_heads if i64(args, SLOTS.tiled) else head // (i64(args, SLOTS.heads) // key_heads)


@inline
def _step(args, t, head):
    """The step of a token and head."""
    return f32_ptr(i64(args, SLOTS.steps) + 4 * t * i64(args, SLOTS.steps_stride))[head]


@inline
def _decay(args, t, head, i):
    """exp(step * rate) of 16 key columns; a step or a rate is one for all columns of a head or one for each."""
    k_dim, rates = i64(args, SLOTS.k_dim), i64(args, SLOTS.rates)
    if i64(args, SLOTS.column_rates):
        rate = load_part(rates + 4 * (head * k_dim + i), k_dim - i)
    else:
        rate = splat(f32_ptr(rates)[head])
    if not i64(args, SLOTS.steps):
        return exp(rate)
    if i64(args, SLOTS.column_steps):
        steps = i64(args, SLOTS.steps) + 4 * (t * i64(args, SLOTS.steps_stride) + head * k_dim + i)
        return exp(load_part(steps, k_dim - i) * rate)
    return exp(rate * _step(args, t, head))


@inline
def _skip(args, head):
    """The factor of the values of a head that pass by the state."""
    return f32_ptr(i64(args, SLOTS.skip))[head]


@inline
def _is_new(args, row):
    """A text that begins with this row (its position is 0)."""
    return i32_ptr(i64(i64(args, SLOTS.header), POSITIONS))[row] == 0


@inline
def _state(args, sequence, head):
    """Address of the state [dk, dv] of a sequence's head."""
    slot = slot_of(i64(args, SLOTS.header), sequence, i64(args, SLOTS.state), i64(args, SLOTS.state_stride))
    return slot + 4 * head * i64(args, SLOTS.k_dim) * i64(args, SLOTS.v_dim)
