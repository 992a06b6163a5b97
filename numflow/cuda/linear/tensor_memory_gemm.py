"""GEMM for many tokens on the tensor cores of compute capability 10.x (tcgen05): 256 rows of the matrix, 128 tokens.

It replaces wgmma_gemm.py there, with the same tiles, buffers and bulk copies. One thread starts the products. Results
are in tensor memory (lang/tensor_memory.py), not in registers. Two products of 128 rows have the same tokens. In the
epilogue, each thread has one row of the matrix and all 128 tokens.

    step u:   wait for the copies of tile u; start its products, and commit them to the mbarrier of its buffer
              wait for the products of tile u - 1; start the copies of tile u + 3 into their buffer
              if tile u - 1 was the last of a group of columns: add its products to the sums

Products of a tile take 256 cycles here, half as many as on Hopper, so three tiles are on their way instead of two.

8-bit floats (float8). If a matrix has scales for groups of columns, the products of a group are added up in tensor
memory, and then multiplied by the scale and added to float32 sums in registers. Tensor memory has room for two groups,
so that the products of one run while the other is added. If a matrix has scales for rows, all columns are one group.

4-bit floats (nvfp4, mxfp4). The tensor cores multiply by the scales of blocks themselves. Each thread loads the scale
words of its row, and of a token, one step ahead, and writes them to shared memory; copies bring them to tensor memory
before the products. All columns are one group. Tensor memory has scales for as many tiles as there are buffers.

A block allocates all columns of tensor memory. Two clusters on the same multiprocessors might wait for each other for
ever. Therefore a block asks for more than half of the shared memory.
"""

import functools

from numflow.cuda.device.device import Device
from numflow.cuda.lang.arithmetic import bits_of, float_of
from numflow.cuda.lang.cluster import begin_count, cluster_rank, cluster_size, show_counts, sync_cluster, wait_turn
from numflow.cuda.lang.intrinsic import LocalArray, SharedArray
from numflow.cuda.lang.intrinsics import (
    block_x,
    block_y,
    block_z,
    copy_commit,
    copy_wait_third,
    grid_z,
    load4,
    sync_block,
    sync_warp,
    thread_index,
)
from numflow.cuda.lang.kernel import DeviceFunction, Kernel, device, kernel
from numflow.cuda.lang.parameters import Rows
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.lang.tensor_memory import (
    ACROSS,
    BLACKWELL,
    COLUMNS,
    LOADED,
    SCALES,
    after_barrier,
    allocate_columns,
    before_barrier,
    commit_products,
    copy_scales,
    free_columns,
    load_tensor,
    multiply_e4m3,
    multiply_e5m2,
    multiply_mxfp4,
    multiply_nvfp4,
    relinquish_columns,
)
from numflow.cuda.lang.warpgroup import ALIGNMENT, TILE, TILE_WORDS, fence_tiles
from numflow.cuda.linear import gemm as mma
from numflow.cuda.linear import wgmma_gemm as wgmma
from numflow.cuda.linear.code_gemm import UNITS
from numflow.cuda.linear.float4 import (
    codes4_copier,
    load_words,
    row4_scale,
    scale_words,
    store_scales,
    tokens4_copier,
)
from numflow.cuda.linear.float8 import codes_copier, row_scale
from numflow.cuda.linear.parameters import Bias, Planes, Shape
from numflow.cuda.linear.wgmma_gemm import (
    _FREE,
    _FULL,
    _STAGE,
    _X_AT,
    ROWS,
    STAGES,
    THREADS,
    TOKENS,
    _bring_tokens,
    _clear_tokens,
    _copy_tokens,
)
from numflow.cuda.weights.layout import SCHEMES
from numflow.cuda.weights.operand import half_place
from numflow.cuda.weights.operand_float4 import WORDS, tile4

