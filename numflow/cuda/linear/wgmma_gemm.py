"""GEMM for many tokens on Hopper's tensor cores (wgmma): tiles of 256 rows of the matrix times 128 tokens.

It replaces gemm.py on compute capability 9.0, with the same arithmetic: float16 (bfloat16) operands, float32
accumulation, 32 columns a step, parts that `gemm_sum` adds. In gemm.py, four warps load fragments to registers and
multiply. Here, two warpgroups write tiles to shared memory, from which the tensor cores read asynchronously
(lang/warpgroup.py). Each warpgroup has 128 rows of the matrix. There are four buffers for tiles of each operand:

    step u:   start the product of tile u; that of tile u - 1 may still be running
              start the copies of tokens (and float weights) of tile u + 2
              convert the codes of tile u + 1 (loaded in step u - 1) to halves; start the loads of those of tile u + 2
              wait for the product of tile u - 1

A step reads 24 KB of halves for 1 M multiplications: with 7 TB/s from L2, the bound is 600 TFLOP/s; with 128 rows it
would be 460. Therefore two blocks with the same tokens form a cluster (lang/cluster.py): each loads half of a tile of
tokens by a multicast bulk copy to both, which is 20 KB for a block and step, and a bound of 730 TFLOP/s. cp.async
copies float weights, the tokens of experts (whose rows are not contiguous), and everything without device.tma.

Matrices of 8-bit floats can be multiplied by 8-bit float activations (float8). A tile then has 64 columns, its codes
are copied unchanged, and the tensor cores do twice as many multiplications in a step. If a matrix has scales for groups
of columns, accumulators are multiples of the current group's scale.

Synchronisation of the tokens in a buffer: a block waits at the mbarrier `full` until they have arrived. All blocks of
the cluster arrive at the mbarrier `free` when they have multiplied the buffer's tile, before a new copy to it starts.
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
THREADS = 256           # threads of a block that multiply; with bulk copies, one more warp starts these
ROWS = 256              # rows of the matrix that a block has
BLOCKS = 132            # blocks that fill the GPU, one on each multiprocessor
STAGES = 4              # buffers for tiles of each operand
_X_AT = ROWS * 16       # words of a tile of the matrix, 256 rows of 32 halves; the tile of tokens follows it
_STAGE = _X_AT + TOKENS * 16
_GROUP = 2 * TILE * 16  # words of the rows of a warpgroup
_COPIES = 4             # copies of 16 bytes, by each thread for a tile of the matrix; half as many for tokens
CLUSTER = TOKENS // TILE  # blocks of a cluster, which have the same tokens and share their copies
_WASTE = 8              # from so many tiles of rows on, an additional tile to fill the last cluster costs little
_FULL = STAGES * _STAGE             # words of the mbarriers of each buffer, after all tiles
_FREE = _FULL + 2 * STAGES


@functools.cache
def wgmma_gemm(kind: str, grouped: bool = False, tma: bool = False, float8: bool = False) -> Kernel:
    """Grid (N / 256, rows / 128, parts). Parameters as in gemm.gemm, without outliers.

    tma: bulk copies of tokens, shared by the blocks of a cluster along N; not with `grouped`.
    float8: for matrices of 8-bit floats; x is the operand "e4m3", and units have 64 columns.
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
        # Block indices: a tile of rows and tokens. Grouped: the tile's expert and routes.
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
        # The units of this part. (A 64-bit division would be a function call, around which wgmma is not asynchronous.)
        parts, units = u32(grid_z()), u32(shape.units + 1 >> u32(1)) if float8 else shape.units
        share = u32(u32(units + parts - 1) // parts)
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < units else units
        # The row that this thread decodes, with its header, and the tokens that it copies; the last one repeated if
        # there are too few.
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
        # Tiles. With bulk copies: mbarriers, and zeros for tokens beyond the batch.
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
        # Start the copies of tokens (and float weights) of two tiles; convert the codes of the first to halves.
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
            # Wait for the tile and make it visible to the tensor cores. After the barrier, all warps have finished the
            # product of the tile before the previous one.
            if copies:
                copy_wait_older()
            fence_tiles()
            sync_block()
            if thread < THREADS:
                if tma:
                    wait_turn(tile, u32(_FULL + 2 * turn), u32(number >> u32(2) & u32(1)))
                # Rescale accumulators if the scales change; then start the product of the tile ...
                if tiles_a_scale > 0:  # noqa: SIM102  a constant condition of its own, which the compiler can remove
                    if number == 0 or unit % tiles_a_scale == 0:
                        wait_tiles(acc)
                        # Computed here and not before the loop, to save a register in the other kernels.
                        lane_row = u32(first_row + (warp >> u32(2)) * (2 * TILE) + (warp & u32(3)) * 16
                                       + (lane >> u32(2)))
                        change_scales(acc, scale, planes.head, planes.above, planes.per_row, above_row, lane_row,
                                      shape.n, unit, shape.units)
                begin_tiles()
                own, at = u32(turn * _STAGE + (warp >> u32(2)) * _GROUP), u32(turn * _STAGE + _X_AT)
                multiply(acc, 0, tile, own, tile, at)
                multiply(acc, SUMS, tile, u32(own + TILE * 16), tile, at)
                send_tiles()
                # ... while it runs, start the copies of the tile after the next, and convert the codes of the next.
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
                # Meanwhile, a separate warp starts bulk copies of tokens, because it has to wait for buffers.
                if unit + 2 < last:
                    _bring_tokens(tile, u32(number + 2), x, u32(source + TILE_WORDS * (number + 2)), beyond, there,
                                  rank, blocks, thread)
                sync_warp()
            turn, unit, number = u32(turn + 1 & u32(STAGES - 1)), u32(unit + 1), u32(number + 1)
        wait_tiles(acc)
        if tma:
            sync_cluster()                   # no block may exit while copies to or from its shared memory are pending
            if thread >= THREADS:
                return
        # Epilogue: scale, bias, y; if there are several parts, partial sums for gemm_sum.
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
    """Whether this module's kernels multiply tiles of this many tokens, instead of those of gemm.py or code_gemm.py."""
    return device.wgmma and tokens == TOKENS and not apart


def gemm_for(device: Device, kind: str, tokens: int, grouped: bool = False, apart: bool = False,
             codes: str = "") -> Kernel:
    """The kernel for tiles of this many tokens. codes: the kind of an 8-bit or 4-bit float operand, or ""."""
    if on_hopper(device, tokens, apart):
        return wgmma_gemm(kind, grouped, device.tma and not grouped, codes == "e4m3")
    return code_gemm(kind, codes, grouped) if codes else mma.gemm(kind, tokens, grouped, apart)


def rows_for(device: Device, kind: str, tokens: int, apart: bool) -> int:
    """The rows of the matrix that a block of that kernel has."""
    return ROWS if on_hopper(device, tokens, apart) else mma.rows_of(kind, tokens, apart)


def cluster_for(device: Device, n: int, tokens: int, apart: bool) -> int:
    """The blocks of a cluster of that kernel, if not grouped. The last tile of rows may be beyond the matrix."""
    return shared_by(n) if on_hopper(device, tokens, apart) and device.tma else 1


def shared_by(n: int) -> int:
    """The blocks of a cluster that share copies of tokens, for a matrix of n rows."""
    tiles = -(-n // ROWS)
    return CLUSTER if tiles % CLUSTER == 0 or tiles > _WASTE else 1


def split_for(device: Device, kind: str, apart: bool, n: int, rows: int, units: int) -> int:
    """The number of parts into which the columns are split for `rows` tokens."""
    tokens = mma.tile_of(rows)
    if not on_hopper(device, tokens, apart):
        return mma.split_of(kind, apart, n, rows, units)
    return parts_of(n, rows, units)


def parts_of(n: int, rows: int, units: int) -> int:
    """The number of parts that fill the GPU with tiles of 256 rows and 128 tokens."""
    return max(1, min(BLOCKS // (-(-n // ROWS) * -(-rows // TOKENS)), units // 8, 16))


@device
def _begin_counts(tile, blocks, thread):
    """Initialise the mbarriers of all buffers, and make them visible to the cluster."""
    if thread == 0:
        for i in range(STAGES):
            begin_count(tile, u32(_FULL + 2 * i), u32(1))
            begin_count(tile, u32(_FREE + 2 * i), blocks)
        show_counts()
    sync_cluster()


@device
def _clear_tokens(tile, count, thread):
    """Write zeros for tokens of a tile beyond `count`, which no copy will write."""
    at = thread
    while at < STAGES * TOKENS * 4:
        token = u32(at >> u32(2) & u32(TOKENS - 1))
        if token >= count:
            place = u32(u32(at >> u32(9)) * _STAGE + _X_AT + 16 * token + 4 * (at & u32(3)))
            store4(tile, place, u32(0), u32(0), u32(0), u32(0))
        at = u32(at + THREADS + 32)


@device
def _bring_tokens(tile, number, x, source, beyond, there, rank, blocks, thread):
    """Start the bulk copy of 32 columns of 128 tokens, of which `there` exist, to the buffer of tile `number` in all
    blocks of the cluster. Each of two blocks copies 64 tokens from x[source] on; a single block also copies the others,
    which are `beyond` words further."""
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
    """Copy 32 columns of 128 tokens to a tile. rows_of: rows of x that this thread copies."""
    for i in range(_COPIES // 2):
        token, part = u32(thread + 256 * i) >> u32(2), thread & u32(3)
        copy_async(tile, u32(at + tile_place(token, part)), x, half_place(rows_of[i], unit, part, units))


@device
def _copy_matrix(tile, at, matrix, high, first, above, n, unit, units, thread):
    """Copy 32 columns of rows first .. first + 255 of a matrix of n rows that begins at row `above`."""
    for i in range(_COPIES):
        place, part = u32(thread + 256 * i) >> u32(2), thread & u32(3)
        row = u32(first + place) if first + place < n else u32(n - 1)
        copy_async(tile, u32(at + tile_place(place, part)), matrix,
                   u32(((above + row) * units + unit) * 16 + 4 * part))


@device
def _put_row(tile, at, row, words):
    """Write 16 words of a row to a tile."""
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
