"""Products with many tokens on Hopper's tensor cores (wgmma): tiles of 256 rows of the matrix times 128 tokens.

As gemm.py, whose place it takes on cards of compute capability 9.0: float16 (bfloat16) operands, float32 sums, 32
columns a step, parts that `gemm_sum` adds. There four warps load matrices into registers and multiply; here two
warpgroups put tiles into shared memory, and the tensor cores read those in the background (lang/warpgroup.py), 128 rows
of the matrix for each group. Four tiles of each operand take turns:

    step u:   the tensor cores begin to multiply tile u; tile u - 1 may still be on its way
              tokens (and float weights) of tile u + 2 are asked for
              codes of tile u + 1, which came during step u - 1, become halves; those of tile u + 2 are asked for
              tile u - 1 has been multiplied

A step needs 24 KB of halves for 1 M products: at 7 TB/s of the second cache that is 600 TFLOP/s, where 128 rows would
bound it at 460. So two blocks with the same tokens are a cluster (lang/cluster.py): each has the copy engine bring half
of a tile of tokens to both, 20 KB a block and step, 730 TFLOP/s. Float weights come by cp.async, and so do the tokens
of experts, whose rows lie anywhere, and all without the copy engine (device.tma).

Matrices of 8-bit floats may meet tokens that are 8-bit floats too (float8): a tile has 64 columns then, its codes are
copied as they are, and the tensor cores multiply twice as many numbers in a step. Where a matrix has scales of its own
for so many columns, sums are kept as multiples of the scale now at work.

Who may touch the tokens of a tile: at the count `full` of its place the block waits until they have come. At the count
`free` all blocks of the cluster arrive before a tile is asked for, when they have multiplied the one before it there.
"""

import functools

from numflow.cuda.device.device import Device
from numflow.cuda.lang.cluster import (
    arrive_at,
    begin_count,
    cluster_rank,
    cluster_size,
    copy_bulk,
    expect_bytes,
    share_bulk,
    show_counts,
    sync_cluster,
    wait_turn,
)
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    copy_async,
    copy_commit,
    copy_wait_older,
    grid_z,
    lane_index,
    load4,
    store4,
    sync_block,
    sync_warp,
    thread_index,
)
from numflow.cuda.lang.kernel import Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.warpgroup import (
    ALIGNMENT,
    SUMS,
    TILE,
    TILE_WORDS,
    begin_tiles,
    fence_tiles,
    multiply_tiles_bf16,
    multiply_tiles_e4m3,
    multiply_tiles_e5m2,
    multiply_tiles_f16,
    send_tiles,
    tile_place,
    wait_older_tiles,
    wait_tiles,
)
from numflow.cuda.linear import gemm as mma
from numflow.cuda.linear.code_gemm import code_gemm
from numflow.cuda.linear.float8 import codes_copier, scales_of
from numflow.cuda.linear.gemm import SCALE, code_fetch, code_halves, load_bias, put_sums
from numflow.cuda.linear.parameters import Bias, Planes, Shape
from numflow.cuda.weights.decode_scaled import row_header
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand import half_place

TOKENS = 128            # of a block
THREADS = 256           # of a block, that multiply; behind them a warp that asks for tokens, with the copy engine
ROWS = 256              # of the matrix, of a block
BLOCKS = 132            # that keep the card busy, one on each multiprocessor
STAGES = 4              # tiles of each operand
_X_AT = ROWS * 16       # words of a tile of the matrix, 256 rows of 32 halves, behind which that of tokens is
_STAGE = _X_AT + TOKENS * 16
_GROUP = 2 * TILE * 16  # words of the rows of a warpgroup
_COPIES = 4             # of 16 bytes, of each thread for a tile of the matrix: twice those for tokens
CLUSTER = TOKENS // TILE  # blocks with the same tokens that share what they bring, where there are as many
_WASTE = 8              # tiles of rows from which on one more, so that clusters are whole, is a small matter
_FULL = STAGES * _STAGE             # words of the counts of each place, behind all tiles
_FREE = _FULL + 2 * STAGES


