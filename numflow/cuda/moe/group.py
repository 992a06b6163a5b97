"""Routes sorted by expert, so that an expert's matrix is read once for all of its tokens.

order  i32 [T * S][2]   route t * S + s, and token t; sorted by expert, then by route
tiles  i32 [most][4]    for each tile of routes: expert, begin and end of the tile in `order`, unused; the expert is -1
                        beyond the last tile

Only the device knows how many routes each expert has, so grids are sized for the worst case (`most_tiles`), and each
block looks up its tile. The sort has one block for each expert, and every block counts all routes, so that no block
waits for another. Integer sums do not depend on the order of the threads, so the result is deterministic.
"""

from dataclasses import dataclass, replace

from numflow.cuda.device.call import N_ROUTES, N_TOKENS, Call, Prepared, Sizes, ceil, per_row
from numflow.cuda.device.device import Launch, Ref
from numflow.cuda.lang.arithmetic import count_bits
from numflow.cuda.lang.intrinsic import SharedArray
from numflow.cuda.lang.intrinsics import (
    atomic_add,
    ballot,
    block_x,
    block_y,
    lane_index,
    store2,
    store4,
    sync_block,
    thread_index,
)
from numflow.cuda.lang.kernel import device, kernel
from numflow.cuda.lang.reduce import warp_sum
from numflow.cuda.lang.scalar import f32, i32, u32
from numflow.cuda.linear.gemm import TOKENS, tile_of
from numflow.cuda.moe.route import MOST_EXPERTS
from numflow.ops import View

THREADS = 256
WARPS = THREADS // 32
_counts, _parts = SharedArray(i32, MOST_EXPERTS), SharedArray(i32, 4 * WARPS)


@dataclass(frozen=True)
class Groups:
    """Device memory of sorted routes and of tiles. calls: the launches that compute them."""

    order: Ref
    tiles: Ref
    experts: int
    calls: tuple[Call, ...]

    def tile(self, sizes: Sizes) -> int:
        """Most routes of a tile."""
        return tile_of(ceil(sizes.rows[N_ROUTES], self.experts))

    def most_tiles(self, sizes: Sizes) -> int:
        """Upper bound of the number of tiles."""
        return _most(sizes.rows[N_ROUTES], self.experts, self.tile(sizes))


def _most(routes: int, experts: int, tile: int) -> int:
    """Upper bound of the number of tiles: all full ones, and one partial tile for each expert that has a route."""
    return routes // tile + min(experts, routes)


def groups(ctx, ids: View, first: int, experts: int, runs: str) -> Groups:
    """Sort the routes of ids i32 [T, S] to experts first .. first + experts - 1.

    runs: as in Context.operand.
    """
    most_rows = ctx.room(ids) * ids.width
    name = f"experts {first} .. {first + experts - 1} of {ids}"
    order = ctx.scratch(f"order, {name}", 8 * most_rows)
    tiles = ctx.scratch(f"tiles, {name}", 16 * _most(2 * most_rows, experts, TOKENS[0]))  # sizes may be rounded up
    grouping = Groups(order, tiles, experts, ())

    def sort(sizes: Sizes) -> Launch:
        return Launch(_sort, (experts, 1, 1), (
            order, tiles, *ctx.view(ids), ctx.batch.counts, ids.width, first, experts, grouping.tile(sizes),
            grouping.most_tiles(sizes)))

    return Groups(order, tiles, experts, (Call(None, sort, makes=Prepared(ids, name, runs)),))


def matrices_of_routes(ctx, ids: View, first: int, experts: int, runs: str) -> tuple[Ref, tuple[Call, ...]]:
    """i32 [T * S]: index of each route's matrix in a stack of `experts`, -1 if it is not there; and the calls."""
    name = f"matrices {first} .. {first + experts - 1}"
    flat = ctx.scratch(f"{name} of {ids}", 4 * ctx.room(ids) * ids.width)
    call = per_row(None, _flatten, N_TOKENS, ceil(ids.width, 32), flat, *ctx.view(ids), ctx.batch.counts, ids.width,
                   first, experts)
    return flat, (replace(call, makes=Prepared(ids, name, runs)),)


@kernel("expert_ids", 32)
def _flatten(flat: i32.ptr, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32, experts: i32):
    t, s = block_x(), block_y() * 32 + thread_index()
    if t < counts[N_TOKENS] and s < chosen:
        expert = i32(ids[t * stride + s] - first)
        flat[t * chosen + s] = expert if expert >= 0 and expert < experts else i32(-1)


