"""Loads into shared memory for many.py: the queries once, then one tile of keys and one tile of values at a time.

A tile holds rows of float16. Consecutive rows are `row_pitch` 32-bit words apart.
"""

from numflow.cuda.lang.arithmetic import load_matrices, pack_halves
from numflow.cuda.lang.hadamard import rotate_eight
from numflow.cuda.lang.intrinsics import copy_async, copy_commit, store4, sync_block
from numflow.cuda.lang.kernel import DeviceFunction, device
from numflow.cuda.lang.scalar import f32, u32
from numflow.cuda.state.cache_code import fetcher, halver, pitch, width
from numflow.quant.kv import CODED


def sixteens(kind: str, columns: int) -> int:
    """Steps of 16 columns (the K of mma.m16n8k16) that a row in shared memory has."""
    return -(-width(kind, columns) // 16)


def query_taker(k_type: str, k_dim: int, keys: int, row_pitch: int, block_rows: int) -> DeviceFunction:
    """Make take(...): load a warp's 16 query rows as A fragments of mma, by way of the shared memory of the key tile.

    Queries are rotated (Hadamard) if the keys in the cache are.
    """
    steps, rotated, rows_at_once = sixteens(k_type, k_dim), k_type in CODED, min(keys, block_rows)

    @device
    def put(tile, x, q, q_stride, begin_token, group, kv_head, first_row, rows, k_dim, thread):
        tile_row = u32(thread >> u32(2))
        while tile_row < rows_at_once:
            row = u32(first_row + tile_row) if first_row + tile_row < rows else u32(rows - 1)
            source = q + ((begin_token + row // group) * q_stride + (kv_head * group + row % group) * k_dim)
            piece = u32(thread & u32(3))
            while piece < 2 * steps:
                column = u32(8 * piece)
                for n in range(8):
                    x[n] = source[column + n] if column + n < k_dim else f32(0)
                if rotated:
                    rotate_eight(x, thread, 2, 1)
                store4(tile, u32(tile_row * row_pitch + 4 * piece), pack_halves(x[0], x[1]), pack_halves(x[2], x[3]),
                       pack_halves(x[4], x[5]), pack_halves(x[6], x[7]))
                piece = u32(piece + 4)
            tile_row = u32(tile_row + 32)

    @device
    def take(query, tile, x, q, q_stride, begin_token, group, kv_head, first_row, rows, k_dim, thread, warp, lane):
        # ldmatrix.x4: lane l gives the address of row l % 8 of 8x8 matrix l // 8. The four matrices are rows 0-7 and
        # 8-15 of columns 0-7, then of columns 8-15.
        address = u32(((lane & u32(15)) + 16 * warp) % u32(rows_at_once) * row_pitch + 4 * (lane >> u32(4)))
        begin = u32(0)
        while begin < u32(block_rows):
            put(tile, x, q, q_stride, begin_token, group, kv_head, u32(first_row + begin), rows, k_dim, thread)
            sync_block()
            if 16 * warp >= begin and 16 * warp < begin + rows_at_once:
                for i in range(steps):
                    query[4 * i], query[4 * i + 1], query[4 * i + 2], query[4 * i + 3] = load_matrices(
                        tile, u32(address + 8 * i))
            sync_block()
            begin = u32(begin + rows_at_once)

    return take


def stager(kind: str, columns: int, stored: int, keys: int,
           row_pitch: int) -> tuple[int, DeviceFunction, DeviceFunction]:
    """Staging of a tile from the cache to shared memory, in two halves: words of registers a thread, fetch and put.

    For float16, `fetch` starts cp.async copies and `put` does nothing. For other types, `fetch` loads codes into
    registers and `put` decodes them into shared memory. The tile has the first `columns` columns of rows that have
    `stored` columns in the cache. Four threads load a key: each takes every fourth piece of 8 columns. Keys beyond
    `last` repeat key `last`. Columns that pad the row to a multiple of 16 are zero.
    """
    pieces, step = width(kind, columns) // 8, pitch(kind, stored)
    each, passes, fill = -(-pieces // 4), keys // 32, pieces % 2 == 1
    fetch, halves = fetcher(kind, stored), halver(kind)

    @device
    def copy(words, tile, cache, block_size, offset, last, thread):
        for i in range(passes):
            key = u32(32 * i + (thread >> u32(2)))
            source = u32((offset + (key if key < last else last)) * step)
            for n in range(each):
                piece = u32(4 * n + (thread & u32(3)))
                if piece < pieces:
                    copy_async(tile, u32(key * row_pitch + 4 * piece), cache, u32(source + 4 * piece))
                elif fill and piece == pieces:
                    store4(tile, u32(key * row_pitch + 4 * piece), u32(0), u32(0), u32(0), u32(0))
        copy_commit()

    @device
    def nothing(words, tile, thread):
        return

    if kind == "f16":
        return 1, copy, nothing

    @device
    def fetch_all(words, tile, cache, block_size, offset, last, thread):
        for i in range(passes):
            key = u32(32 * i + (thread >> u32(2)))
            key = u32(offset + (key if key < last else last))
            for n in range(each):
                i0 = 4 * (i * each + n)
                words[i0], words[i0 + 1], words[i0 + 2], words[i0 + 3] = fetch(cache, block_size, key,
                                                                               u32(4 * n + (thread & u32(3))))

    @device
    def put_all(words, tile, thread):
        for i in range(passes):
            key = u32(32 * i + (thread >> u32(2)))
            for n in range(each):
                i0, piece = 4 * (i * each + n), u32(4 * n + (thread & u32(3)))
                a, b, c, d = halves(words[i0], words[i0 + 1], words[i0 + 2], words[i0 + 3], piece)
                store4(tile, u32(key * row_pitch + 4 * piece), a, b, c, d)

    return 4 * each * passes, fetch_all, put_all
