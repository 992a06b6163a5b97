"""Routes in the order of their experts, so that an expert's matrix is read once for all of its tokens.

order  i32 [T * S][2]   route t * S + s, and t; those of expert 0 first, in rising order within each expert
tiles  i32 [most][4]    expert, and where its part of `order` begins and ends, of each tile of at most so many routes;
                        -1 beyond the last tile; the fourth number is not used

How many routes an expert has is known on the device alone: grids are as large as they may have to be (`most_tiles`),
and a block looks its tile up. A block for each expert counts all routes, so that no block waits for another; integer
sums make the result the same whatever the order of threads.
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
    """Places of routes and tiles. calls: those that compute them."""

    order: Ref
    tiles: Ref
    experts: int
    calls: tuple[Call, ...]

    def tile(self, sizes: Sizes) -> int:
        """Routes of a tile."""
        return tile_of(ceil(sizes.rows[N_ROUTES], self.experts))

    def most_tiles(self, sizes: Sizes) -> int:
        """Tiles that there may be."""
        return _most(sizes.rows[N_ROUTES], self.experts, self.tile(sizes))


def _most(routes: int, experts: int, tile: int) -> int:
    """A tile for each full one, and one that is not full for each expert that has any route."""
    return routes // tile + min(experts, routes)


def groups(ctx, ids: View, first: int, experts: int, runs: str) -> Groups:
    """The routes of ids i32 [T, S] to experts first .. first + experts - 1.

    runs: as in Context.operand.
    """
    room = ctx.room(ids) * ids.width
    name = f"experts {first} .. {first + experts - 1} of {ids}"
    order = ctx.scratch(f"order, {name}", 8 * room)
    tiles = ctx.scratch(f"tiles, {name}", 16 * _most(2 * room, experts, TOKENS[0]))  # sizes may be rounded up
    found = Groups(order, tiles, experts, ())

    def sort(sizes: Sizes) -> Launch:
        return Launch(_sort, (experts, 1, 1), (
            order, tiles, *ctx.view(ids), ctx.batch.counts, ids.width, first, experts, found.tile(sizes),
            found.most_tiles(sizes)))

    return Groups(order, tiles, experts, (Call(None, sort, makes=Prepared(ids, name, runs)),))


def matrices_of_routes(ctx, ids: View, first: int, experts: int, runs: str) -> tuple[Ref, tuple[Call, ...]]:
    """i32 [T * S], the place of each route's matrix in a stack of `experts`, -1 for none; and what finds it."""
    what = f"matrices {first} .. {first + experts - 1}"
    flat = ctx.scratch(f"{what} of {ids}", 4 * ctx.room(ids) * ids.width)
    call = per_row(None, _flatten, N_TOKENS, ceil(ids.width, 32), flat, *ctx.view(ids), ctx.batch.counts, ids.width,
                   first, experts)
    return flat, (replace(call, makes=Prepared(ids, what, runs)),)


@kernel("expert_ids", 32)
def _flatten(flat: i32.ptr, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32, experts: i32):
    t, s = block_x(), block_y() * 32 + thread_index()
    if t < counts[N_TOKENS] and s < chosen:
        expert = i32(ids[t * stride + s] - first)
        flat[t * chosen + s] = expert if expert >= 0 and expert < experts else i32(-1)


@kernel("expert_absent", 128)
def absent(y: f32.ptr, y_stride: u32, ids: i32.ptr, stride: u32, counts: i32.ptr, chosen: u32, first: i32, experts: i32,
           n: u32):
    """Zeros where a route goes to an expert of another device: grid (routes, n / 128)."""
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
    """Grid (experts): each block sorts in the routes of its expert, and lists their tiles."""
    # Place in the grid: the block's expert, the warp's run of routes.
    thread, lane, warp = u32(thread_index()), u32(lane_index()), u32(thread_index() >> u32(5))
    own, routes = i32(block_x()), u32(counts[N_ROUTES])
    share = u32((routes + 255) // 256 * 32)  # each warp has a run of routes, so that their order is kept
    begin = u32(warp * share)
    end = u32(begin + share) if begin + share < routes else routes
    # Clear the counts in shared memory; barrier.
    per_expert, parts = _counts(), _parts()
    i = thread
    while i < experts:
        per_expert[i] = i32(0)
        i = u32(i + 256)
    sync_block()
    # Count the routes of all experts (atomic); barrier.
    mine, route = i32(0), u32(begin + lane)
    while route < end:
        expert = _expert_of(ids, stride, chosen, first, route)
        if expert >= 0 and expert < experts:
            atomic_add(per_expert, expert, i32(1))
        if expert == own:
            mine = i32(mine + 1)
        route = u32(route + 32)
    sync_block()
    # Routes and tiles of the experts before this one: prefix sums over lanes, then warps.
    before, tiles_before, all_tiles, i = i32(0), i32(0), i32(0), thread
    while i < experts:
        here = per_expert[i]
        of_here = i32(u32(here + tile - 1) // tile)
        all_tiles = i32(all_tiles + of_here)
        if i < own:
            before, tiles_before = i32(before + here), i32(tiles_before + of_here)
        i = u32(i + 256)
    mine, before = i32(warp_sum(mine)), i32(warp_sum(before))
    tiles_before, all_tiles = i32(warp_sum(tiles_before)), i32(warp_sum(all_tiles))
    if lane == 0:
        parts[4 * warp], parts[4 * warp + 1] = mine, before
        parts[4 * warp + 2], parts[4 * warp + 3] = tiles_before, all_tiles
    sync_block()
    # Over the warps; where this warp's routes begin.
    before, tiles_before, all_tiles, at = i32(0), i32(0), i32(0), i32(0)
    for w in range(8):
        if w < warp:
            at = i32(at + parts[4 * w])
        before = i32(before + parts[4 * w + 1])
        tiles_before, all_tiles = i32(tiles_before + parts[4 * w + 2]), i32(all_tiles + parts[4 * w + 3])
    at = i32(at + before)
    # Store the routes in their order: a lane's place is the number of wanted ones below it (ballot).
    below = u32(u32(u32(1) << lane) - 1)  # the lanes before this one
    route = u32(begin + lane)
    while begin < end:
        wanted = route < end and _expert_of(ids, stride, chosen, first, route if route < end else begin) == own
        bits = ballot(wanted)
        if wanted:
            place = i32(at + i32(count_bits(u32(bits & below))))
            store2(order, u32(2 * place), i32(route), i32(route // chosen))
        at = i32(at + i32(count_bits(bits)))
        begin, route = u32(begin + 32), u32(route + 32)
    # List the tiles of this expert.
    last = i32(before + per_expert[own])
    i = thread
    start = i32(before + i32(i * tile))
    while start < last:
        stop = i32(start + tile) if start + tile < last else last
        store4(tiles, u32(4 * (tiles_before + i)), own, start, stop, i32(0))
        i = u32(i + 256)
        start = i32(before + i32(i * tile))
    # The last expert's block marks the tiles that are not there.
    i = u32(all_tiles + thread)
    while own == experts - 1 and i < most:
        store4(tiles, u32(4 * i), i32(-1), i32(0), i32(0), i32(0))
        i = u32(i + 256)
