"""Attention of few rows over many keys, on tensor cores: decoding, from the paged cache in any type but float32.

A block has a sequence, a head of keys and one of the parts that its keys are cut into, and works for all rows of that
head: the query heads of its group, of all the sequence's new tokens, 8 or 16 at a time. So every key is read once. Its
4 warps take 32 keys in turn (16 where registers are scarce) and join their sums in shared memory; join.py
joins the parts.

Of wide values (latent attention has 512 columns) registers hold 128 or 256: a block has one such slice. With wide keys
or values the rows of a head go round several blocks, so that these kernels do for prompts too.

With keys as the left and queries as the right side of a product, a lane needs whole pieces of 8 columns of two keys,
which is what memory has side by side: keys and values go from the cache to registers, are decoded there and multiplied,
without shared memory. In numbers of a lane, g = lane // 4 and t = lane % 4:

    S^T [keys, rows] = K Q^T       lane has the pieces 4 r + t of keys g and g + 8: any order of columns will do
    O^T [columns, rows] = V^T P^T  lane has the pieces 8 r + g of keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9

Queries, weights and decoded numbers are rounded to float16; scores and sums are float32.
"""

import functools

from numflow.cuda.attention.bias import LOG2_E, biased, seen
from numflow.cuda.attention.join import LOWEST, warp_joiner
from numflow.cuda.attention.parameters import BatchTables, Biases, Halves, Heads, Scores
from numflow.cuda.device.call import N_SEQUENCES
from numflow.cuda.lang.arithmetic import exp2, fmax, mma_f16, pack_halves, prmt, transpose_matrix
from numflow.cuda.lang.hadamard import rotate_eight
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    after_previous,
    block_x,
    block_y,
    block_z,
    grid_x,
    grid_z,
    lane_index,
    load4,
    prefetch,
    shuffle_xor,
    store4,
    stream1,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.state.cache_code import fetcher, halver, name_of_values, pitch, region, width
from numflow.cuda.weights.operand import finite, half_word
from numflow.quant.kv import CODED

WARPS = 4
LINE = 32         # words of a line of memory
WIDEST = 256      # columns of a key or a value, above which they are wide
SLICE_ROUNDS = 4  # of 64 columns of values that registers have room for; half of them beside the decoding of codes