@kernel("expert_absent", 128)
def absent(y: f32.ptr, y_stride: u32, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32, experts: i32,
           n: u32):
    """Write zeros where a route goes to an expert of another device. Grid (routes, n / 128)."""
    route, column = u32(block_x()), u32(block_y() * 128 + thread_index())
    if route >= u32(counts[N_ROUTES]) or column >= n:
        return
    expert = i32(ids[route // chosen * stride + route % chosen] - first)
    if expert < 0 or expert >= experts:
        y[route * y_stride + column] = f32(0)


@device
def _expert_of(ids, stride, chosen, first, route):
    return i32(ids[route // chosen * stride + route % chosen] - first)


@kernel("expert_groups", THREADS)
def _sort(order: i32.ptr, tiles: i32.ptr, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32,
          experts: i32, tile: u32, most: u32):
    """Grid (experts): each block writes the routes and the tiles of its expert (a counting sort)."""
    # Block index: the expert. Each warp takes one contiguous range of routes.
    thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
    expert_id, routes = i32(block_x()), u32(counts[N_ROUTES])
    warp_routes = u32((routes + 255) // 256 * 32)  # a contiguous range for each warp keeps the sort stable
    begin = u32(warp * warp_routes)
    end = u32(begin + warp_routes) if begin + warp_routes < routes else routes
    # Clear the counts in shared memory. Barrier.
    per_expert, parts = _counts(), _parts()
    i = thread
    while i < experts:
        per_expert[i] = i32(0)
        i = u32(i + 256)
    sync_block()
    # Count the routes of all experts by atomic additions in shared memory. Barrier.
    n_own, route = i32(0), u32(begin + lane)
    while route < end:
        expert = _expert_of(ids, stride, chosen, first, route)
        if expert >= 0 and expert < experts:
            atomic_add(per_expert, expert, i32(1))
        if expert == expert_id:
            n_own = i32(n_own + 1)
        route = u32(route + 32)
    sync_block()
    # Number of routes and tiles of all experts before this one: sums over the lanes, then over the warps.
    before, tiles_before, all_tiles, i = i32(0), i32(0), i32(0), thread
    while i < experts:
        n_routes = per_expert[i]
        n_tiles = i32(u32(n_routes + tile - 1) // tile)
        all_tiles = i32(all_tiles + n_tiles)
        if i < expert_id:
            before, tiles_before = i32(before + n_routes), i32(tiles_before + n_tiles)
        i = u32(i + 256)
    n_own, before = i32(warp_sum(n_own)), i32(warp_sum(before))
    tiles_before, all_tiles = i32(warp_sum(tiles_before)), i32(warp_sum(all_tiles))
    if lane == 0:
        parts[4 * warp], parts[4 * warp + 1] = n_own, before
        parts[4 * warp + 2], parts[4 * warp + 3] = tiles_before, all_tiles
    sync_block()
    # Sums over the warps, and the offset at which this warp's routes begin.
    before, tiles_before, all_tiles, offset = i32(0), i32(0), i32(0), i32(0)
    for w in range(8):
        if w < warp:
            offset = i32(offset + parts[4 * w])
        before = i32(before + parts[4 * w + 1])
        tiles_before, all_tiles = i32(tiles_before + parts[4 * w + 2]), i32(all_tiles + parts[4 * w + 3])
    offset = i32(offset + before)
    # Write the routes in order: a lane's offset is the number of wanted routes in lower lanes (ballot and popc).
    below = u32(u32(u32(1) << lane) - 1)  # mask of the lower lanes
    route = u32(begin + lane)
    while begin < end:
        wanted = route < end and _expert_of(ids, stride, chosen, first, route if route < end else begin) == expert_id
        bits = ballot(wanted)
        if wanted:
            index = i32(offset + i32(count_bits(u32(bits & below))))
            store2(order, u32(2 * index), i32(route), i32(route // chosen))
        offset = i32(offset + i32(count_bits(bits)))
        begin, route = u32(begin + 32), u32(route + 32)
    # Write the tiles of this expert.
    last = i32(before + per_expert[expert_id])
    i = thread
    start = i32(before + i32(i * tile))
    while start < last:
        stop = i32(start + tile) if start + tile < last else last
        store4(tiles, u32(4 * (tiles_before + i)), expert_id, start, stop, i32(0))
        i = u32(i + 256)
        start = i32(before + i32(i * tile))
    # The last expert's block marks the unused tiles.
    i = u32(all_tiles + thread)
    while expert_id == experts - 1 and i < most:
        store4(tiles, u32(4 * i), i32(-1), i32(0), i32(0), i32(0))
        i = u32(i + 256)