_DONE = _FREE + 2 * STAGES          # words of the mbarriers of products, after those of copies
_ADDRESS = _DONE + 2 * STAGES       # word with the address of the columns
_ALL_WORDS = 120 << 8                 # 120 KB: more than half of a multiprocessor's shared memory
_ENDS = _ADDRESS + 8 - _ADDRESS % 4   # words of the tokens in the epilogue: scale, and row of the result
_SCALES = _ENDS + 2 * TOKENS        # words of the scales of 256 rows and 128 tokens, for each buffer
_SCALE_WORDS = 6 * ACROSS           # in each of them: 128 rows and 64 columns of 4-bit floats are 128 words
_AHEAD = STAGES - 1                  # tiles whose copies are started before their turn
_COPIES = TOKENS * 4 // THREADS     # copies of 16 bytes, by each thread for a tile of tokens
_HALF = TILE_WORDS * 2              # words of the rows of one of the two products
_GROUP = 2 * ACROSS                 # columns of tensor memory for a group of columns of the matrix
_PUT = 8                            # tokens that one function of the epilogue writes
_sums, _loaded = LocalArray(f32, TOKENS), LocalArray(f32, LOADED)
_sources, _words = LocalArray(u32, _COPIES), LocalArray(u32, 4)


@functools.cache
def tensor_memory_gemm(kind: str, operand: str, grouped: bool = False, tma: bool = False) -> Kernel:
    """Grid (N / 256, rows / 128, parts). Parameters as in gemm.gemm, without outliers; x is the operand.

    kind: of a matrix of 8-bit or 4-bit floats. operand: "e4m3", "nvfp4" or "mxfp4". tma: bulk copies of tokens, shared
    by the blocks of a cluster along N; not with `grouped`.
    """
    assert not (grouped and tma)
    scheme, fours, units_of = SCHEMES[kind], operand != "e4m3", UNITS[operand]
    multiply = multiply_e5m2 if scheme.table == "e5m2" else multiply_e4m3
    multiply4 = multiply_mxfp4 if operand == "mxfp4" else multiply_nvfp4
    copy_matrix = (codes4_copier if fours else codes_copier)(ROWS)
    scale_of, tiles_a_scale = (row4_scale(scheme), 0) if fours else (row_scale(scheme), scheme.shared // 64)
    load_scales = scale_words(scheme) if fours else None
    add, put, bring = _adder(), _putter(), _bringer(fours)
    copy_tokens = tokens4_copier(THREADS, _COPIES) if fours else _copy_tokens
    memory = SharedArray(u32, _ALL_WORDS, ALIGNMENT, dynamic=True)

    @kernel(f"tcgen05_{kind}_{'float4' if fours else 'float8'}{'_grouped' * grouped}{'_tma' * tma}",
            THREADS + 32 * tma, blocks=1, target=BLACKWELL, dynamic=4 * _ALL_WORDS)
    def _gemm(y: Rows, partial: f32.ptr, x: u32.ptr, scales: f32.ptr, planes: Planes, bias: Bias, shape: Shape,
              tiles: i32.ptr, order: i32.ptr, by_token: u32, slots: u32.ptr, outliers: u32):
        # Block indices: a tile of rows and tokens. Grouped: the tile's expert and routes.
        thread, warp = u32(thread_index()), u32(thread_index() >> u32(5))
        first_row, first_token, count = u32(block_x() * ROWS), u32(block_y() * TOKENS), u32(shape.counts[shape.field])
        above_row = u32(0)                   # rows of the matrix before the expert's
        if grouped:
            expert, begin, end, _ = load4(tiles, u32(4 * block_y()))
            if expert < 0:
                return
            first_token, count, above_row = u32(begin), u32(end), u32(expert * shape.n)
        elif first_token >= count:
            return
        # The tiles of this part, of 64 or 128 columns.
        parts, units = u32(grid_z()), u32(u32(shape.units + units_of - 1) // units_of)
        share = u32(u32(units + parts - 1) // parts)
        unit = u32(block_z() * share)
        last = u32(unit + share) if unit + share < units else units
        # The row of this thread, the tokens that it copies, and the token whose scales it loads, with its row of the
        # result; the last token repeated if there are too few.
        acc, rows_of, words, row = _sums(), _sources(), _words(), u32(first_row + thread)
        for i in range(TOKENS):
            acc[i] = f32(0)
        if not tma:
            for i in range(_COPIES):
                at = u32(first_token + (thread + THREADS * i >> 2))
                at = at if at < count else u32(count - 1)
                rows_of[i] = u32(order[2 * at + by_token]) if grouped else at
        route = u32(first_token + (thread & u32(TOKENS - 1)))
        route = route if route < count else u32(count - 1)
        token = u32(order[2 * route + by_token]) if grouped else route
        route = u32(order[2 * route]) if grouped else route
        # Shared memory: scales of tokens; mbarriers; zeros for tokens that no bulk copy writes. Tensor memory.
        tile, number, buffer = memory(), u32(0), u32(0)
        if thread < TOKENS:
            tile[_ENDS + 2 * thread] = bits_of(scales[token])
            tile[_ENDS + 2 * thread + 1] = route
        if tma:
            _clear_tokens(tile, u32(count - first_token), thread)
        _begin_counts(tile, thread, tma)
        if warp == 0:
            allocate_columns(tile, _ADDRESS, u32(COLUMNS))
            relinquish_columns()
        before_barrier()
        sync_block()
        after_barrier()
        if tma:
            sync_cluster()                   # the other block's mbarriers are ready
        address, scale = u32(tile[_ADDRESS]), f32(1)
        own = u32(address + u32((warp & u32(3)) << u32(21)) + ACROSS * u32(warp >> u32(2) & u32(1)))
        # Start the copies of three tiles.
        for i in range(_AHEAD):
            if unit + i < last:
                if tma:
                    bring(tile, u32(i), x, first_token, count, u32(unit + i), units, thread)
                else:
                    copy_tokens(tile, u32(i * _STAGE + _X_AT), x, rows_of, u32(unit + i), units, thread)
                if thread < THREADS:
                    copy_matrix(tile, u32(i * _STAGE), planes.low, planes.high, first_row, above_row, shape.n,
                                u32(unit + i), shape.units, thread)
            copy_commit()
        if fours and unit < last:
            load_words(words, load_scales, planes.head, x, u32(above_row + (row if row < shape.n else shape.n - 1)),
                        token, unit, shape.units, units)
        while unit < last:
            # Write the scales of the tile to shared memory. Load those of the next one.
            if fours and thread < THREADS:
                at = u32(_SCALES + (number & u32(STAGES - 1)) * _SCALE_WORDS)
                store_scales(tile, at, thread, words[0], words[1])
                if thread < TOKENS:
                    store_scales(tile, u32(at + 4 * ACROSS), thread, words[2], words[3])
                if unit + 1 < last:
                    load_words(words, load_scales, planes.head, x,
                                u32(above_row + (row if row < shape.n else shape.n - 1)), token, u32(unit + 1),
                                shape.units, units)
            # Wait for the tile, make it visible to the tensor cores. Earlier loads of tensor memory precede products.
            copy_wait_third()
            fence_tiles()
            before_barrier()
            sync_block()
            # One thread starts the products; those of a new group replace what is in tensor memory.
            if thread == 0:
                after_barrier()
                if tma:
                    wait_turn(tile, u32(_FULL + 2 * (number & u32(STAGES - 1))), u32(number >> u32(2) & u32(1)))
                at, more = u32((number & u32(STAGES - 1)) * _STAGE), u32(number)
                if tiles_a_scale > 0:  # noqa: SIM102  a constant condition of its own, which the compiler can remove
                    if unit % tiles_a_scale == 0:
                        more = u32(0)
                if fours:
                    to = u32(address + _GROUP + (number & u32(STAGES - 1)) * (6 * SCALES))
                    for i in range(6):
                        copy_scales(u32(to + SCALES * i), tile,
                                    u32(_SCALES + (number & u32(STAGES - 1)) * _SCALE_WORDS + ACROSS * i))
                    for i in range(2):
                        multiply4(u32(address + ACROSS * i), tile, u32(at + _HALF * i), tile, u32(at + _X_AT),
                                  u32(to + 2 * SCALES * i), u32(to + 4 * SCALES), more)
                else:
                    for i in range(2):
                        multiply(u32(address + buffer + ACROSS * i), tile, u32(at + _HALF * i), tile, u32(at + _X_AT),
                                 more)
                commit_products(tile, u32(_DONE + 2 * (number & u32(STAGES - 1))))
            # While they run: the buffer of the previous tile is free once its products are complete.
            if number > 0:
                wait_turn(tile, u32(_DONE + 2 * (number + 3 & u32(STAGES - 1))), u32(number - 1 >> u32(2) & u32(1)))
            if unit + _AHEAD < last:
                free = u32((number + _AHEAD & u32(STAGES - 1)) * _STAGE)
                if not tma:
                    copy_tokens(tile, u32(free + _X_AT), x, rows_of, u32(unit + _AHEAD), units, thread)
                if thread < THREADS:
                    copy_matrix(tile, free, planes.low, planes.high, first_row, above_row, shape.n, u32(unit + _AHEAD),
                                shape.units, thread)
                elif tma:
                    bring(tile, u32(number + _AHEAD), x, first_token, count, u32(unit + _AHEAD), units, thread)
            copy_commit()
            sync_warp()
            # Add the previous group's products to the sums. Scales are loaded one step before they are used.
            if tiles_a_scale > 0 and thread < THREADS:
                if number > 0 and unit % tiles_a_scale == 0:
                    after_barrier()
                    add(acc, scale, u32(own + (buffer ^ u32(_GROUP))))
                scale = scale_of(planes.head, planes.above, planes.per_row, above_row, row, shape.n, unit, shape.units)
            unit, number = u32(unit + 1), u32(number + 1)
            if tiles_a_scale > 0:  # noqa: SIM102  as above
                if unit % tiles_a_scale == 0 and unit < last:
                    buffer = u32(buffer ^ u32(_GROUP))
        # No block may exit while copies to or from its memory are pending.
        if tma:
            sync_cluster()
        else:
            sync_block()
        # Add the last group; free tensor memory.
        if number > 0 and thread < THREADS:
            wait_turn(tile, u32(_DONE + 2 * (number + 3 & u32(STAGES - 1))), u32(number - 1 >> u32(2) & u32(1)))
            after_barrier()
            if tiles_a_scale == 0:
                scale = scale_of(planes.head, planes.above, planes.per_row, above_row, row, shape.n, u32(0), u32(0))
            add(acc, scale, u32(own + buffer))
        before_barrier()
        sync_block()
        after_barrier()
        if warp == 0:
            free_columns(address, u32(COLUMNS))
        # Epilogue: scale, bias, y; if there are several parts, partial sums for gemm_sum.
        if row >= shape.n or thread >= THREADS:
            return
        plus = f32(0)
        if bias.present != 0 and parts == 1:
            plus = bias.data[above_row + row]
        if not grouped and parts > 1:
            put(acc, partial + block_z() * count * shape.n, shape.n, tile, plus, u32(count - first_token), row)
        else:
            put(acc, *y, tile, plus, u32(count - first_token), row)

    return _gemm


def on_blackwell(device: Device, tokens: int, codes: str) -> bool:
    """Whether this module's kernels multiply tiles of this many tokens. codes: as in gemm_for."""
    return device.tcgen05 and tokens == TOKENS and codes != ""


def gemm_for(device: Device, kind: str, tokens: int, grouped: bool = False, apart: bool = False,
             codes: str = "") -> Kernel:
    """The kernel for tiles of this many tokens. codes: the kind of an 8-bit or 4-bit float operand, or ""."""
    if on_blackwell(device, tokens, codes):
        return tensor_memory_gemm(kind, codes, grouped, device.tma and not grouped)
    return wgmma.gemm_for(device, kind, tokens, grouped, apart, codes)


def rows_for(device: Device, kind: str, tokens: int, apart: bool, codes: str) -> int:
    """The rows of the matrix that a block of that kernel has."""
    return ROWS if on_blackwell(device, tokens, codes) else wgmma.rows_for(device, kind, tokens, apart)


def cluster_for(device: Device, n: int, tokens: int, apart: bool, codes: str) -> int:
    """The blocks of a cluster of that kernel, if not grouped. The last tile of rows may be beyond the matrix."""
    if on_blackwell(device, tokens, codes):
        return wgmma.shared_by(n) if device.tma else 1
    return wgmma.cluster_for(device, n, tokens, apart)


def split_for(device: Device, kind: str, apart: bool, n: int, rows: int, units: int, codes: str) -> int:
    """The number of parts into which the columns are split for `rows` tokens."""
    if on_blackwell(device, mma.tile_of(rows), codes):
        return wgmma.parts_of(n, rows, units)
    return wgmma.split_for(device, kind, apart, n, rows, units)


@device
def _begin_counts(tile, thread, tma):
    """Initialise the mbarriers; a barrier must follow."""
    if thread == 0:
        for i in range(STAGES):
            if tma:
                begin_count(tile, u32(_FULL + 2 * i), u32(1))
                begin_count(tile, u32(_FREE + 2 * i), u32(cluster_size()))
            begin_count(tile, u32(_DONE + 2 * i), u32(1))
        show_counts()


@functools.cache
def _bringer(fours: bool) -> DeviceFunction:
    """bring(...): _bring_tokens of a tile. Its arguments are computed again each time, so that they take no registers
    meanwhile."""
    tile_words = WORDS if fours else TILE_WORDS

    @device
    def bring(tile, number, x, first_token, count, unit, units, thread):
        rank, there = u32(cluster_rank()), u32(count - first_token)
        token = u32(first_token + TILE * rank)
        source = tile4(token, unit, units) if fours else half_place(token, unit, u32(0), units)
        _bring_tokens(tile, number, x, source, u32(units * tile_words), there if there < TOKENS else u32(TOKENS), rank,
                      u32(cluster_size()), thread)

    return bring


@functools.cache
def _adder() -> DeviceFunction:
    """add(acc, scale, address): acc[i] += scale * column i of 128 from `address` on.

    It is a chain of functions, so that all indices are constants and the sums stay in registers.
    """

    def of_columns(first: int) -> DeviceFunction:
        @device
        def add(acc, scale, address):
            values = _loaded()
            load_tensor(values, u32(address + first))
            for i in range(LOADED):
                acc[first + i] += scale * values[i]
        return add

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def add(acc, scale, address):
            first(acc, scale, address)
            second(acc, scale, address)
        return add

    return functools.reduce(both, map(of_columns, range(0, ACROSS, LOADED)))


@functools.cache
def _putter() -> DeviceFunction:
    """put(acc, y, ...): write the sums of a row of the matrix for `there` tokens; a chain of functions, as _adder."""

    def of_tokens(first: int) -> DeviceFunction:
        @device
        def put(acc, y, y_pitch, tile, plus, there, row):
            for i in range(0, _PUT, 2):
                scale, to, scale2, to2 = load4(tile, u32(_ENDS + 2 * (first + i)))
                if first + i < there:
                    (y + u32(to) * y_pitch)[row] = acc[first + i] * float_of(scale) + plus
                if first + i + 1 < there:
                    (y + u32(to2) * y_pitch)[row] = acc[first + i + 1] * float_of(scale2) + plus
        return put

    def both(first: DeviceFunction, second: DeviceFunction) -> DeviceFunction:
        @device
        def put(acc, y, y_pitch, tile, plus, there, row):
            first(acc, y, y_pitch, tile, plus, there, row)
            second(acc, y, y_pitch, tile, plus, there, row)
        return put

    return functools.reduce(both, map(of_tokens, range(0, TOKENS, _PUT)))