def slices_of(v_type: str, v_dim: int) -> int:
    """Slices that the columns of a value are cut into."""
    rounds = -(-width(v_type, v_dim) // 64)
    return 1 if rounds <= SLICE_ROUNDS else -(-rounds // (SLICE_ROUNDS // 2 if v_type in CODED else SLICE_ROUNDS))


@functools.cache
def few_kernel(k_type: str, v_type: str, k_dim: int, v_dim: int, tiles: int, has_cap: bool,
               has_slopes: bool, has_sinks: bool, has_buckets: bool, v_row: int) -> Kernel:
    """Grid (key heads, sequences, parts); tiles: of 8 rows at a time; v_row: as in exact.py.

    wide: grid (turns * key heads * slices, sequences, parts), where rows go round the turns.
    """
    wide, slices = max(k_dim, v_dim) > WIDEST, slices_of(v_type, v_dim)
    sixteens = 2 if tiles == 1 and max(k_dim, v_dim) <= 128 else 1  # keys, of a warp at a time
    step, s_count = 16 * sixteens, 4 * sixteens * tiles
    rounds, v_rounds = -(-width(k_type, k_dim) // 32), -(-width(v_type, v_dim) // (64 * slices))
    turned_back = v_type in CODED
    queries, scores = SharedArray(u32, 128 * tiles * rounds), LocalArray(f32, s_count)
    sums, eight = LocalArray(f32, v_rounds * 16 * tiles), LocalArray(f32, 8)
    peaks_of, totals_of, factors = (LocalArray(f32, 2 * tiles) for _ in range(3))
    spots_of, lows_of, highs_of, heads_of = (LocalArray(i32, 2 * tiles) for _ in range(4))
    shared = SharedArray(f32, 2 * 32 * (v_rounds * 16 * tiles + 4 * tiles))
    keys_at, values_at = region(k_type, k_dim), region(v_type, v_row)
    bias = biased(has_cap, has_slopes, has_buckets, LOG2_E)
    make_queries, key_products = _queries(k_type in CODED, rounds, tiles), _key_products(k_type, k_dim, tiles, sixteens)
    value_products = _value_products(v_type, v_dim, v_row, v_rounds, slices, tiles, sixteens)
    early = "f16" in (k_type, v_type)  # codes leave no registers for more, and wait first of all
    of_batch, share_of = stream1 if early else _number, _share_of(step)
    join_warps, ask = warp_joiner(v_rounds * 16, tiles), _cache_prefetch(k_type, v_type, k_dim, v_row, step)
    extras = "_softcap" * has_cap + "_slopes" * has_slopes + "_sinks" * has_sinks + "_buckets" * has_buckets
    k_name, v_name = f"{k_type}_{pitch(k_type, k_dim)}", name_of_values(v_type, v_dim, v_row)

    @kernel(f"attention_few_{k_name}_{v_name}_{8 * tiles}{extras}", 32 * WARPS, blocks=2 if rounds < 8 else 1,
            exact=has_buckets)
    def _few(y: Rows, partial: f32.ptr, q: Rows, k: u32.ptr, v: u32.ptr, biases: Biases, batch: BatchTables,
             shape: Heads, rule: Scores, most: u32, halves: Halves):
        # Place in the grid: a sequence and a head of keys; of wide values a slice, and a turn of the rows.
        lane, warp, sequence, kv_head = u32(lane_index()), u32(thread_index() >> u32(5)), u32(block_y()), block_x()
        first_column, turn, turns = u32(0), u32(0), u32(1)
        if wide:
            first_column, kv_head = u32(block_x() % slices * (64 * v_rounds)), u32(block_x() // slices % shape.kv_heads)
            turn, turns = u32(block_x() // slices // shape.kv_heads), u32(grid_x() // (slices * shape.kv_heads))
        # The sequence: no kernel writes the batch, so it is read while the kernels before may still run.
        if sequence >= u32(of_batch(batch.counts, N_SEQUENCES)):
            if early:
                after_previous()
            return
        begin_token, group = u32(of_batch(batch.starts, sequence)), u32(shape.heads // shape.kv_heads)
        rows = u32((u32(of_batch(batch.starts, sequence + 1)) - begin_token) * group)
        length = i32(of_batch(batch.lengths, sequence))
        blocks, shares = batch.table + sequence * batch.table_stride, u32(grid_z())
        if early:
            ask(k, v, blocks, shape.kv_heads, kv_head, shape.block_size, length, rule.causal, rule.window, rule.chunk,
                lane, warp)
            after_previous()
        if rows > most * group:
            return
        # Registers and shared memory.
        query, s, acc, fades, x = queries(), scores(), sums(), factors(), eight()
        peaks, totals, spots, lows, highs, own = peaks_of(), totals_of(), spots_of(), lows_of(), highs_of(), heads_of()
        # For each tile of rows: load queries to shared memory, begin the online softmax.
        first_row = u32(8 * tiles * turn)
        while first_row < rows:
            make_queries(query, x, q.data, q.stride, begin_token, group, kv_head, first_row, rows, shape.k_dim, warp,
                         lane)
            for i in range(2 * tiles):
                row = u32(first_row + 8 * (i // 2) + 2 * (lane & u32(3)) + i % 2)
                there = row < rows
                token, own[i] = u32(begin_token + row // group), i32(kv_head * group + row % group)
                spots[i] = i32(batch.positions[token]) if there else i32(0)
                lows[i], highs[i] = seen(spots[i], length, rule.causal, rule.window, rule.chunk)
                highs[i] = highs[i] if there else i32(0)
                peaks[i], totals[i] = f32(LOWEST), f32(0)
                if has_sinks and block_z() == 0 and warp == 0 and there:
                    peaks[i], totals[i] = biases.sinks[own[i]] * f32(LOG2_E), f32(1) if lane < 4 else f32(0)
            # The keys that any row of the tile sees, and the share of them that is this part's.
            for i in range(v_rounds * 16 * tiles):
                acc[i] = f32(0)
            last_row = u32(first_row + 8 * tiles - 1) if first_row + 8 * tiles - 1 < rows else u32(rows - 1)
            first, _ = seen(i32(batch.positions[begin_token + first_row // group]), length, rule.causal, rule.window,
                            rule.chunk)
            _, end = seen(i32(batch.positions[begin_token + last_row // group]), length, rule.causal, rule.window,
                            rule.chunk)
            first, share = share_of(first, end)
            end = i32(first + share) if first + share < end else end
            # Warps take keys in turn: scores on tensor cores (mma), keys decoded in registers.
            at = i32(first + step * i32(warp))
            while at < end:
                block, place = u32(blocks[u32(at) // shape.block_size]), u32(u32(at) % shape.block_size)
                for n in range(s_count):
                    s[n] = f32(0)
                last = u32(end - at - 1)
                keys = keys_at(k, block, shape.kv_heads, kv_head, shape.block_size)
                key_products(s, query, keys, shape.block_size, place, last, lane)
                # Online softmax: bias and mask, new maxima, weights, factors that rescale older sums.
                for i in range(2 * tiles):
                    largest = f32(LOWEST)
                    for key in range(2 * sixteens):  # of the lane: 16 m + 8 h + g, with h the lower bit of `key`
                        n = 4 * (tiles * (key // 2) + i // 2) + 2 * (key % 2) + i % 2
                        where = i32(at + 8 * key + i32(lane >> u32(2)))
                        score = bias(s[n], rule.scale, rule.cap, biases.slopes, biases.buckets, i32(where - spots[i]),
                                     u32(own[i]), shape.heads, rule.n_buckets, rule.spread, rule.causal)
                        s[n] = score if where >= lows[i] and where < highs[i] else f32(LOWEST)
                        largest = fmax(largest, s[n])
                    largest = fmax(largest, shuffle_xor(largest, 4))
                    largest = fmax(largest, shuffle_xor(largest, 8))
                    largest = fmax(fmax(largest, shuffle_xor(largest, 16)), peaks[i])
                    fades[i], peaks[i] = exp2(peaks[i] - largest), largest
                    totals[i] *= fades[i]
                    for key in range(2 * sixteens):
                        n = 4 * (tiles * (key // 2) + i // 2) + 2 * (key % 2) + i % 2
                        s[n] = exp2(s[n] - largest) if s[n] > f32(LOWEST) else f32(0)
                        totals[i] += s[n]
                # Weighted values on tensor cores, added to the rescaled sums.
                values = values_at(v, block, shape.kv_heads, kv_head, shape.block_size)
                value_products(acc, fades, s, values, shape.block_size, place, last, lane, first_column)
                at = i32(at + step * WARPS)
            # Sums of a row over the lanes that share it, then over the warps in shared memory.
            for i in range(2 * tiles):
                totals[i] += shuffle_xor(totals[i], 4)
                totals[i] += shuffle_xor(totals[i], 8)
                totals[i] += shuffle_xor(totals[i], 16)
            join_warps(acc, peaks, totals, shared(), warp, lane)
            # Epilogue: the first warp writes y, or for several parts what attention_join joins.
            if warp == 0:
                for i in range(2 * tiles):
                    row = u32(first_row + 8 * (i // 2) + 2 * (lane & u32(3)) + i % 2)
                    token, head = u32(begin_token + row // group), u32(kv_head * group + row % group)
                    part = partial + ((token * shape.heads + head) * shares + block_z()) * (shape.v_dim + 2)
                    to = y.data + (token * y.stride + head * shape.v_dim)
                    factor = f32(1) / totals[i] if totals[i] > f32(0) else f32(0)
                    if shares > 1:
                        to, factor = part + 2, f32(1)
                        if row < rows and lane < 4:
                            part[0], part[1] = peaks[i] * f32(1 / LOG2_E), totals[i]
                    for r in range(v_rounds):
                        for d in range(8):
                            x[d] = acc[((4 * r + d // 2) * tiles + i // 2) * 4 + 2 * (d % 2) + i % 2]
                        if turned_back:
                            rotate_eight(x, lane, 8, 4)
                        column = u32(first_column + 64 * r + 8 * (lane >> u32(2)))
                        for d in range(8):
                            if row < rows and column + d < shape.v_dim:
                                to[column + d] = x[d] * factor
                        # The operand of what follows; means of float16 need no scale.
                        if v_type == "f16" and halves.wanted != 0 and row < rows and column < shape.v_dim:
                            place = u32(head * shape.v_dim + column)
                            if place == 0:
                                halves.scales[token] = f32(1)
                            for d in range(8):
                                x[d] = finite(x[d] * factor)
                            place = half_word(u32(token), place, u32(shape.heads * shape.v_dim) >> u32(5))
                            store4(halves.words, place, pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                                   pack_halves(x[4], x[5]), pack_halves(x[6], x[7]))
            first_row = u32(first_row + 8 * tiles * turns)

    return _few


@functools.cache
def _share_of(step: int) -> DeviceFunction:
    """share_of(first, end): the first of the keys first .. end that are this part's, and their number, in steps."""

    @device
    def share_of(first, end):
        first, shares = i32(u32(first) & u32(0xFFFFFFFF - step + 1)), u32(grid_z())
        share = i32(u32(u32(end - first) + step * shares - 1) // u32(step * shares) * step)
        return i32(first + i32(block_z()) * share), share

    return share_of


@device
def _number(pointer, index):
    return pointer[index]


def _cache_prefetch(k_type: str, v_type: str, k_dim: int, v_row: int, step: int) -> DeviceFunction:
    """ask(k, v, blocks, kv_heads, kv_head, block_size, length, causal, window, chunk, lane, warp): a warp asks for its
    first `step` keys and values of a sequence's last row; the newest may not be there yet, and are read later. Rows of
    16 bits only: of codes they are in several places, and of few bytes."""
    keys_at, values_at, share_of = region(k_type, k_dim), region(v_type, v_row), _share_of(step)
    k_pitch, v_pitch = (pitch(kind, dim) if kind == "f16" else 0 for kind, dim in ((k_type, k_dim), (v_type, v_row)))

    @device
    def ask(k, v, blocks, kv_heads, kv_head, block_size, length, causal, window, chunk, lane, warp):
        first, end = seen(i32(length - 1), length, causal, window, chunk)
        first, _ = share_of(first, end)
        at = i32(first + step * i32(warp) + i32(lane))
        if lane < step and at < end:
            block, place = u32(stream1(blocks, u32(at) // block_size)), u32(u32(at) % block_size)
            keys, values = (keys_at(k, block, kv_heads, kv_head, block_size),
                            values_at(v, block, kv_heads, kv_head, block_size))
            for i in range(0, k_pitch, LINE):
                prefetch(keys, u32(place * k_pitch + i))
            for i in range(0, v_pitch, LINE):
                prefetch(values, u32(place * v_pitch + i))

    return ask


def _queries(turned: bool, rounds: int, tiles: int) -> DeviceFunction:
    """Rows of queries as the right side of products, rotated where keys are: lane has piece 4 r + t of row g.

    They stay in shared memory; each warp makes some of them.
    """

    @device
    def make(memory, x, q, q_stride, begin_token, group, kv_head, first_row, rows, k_dim, warp, lane):
        item = warp
        while item < tiles * rounds:
            row = u32(first_row + item // u32(rounds) * 8 + (lane >> u32(2)))
            column, last = u32(item % u32(rounds) * 32 + 8 * (lane & u32(3))), u32(row if row < rows else u32(rows - 1))
            source = q + ((begin_token + last // group) * q_stride + (kv_head * group + last % group) * k_dim)
            for d in range(8):
                x[d] = source[column + d] if column + d < k_dim else f32(0)
            if turned:
                rotate_eight(x, lane, 2, 1)
            store4(memory, u32(4 * (32 * item + lane)), pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                   pack_halves(x[4], x[5]), pack_halves(x[6], x[7]))
            item = u32(item + WARPS)
        sync_block()

    return make


def _key_products(k_type: str, k_dim: int, tiles: int, sixteens: int) -> DeviceFunction:
    """Adds products of 16 or 32 keys and all rows; keys beyond the `last` stand for it."""
    pieces = width(k_type, k_dim) // 8
    rounds, whole = -(-pieces // 4), pieces % 4 == 0
    fetch, halves, words = fetcher(k_type, k_dim), halver(k_type), LocalArray(u32, 4 * tiles)

    def of(r: int) -> DeviceFunction:  # a loop over all rounds would wait for the keys of each
        @device
        def multiply(s, query, keys, block_size, place, last, lane):
            b, piece = words(), u32(4 * r + (lane & u32(3)))
            for j in range(tiles):
                at = 4 * j
                b[at], b[at + 1], b[at + 2], b[at + 3] = load4(query, u32(4 * (32 * (j * rounds + r) + lane)))
            for m in range(sixteens):
                near, far = u32(16 * m + (lane >> u32(2))), u32(16 * m + 8 + (lane >> u32(2)))
                near, far = u32(place + (near if near < last else last)), u32(place + (far if far < last else last))
                n0, n1, n2, n3 = u32(0), u32(0), u32(0), u32(0)
                f0, f1, f2, f3 = u32(0), u32(0), u32(0), u32(0)
                if whole or piece < pieces:
                    n0, n1, n2, n3 = fetch(keys, block_size, near, piece)
                    f0, f1, f2, f3 = fetch(keys, block_size, far, piece)
                    n0, n1, n2, n3 = halves(n0, n1, n2, n3, piece)
                    f0, f1, f2, f3 = halves(f0, f1, f2, f3, piece)
                for j in range(tiles):
                    at, c = 4 * j, 4 * (m * tiles + j)
                    s[c], s[c + 1], s[c + 2], s[c + 3] = mma_f16(n0, f0, n1, f1, b[at], b[at + 1],
                                                                 s[c], s[c + 1], s[c + 2], s[c + 3])
                    s[c], s[c + 1], s[c + 2], s[c + 3] = mma_f16(n2, f2, n3, f3, b[at + 2], b[at + 3],
                                                                 s[c], s[c + 1], s[c + 2], s[c + 3])
        return multiply

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def multiply(s, query, keys, block_size, place, last, lane):
            first(s, query, keys, block_size, place, last, lane)
            second(s, query, keys, block_size, place, last, lane)
        return multiply

    return functools.reduce(both, map(of, range(rounds)))


def _value_products(v_type: str, v_dim: int, v_row: int, rounds: int, slices: int, tiles: int,
                    sixteens: int) -> DeviceFunction:
    """Fades the sums, and adds the values of 16 or 32 keys, weighted by what the scores have become: of their columns
    `rounds` times 64, from `first_column` on."""
    pieces = width(v_type, v_dim) // 8
    whole = pieces == 8 * rounds * slices
    fetch, halves = fetcher(v_type, v_row), halver(v_type)
    weights, words = LocalArray(u32, 2 * tiles), LocalArray(u32, 16)

    @device
    def multiply(acc, fades, s, values, block_size, place, last, lane, first_column):
        w, p = words(), weights()
        for m in range(sixteens):
            for j in range(tiles):
                c = 4 * (m * tiles + j)
                p[2 * j] = transpose_matrix(pack_halves(s[c], s[c + 1]))
                p[2 * j + 1] = transpose_matrix(pack_halves(s[c + 2], s[c + 3]))
            for r in range(rounds):
                piece = u32((first_column >> u32(3)) + 8 * r + (lane >> u32(2)))
                for i in range(4):
                    key = u32(16 * m + 2 * (lane & u32(3)) + i % 2 + 8 * (i // 2))
                    key = u32(place + (key if key < last else last))
                    a, b, c, d = u32(0), u32(0), u32(0), u32(0)
                    if whole or piece < pieces:
                        a, b, c, d = fetch(values, block_size, key, piece)
                        a, b, c, d = halves(a, b, c, d, piece)
                    w[i], w[4 + i], w[8 + i], w[12 + i] = a, b, c, d
                for u in range(4):
                    a, b = prmt(w[4 * u], w[4 * u + 1], u32(0x5410)), prmt(w[4 * u], w[4 * u + 1], u32(0x7632))
                    c, d = prmt(w[4 * u + 2], w[4 * u + 3], u32(0x5410)), prmt(w[4 * u + 2], w[4 * u + 3], u32(0x7632))
                    for j in range(tiles):
                        n = ((4 * r + u) * tiles + j) * 4
                        if m == 0:
                            for i in range(4):
                                acc[n + i] *= fades[2 * j + i % 2]
                        acc[n], acc[n + 1], acc[n + 2], acc[n + 3] = mma_f16(
                            a, b, c, d, p[2 * j], p[2 * j + 1], acc[n], acc[n + 1], acc[n + 2], acc[n + 3])

    return multiply