@functools.cache
def wgmma_gemm(kind: str, grouped: bool = False, tma: bool = False, float8: bool = False) -> Kernel:
    """grid (N / 256, rows / 128, parts); parameters as those of gemm.gemm, without outliers.

    tma: tokens come by the copy engine, shared by the blocks of a cluster along N; not grouped.
    float8: of a matrix of 8-bit floats; x is the operand "e4m3", and a unit of 64 columns.
    """
    assert not (grouped and tma)
    floats = float8 or kind in ("f16", "bf16")
    copies = floats or not tma
    multiply = {"bf16": multiply_tiles_bf16, "e4m3": multiply_tiles_e4m3, "e5m2": multiply_tiles_e5m2}.get(
        SCHEMES[kind].table if float8 else kind, multiply_tiles_f16)
    copy_matrix, tiles_a_scale = (codes_copier(ROWS), SCHEMES[kind].shared // 64) if float8 else (_copy_matrix, 0)
    change_scales, apply_scales = scales_of(SCHEMES[kind]) if float8 else (None, None)
    fetch, halves = (_no_fetch, _no_halves) if floats else (code_fetch(kind), code_halves(kind))
    has_rows = kind in SCHEMES and not float8 and SCHEMES[kind].row_words > 0
    row_of = row_header(SCHEMES[kind]) if has_rows else None
    words_in_all = STAGES * _STAGE + 4 * STAGES * tma
    memory = SharedArray(u32, words_in_all, ALIGNMENT, dynamic=True)
    sums, staged, coded = LocalArray(f32, 2 * SUMS), LocalArray(u32, 16), LocalArray(u32, 8)
    sources, plus, factors = LocalArray(u32, _COPIES // 2), LocalArray(f32, 4), LocalArray(f32, 4)
    put = put_sums(2, TOKENS // 8, 1.0 if floats else 1.0 / SCALE, grouped, TILE)

    @kernel(f"wgmma_{kind}{'_float8' * float8}{'_grouped' * grouped}{'_tma' * tma}", THREADS + 32 * tma, blocks=1,
            target="sm_90a", dynamic=4 * words_in_all)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, slots: u32.ptr, outliers: u32):
        # Place in the grid: a tile of rows and tokens; grouped, the tile's expert and routes.
        thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
        first_row, first_token, count = u32(block_x() * ROWS), u32(block_y() * TOKENS), u32(shape.counts[shape.field])
        above_row = u32(0)                   # rows of the matrix before the expert's
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The units of this part. (Of 64 bits, this division would be a call, around which wgmma is not asynchronous.)
        parts, units = u32(grid_z()), u32(shape.units + 1 >> u32(1)) if float8 else shape.units
        share = u32(u32(units + parts - 1) // parts)
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < units else units
        # The row that this thread decodes and what it has once, the tokens that it copies; instead of none the last.
        acc, words, codes, rows_of, scale = sums(), staged(), coded(), sources(), factors()
        for i in range(2 * SUMS):
            acc[i] = f32(0)
        if float8:
            for i in range(4):
                scale[i] = f32(1)
        row = u32(first_row + thread) if first_row + thread < shape.n else u32(shape.n - 1)
        row = u32(above_row + row)
        if not tma:
            for i in range(_COPIES // 2):
                at = u32(first_token + (thread + 256 * i >> 2))
                at = at if at < count else u32(count - 1)
                rows_of[i] = u32(order[2 * at + by_token]) if grouped else at
        base, step, z, dz = u32(0), u32(0), f32(0), f32(0)
        if has_rows:
            base, step, z, dz = row_of(planes.per_row, row)
        # Tiles; with the copy engine their counts, and zeros instead of tokens that are not there.
        tile, turn, number = memory(), u32(0), u32(0)
        rank, blocks, there, source, beyond = u32(0), u32(1), u32(0), u32(0), u32(0)
        a, c, a16, c16 = f32(0), f32(0), f32(0), f32(0)
        if tma:
            rank, blocks = u32(cluster_rank()), u32(cluster_size())
            there = u32(count - first_token) if count - first_token < TOKENS else u32(TOKENS)
            source = half_place(u32(first_token + TILE * rank), unit, u32(0), units)
            beyond = u32(units * TILE_WORDS)
            _begin_counts(tile, blocks, thread)
            _clear_tokens(tile, there, thread)
        # Ask for tokens (and float weights) of two tiles; the first one's codes become halves.
        for i in range(2):
            if unit + i < last:
                if tma:
                    _bring_tokens(tile, u32(i), x, u32(source + TILE_WORDS * i), beyond, there, rank, blocks, thread)
                else:
                    _copy_tokens(tile, u32(i * _STAGE + _X_AT), x, rows_of, u32(unit + i), units, thread)
                if floats and thread < THREADS:
                    copy_matrix(tile, u32(i * _STAGE), planes.low, planes.high, first_row, above_row, shape.n,
                                u32(unit + i), shape.units, thread)
            if copies:
                copy_commit()
        if not floats and unit < last and thread < THREADS:
            a, c, a16, c16 = fetch(codes, planes.low, planes.high, planes.two, planes.one, planes.head, planes.above,
                                   row, unit, shape.units, base, step, z, dz)
            halves(words, codes, a, c, a16, c16)
            _put_row(tile, u32(0), thread, words)
            if unit + 1 < last:
                a, c, a16, c16 = fetch(codes, planes.low, planes.high, planes.two, planes.one, planes.head,
                                       planes.above, row, u32(unit + 1), shape.units, base, step, z, dz)
        while unit < last:
            # The tile is there, and the tensor cores see it; all warps have done with the one before the last.
            if copies:
                copy_wait_older()
            fence_tiles()
            sync_block()
            if thread < THREADS:
                if tma:
                    wait_turn(tile, u32(_FULL + 2 * turn), u32(number >> u32(2) & u32(1)))
                # Sums as multiples of other scales; then multiply it in the background ...
                if tiles_a_scale > 0:  # noqa: SIM102  the compiler drops what is behind such a constant by itself
                    if number == 0 or unit % tiles_a_scale == 0:
                        wait_tiles(acc)
                        # Not kept from before the loop: other kinds have no register for it.
                        lane_row = u32(first_row + (warp >> u32(2)) * (2 * TILE) + (warp & u32(3)) * 16
                                       + (lane >> u32(2)))
                        change_scales(acc, scale, planes.head, planes.above, planes.per_row, above_row, lane_row,
                                      shape.n, unit, shape.units)
                begin_tiles()
                own, at = u32(turn * _STAGE + (warp >> u32(2)) * _GROUP), u32(turn * _STAGE + _X_AT)
                multiply(acc, 0, tile, own, tile, at)
                multiply(acc, SUMS, tile, u32(own + TILE * 16), tile, at)
                send_tiles()
                # ... while copies of the tile after the next one begin, and the next one's codes become halves.
                if copies:
                    if unit + 2 < last:
                        free = u32((turn + 2 & u32(STAGES - 1)) * _STAGE)
                        if not tma:
                            _copy_tokens(tile, u32(free + _X_AT), x, rows_of, u32(unit + 2), units, thread)
                        if floats:
                            copy_matrix(tile, free, planes.low, planes.high, first_row, above_row, shape.n,
                                        u32(unit + 2), shape.units, thread)
                    copy_commit()
                if not floats and unit + 1 < last:
                    halves(words, codes, a, c, a16, c16)
                    _put_row(tile, u32((turn + 1 & u32(STAGES - 1)) * _STAGE), thread, words)
                    if unit + 2 < last:
                        a, c, a16, c16 = fetch(codes, planes.low, planes.high, planes.two, planes.one, planes.head,
                                               planes.above, row, u32(unit + 2), shape.units, base, step, z, dz)
                wait_older_tiles()
            elif tma:
                # Meanwhile a warp of its own, for each thing it does waits for the one before, asks for tokens.
                if unit + 2 < last:
                    _bring_tokens(tile, u32(number + 2), x, u32(source + TILE_WORDS * (number + 2)), beyond, there,
                                  rank, blocks, thread)
                sync_warp()
            turn, unit, number = u32(turn + 1 & u32(STAGES - 1)), u32(unit + 1), u32(number + 1)
        wait_tiles(acc)
        if tma:
            sync_cluster()                   # what goes to a block's memory, or from it, has come before it ends
            if thread >= THREADS:
                return
        # Epilogue: scale, bias, y; or for several parts the sums that gemm_sum adds.
        lane_row = u32(first_row + (warp >> u32(2)) * (2 * TILE) + (warp & u32(3)) * 16 + (lane >> u32(2)))
        if float8:
            apply_scales(acc, scale, planes.head, planes.above, planes.per_row, above_row, lane_row, shape.n)
        place, added = u32(first_token + 2 * (lane & u32(3))), plus()
        load_bias(added, bias.data + above_row if grouped and bias.present != 0 else bias.data,
                  bias.present != 0 and parts == 1, lane_row, shape.n, 2, TILE)
        if not grouped and parts > 1:
            put(acc, partial + block_z() * count * shape.n, shape.n, scales, added, shape.n, count, lane_row, place,
                order, by_token)
        else:
            put(acc, *y, scales, added, shape.n, count, lane_row, place, order, by_token)

    return _gemm


def on_hopper(device: Device, tokens: int, apart: bool) -> bool:
    """Whether tiles of so many tokens are multiplied by this module's kernels; else by gemm.py's or code_gemm.py's."""
    return device.wgmma and tokens == TOKENS and not apart


def gemm_for(device: Device, kind: str, tokens: int, grouped: bool = False, apart: bool = False,
             codes: str = "") -> Kernel:
    """The kernel of a tile of so many tokens on a device; codes: the operand, where tokens are codes."""
    if on_hopper(device, tokens, apart):
        return wgmma_gemm(kind, grouped, device.tma and not grouped, codes == "e4m3")
    return code_gemm(kind, codes, grouped) if codes else mma.gemm(kind, tokens, grouped, apart)


def rows_for(device: Device, kind: str, tokens: int, apart: bool) -> int:
    """Rows of the matrix that a block of that kernel has."""
    return ROWS if on_hopper(device, tokens, apart) else mma.rows_of(kind, tokens, apart)


def cluster_for(device: Device, n: int, tokens: int, apart: bool) -> int:
    """Blocks of a cluster of that kernel, not grouped: each has a tile of rows, which some may lie beyond."""
    tiles, shares = -(-n // ROWS), on_hopper(device, tokens, apart) and device.tma
    return CLUSTER if shares and (tiles % CLUSTER == 0 or tiles > _WASTE) else 1


def split_for(device: Device, kind: str, apart: bool, n: int, rows: int, units: int) -> int:
    """Parts that the columns are cut into for `rows` tokens."""
    tokens = mma.tile_of(rows)
    if not on_hopper(device, tokens, apart):
        return mma.split_of(kind, apart, n, rows, units)
    return max(1, min(BLOCKS // (-(-n // ROWS) * -(-rows // tokens)), units // 8, 16))


@device
def _begin_counts(tile, blocks, thread):
    """Counts of all places, for the blocks of the cluster to see."""
    if thread == 0:
        for i in range(STAGES):
            begin_count(tile, u32(_FULL + 2 * i), u32(1))
            begin_count(tile, u32(_FREE + 2 * i), blocks)
        show_counts()
    sync_cluster()


@device
def _clear_tokens(tile, count, thread):
    """Zeros for tokens that are never brought: of those that a tile has room for `count` are there."""
    at = thread
    while at < STAGES * TOKENS * 4:
        token = u32(at >> u32(2) & u32(TOKENS - 1))
        if token >= count:
            place = u32(u32(at >> u32(9)) * _STAGE + _X_AT + 16 * token + 4 * (at & u32(3)))
            store4(tile, place, u32(0), u32(0), u32(0), u32(0))
        at = u32(at + THREADS + 32)


@device
def _bring_tokens(tile, number, x, source, beyond, there, rank, blocks, thread):
    """32 columns of 128 tokens, of which so many are `there`, to the place of a tile of this number in all blocks of
    the cluster: of two each brings 64 tokens, from x[source] on; one alone brings those `beyond` these as well."""
    turn = u32(number & u32(STAGES - 1))
    to, full, free = u32(turn * _STAGE + _X_AT), u32(_FULL + 2 * turn), u32(_FREE + 2 * turn)
    if u32(thread - THREADS) < blocks:
        arrive_at(tile, free, u32(thread - THREADS))
    if thread == THREADS:
        wait_turn(tile, free, u32(number >> u32(2) & u32(1)))
        expect_bytes(tile, full, u32(64 * there))
        if blocks == 1:
            copy_bulk(tile, to, x, source, u32(64 * (there if there < TILE else u32(TILE))), full)
            if there > TILE:
                copy_bulk(tile, u32(to + TILE_WORDS), x, u32(source + beyond), u32(64 * (there - TILE)), full)
        elif there > TILE * rank:
            rows = u32(there - TILE * rank)
            share_bulk(tile, u32(to + TILE_WORDS * rank), x, source, u32(64 * (rows if rows < TILE else u32(TILE))),
                       full, u32(3))


@device
def _copy_tokens(tile, at, x, rows_of, unit, units, thread):
    """32 columns of 128 tokens into a tile. rows_of: the rows of this thread's copies."""
    for i in range(_COPIES // 2):
        token, part = u32(thread + 256 * i) >> u32(2), thread & u32(3)
        copy_async(tile, u32(at + tile_place(token, part)), x, half_place(rows_of[i], unit, part, units))


@device
def _copy_matrix(tile, at, matrix, high, first, above, n, unit, units, thread):
    """32 columns of rows first .. first + 255, of which n are there, `above` rows further down."""
    for i in range(_COPIES):
        place, part = u32(thread + 256 * i) >> u32(2), thread & u32(3)
        row = u32(first + place) if first + place < n else u32(n - 1)
        copy_async(tile, u32(at + tile_place(place, part)), matrix,
                   u32(((above + row) * units + unit) * 16 + 4 * part))


@device
def _put_row(tile, at, row, words):
    """16 words of a row into a tile."""
    for part in range(4):
        store4(tile, u32(at + tile_place(row, part)), words[4 * part], words[4 * part + 1], words[4 * part + 2],
               words[4 * part + 3])


@device
def _no_fetch(codes, low, high, two, one, head, above, row, unit, units, base, step, z, dz):
    """Float weights are copied."""
    return f32(0), f32(0), f32(0), f32(0)


@device
def _no_halves(words, codes, a, c, a16, c16):
    """Float weights are copied."""
