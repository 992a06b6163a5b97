"""Who runs next, and in which KV blocks. Integers only: no model, no arrays, no clock.

A step takes from every running request what is due: one token (and drafts) of those that generate, and of the others
a piece of their prompt, all within a budget of tokens. Requests start by priority, then first come, first served; none
overtakes another that waits for memory, so the first of them always comes to its end. When blocks run out, the last
of the running requests gives its own back, and goes on later: from a copy in the host's memory, or by running again
what it knows.
"""

from bisect import insort
from collections.abc import Hashable, Sequence

from numflow.engine.schedule.blocks import GONE, BlockAllocator, BlockTable
from numflow.engine.schedule.chunks import choose_spans
from numflow.engine.schedule.limits import Limits
from numflow.engine.schedule.pools import CommonMemory, Pool, room
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.sequence import Group, Lane, Plan, Span
from numflow.engine.schedule.swap_space import Parking
from numflow.errors import RequestError
from numflow.sizes import in_words


class Scheduler:
    """Plans steps for groups (requests).

        scheduler.add(group)
        plan = scheduler.plan()          # do what it says, then, for every span:
        scheduler.ran(span)              # its known tokens have keys and values now
        lane.ids.append(...)             # new tokens; scheduler.fork(lane) and drop(lane) as samples part and end
        scheduler.remove(group)          # at any time

    blocks: KV blocks: an allocator, or pools for layers with different windows. host: for their copies in the host's
    memory. prefix: the prefix cache over them, None to do without. counts: totals since the beginning.
    """

    def __init__(self, blocks: BlockAllocator | Sequence[Pool], cross: BlockAllocator, block_size: int, limits: Limits,
                 prefix: PrefixCache | None = None, host: BlockAllocator | Sequence[BlockAllocator] | None = None):
        self.pools = [Pool(blocks)] if isinstance(blocks, BlockAllocator) else list(blocks)
        self.blocks, self.cross, self.block_size = self.pools[0].allocator, cross, block_size
        self.limits, self.prefix = limits, prefix
        hosts = [BlockAllocator() for _ in self.pools] if host is None else \
            [host] if isinstance(host, BlockAllocator) else list(host)
        self.parkings = [Parking(own, block_size, pool) for pool, own in enumerate(hosts)]
        self.parking = self.parkings[0]
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.counts = {"preemptions": 0, "swaps": 0, "prefix_tokens": 0, "prompt_tokens": 0}
        self._arrivals = 0
        self._last_output = ""

    @property
    def busy(self) -> bool:
        """Whether any request is here."""
        return bool(self.waiting or self.running)

    @property
    def lanes(self) -> int:
        """Lanes that the running requests may have."""
        return sum(group.width for group in self.running)

    def check(self, group: Group) -> None:
        """Whether a request could run, were it alone.

        Raises:
            RequestError: it may need more blocks than there are allowed to be.
        """
        most = [group.width * blocks for blocks in self._most(group.limit)]
        common: CommonMemory | None = self.blocks.common
        alone = [] if common is not None else zip([pool.allocator for pool in self.pools], most)
        for allocator, blocks in (*alone, (self.blocks, self._blocks(group.encoder)),
                                  (self.cross, self._blocks(group.encoder))):
            if allocator.limit is not None and blocks > allocator.limit:
                raise RequestError(f"{blocks} KV blocks of {self.block_size} tokens may be needed, and the memory for "
                                   f"keys and values holds {allocator.limit}: ask for fewer tokens, or give it more")
        nbytes = sum(pool.size * count for pool, count in zip(self.pools, most))
        if common is not None and nbytes > common.nbytes:
            raise RequestError(f"{in_words(nbytes)} of keys and values may be needed, and the memory for them holds "
                               f"{in_words(common.nbytes)}: ask for fewer tokens, or give it more")

    def add(self, group: Group) -> None:
        """A new request, behind those of its priority."""
        group.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        group.cross = BlockTable(self.cross, self.block_size)
        insort(self.waiting, group, key=lambda g: g.rank)

    def remove(self, group: Group) -> None:
        """A request has ended, wherever it is; all that it holds is free. May be called twice."""
        for queue in (self.running, self.waiting):
            if group in queue:
                queue.remove(group)
        for lane in group.lanes:
            self._release(lane)
        group.lanes = []
        if group.arrival >= 0:
            group.cross.release()
        group.running = False

    def plan(self) -> Plan:
        """The next step; blocks are taken for it. False if there is nothing to do."""
        plan = Plan()
        for parking, pool in zip(self.parkings, self.pools, strict=True):
            parking.settle()
            pool.allocator.pinned = 0
        for group in list(self.running):
            self._make_room(group, plan)
        self._admit(plan)
        outputs = {group.output for group in self.running if group.lanes}
        if outputs:
            others = sorted(outputs - {self._last_output}) or [self._last_output]
            plan.output = self._last_output = others[0]
            plan.spans = choose_spans(self.running, plan.output, self.limits, self._next_block)
        return plan

    def ran(self, span: Span) -> None:
        """A span has run: its known tokens have keys and values now. Drafts wait for `accept`."""
        span.lane.drafts = []
        if span.drafts:
            span.lane.length = span.start + span.count - len(span.drafts)
        else:
            self._advance(span.lane, span.start + span.count)

    def accept(self, lane: Lane, drafts: int) -> None:
        """The first `drafts` tokens after those that have run were right, and are at the end of `lane.ids`."""
        self._advance(lane, lane.length + drafts)

    def fork(self, lane: Lane) -> Lane:
        """A new lane of the same group with the same tokens; blocks are shared until one of them writes."""
        twin = Lane(lane.group, list(lane.ids), *(table.fork(self._blocks(lane.length)) for table in lane.tables))
        twin.length, twin.node, twin.registered, twin.border = lane.length, lane.node, lane.registered, lane.border
        lane.group.lanes.append(twin)
        return twin

    def drop(self, lane: Lane) -> None:
        """A lane has ended."""
        self._release(lane)
        lane.group.lanes.remove(lane)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _most(self, tokens: int) -> list[int]:
        """Blocks of each pool that a lane of so many tokens may hold at a time."""
        return [pool.most(tokens, self.limits.chunk, self.block_size) for pool in self.pools]

    def _release(self, lane: Lane) -> None:
        for table in lane.tables:
            table.release()
        for parking in self.parkings:
            parking.forget(lane)

    def _advance(self, lane: Lane, length: int) -> None:
        lane.length = length
        for table in lane.tables:
            table.truncate(max(length, len(lane.ids)))
        if (prefix := self._prefix_of(lane)) is not None:
            for at in range(lane.registered, length // self.block_size):
                lane.node = prefix.insert(lane.node, lane.ids, at, [table.blocks[at] for table in lane.tables])
                lane.registered = at + 1
        for table in lane.tables:
            table.slide(length, lane.border)

    def _prefix_of(self, lane: Lane) -> PrefixCache | None:
        return self.prefix if lane.group.cached else None

    def _make_room(self, group: Group, plan: Plan) -> None:
        """Let every lane of a running group write what is due, if others have to go for it."""
        while group.running and not self._writable(group, plan):
            self._preempt(self.running[-1], plan)

    def _writable(self, group: Group, plan: Plan) -> bool:
        """Take the blocks that the known tokens and drafts of a group need, own ones where they are written to."""
        needed = self._needed(group)
        if any(needed) and not room(self.pools, needed, self._may_need(group), self.block_size):
            for lane in group.lanes:
                lane.drafts = []
            needed = self._needed(group)
            if not room(self.pools, needed, needed, self.block_size):
                return False
        if any(needed):
            for lane in group.lanes:
                for pool, table in enumerate(lane.tables):
                    if table.shared(lane.length):
                        plan.moves(pool).copies.append(table.own(lane.length))
                        self._pin(plan)
                    table.extend(lane.due(table, self.limits.chunk))
        return True

    def _needed(self, group: Group) -> list[int]:
        """Blocks of each pool that `_writable` has to take: new ones, and copies for all but one of those that share a
        block."""
        found = []
        for number, pool in enumerate(self.pools):
            needed = 0
            shared: dict[int, int] = {}
            for lane, table in ((lane, lane.tables[number]) for lane in group.lanes):
                needed += table.missing(lane.due(table, self.limits.chunk))
                if table.shared(lane.length):
                    block = table.blocks[lane.length // self.block_size]
                    shared[block] = shared.get(block, 0) + 1
            found.append(needed + sum(min(count, pool.allocator.holders(block) - 1)
                                      for block, count in shared.items()))
        return found

    def _may_need(self, group: Group) -> list[int]:
        """Blocks of each pool that the group may come to need beyond those it has.

        Beside others, or where prefixes are kept, at least half of those that there are: memory that grows is copied,
        and by a few blocks at a time that would be most of the work.
        """
        own = [max(0, group.width * most - sum(len(lane.tables[number].held) for lane in group.lanes))
               for number, most in enumerate(self._most(group.limit))]
        alone = self.prefix is None and len(self.running) + len(self.waiting) <= 1
        return own if alone else [max(count, pool.allocator.capacity // 2)
                                  for count, pool in zip(own, self.pools, strict=True)]

    def lost(self) -> None:
        """What all KV blocks held is gone: running requests wait, and read their texts from the first token again."""
        for group in list(self.running):
            self._preempt(group, Plan(), swap=False)
        for lane in (lane for group in self.waiting for lane in group.lanes if lane.parked):
            for parking in self.parkings:
                parking.forget(lane)  # it may not have been saved yet
            self._begin(lane)
        if self.prefix is not None:
            self.prefix.clear()

    def _preempt(self, group: Group, plan: Plan, swap: bool = True) -> None:
        """Take a running group's blocks away; it waits in its old place."""
        self.running.remove(group)
        group.running = group.encoded = False
        insort(self.waiting, group, key=lambda g: g.rank)
        self.counts["preemptions"] += 1
        origins = []
        for pool in range(len(self.pools)):
            moves = plan.moves(pool)
            origins.append({new: old for old, new in moves.copies})  # of copies that have not been made yet
            taken = {block for lane in group.lanes for block in lane.tables[pool].held}
            moves.copies = [copy for copy in moves.copies if copy[1] not in taken]
        if swap and self.limits.preemption == "swap" and all(parking.room(group) for parking in self.parkings):
            self.counts["swaps"] += 1
            for parking, origin in zip(self.parkings, origins, strict=True):
                parking.park(group, plan, origin)
            self._pin(plan)
        for lane in group.lanes:
            for table in lane.tables:
                table.release()
            lane.drafts = []
            if not lane.parked:
                self._begin(lane)
        group.cross.release()

    def _pin(self, plan: Plan) -> None:
        """What the plan is to save and copy stays until then, whatever memory makes way for."""
        for pool, moves in plan.moving.items():
            sources = [block for block, _ in (*moves.saves, *moves.copies)]
            self.pools[pool].allocator.pinned = max(sources, default=-1) + 1

    def _admit(self, plan: Plan) -> None:
        """Start requests that wait, in order, as long as they fit."""
        if self.limits.batching == "static" and self.running:
            return
        while self.waiting and self._start(self.waiting[0], plan):
            pass
        held = self.cross.used or any(pool.allocator.used for pool in self.pools)
        if self.waiting and not (self.running or held):  # there is nobody to wait for
            group = self.waiting[0]
            plan.refused.append((group, max(group.encoder, sum(len(lane.ids) for lane in group.lanes) or group.limit)))
            self.remove(group)

    def _start(self, group: Group, plan: Plan) -> bool:
        """Start the first of the waiting requests, if it fits; those of lower priority make place."""
        if group.encoder and plan.encodes and (
                sum(other.encoder for other, _ in plan.encodes) + group.encoder > self.limits.encoder_tokens):
            return False
        lower = [other for other in self.running if other.priority < group.priority]
        above = self.lanes - sum(other.width for other in lower)
        if above and above + group.width > self.limits.lanes:
            return False
        while (self.lanes and self.lanes + group.width > self.limits.lanes) or not self._take(group, plan):
            if not lower:
                return False
            self._preempt(lower.pop(), plan)
        self.waiting.remove(group)
        insort(self.running, group, key=lambda g: g.rank)
        group.running = True
        return True

    def _take(self, group: Group, plan: Plan) -> bool:
        """Take the blocks that a group starts with, or none."""
        if group.limit and not group.lanes:
            group.lanes.append(Lane(group, list(group.prompt), *(pool.table(self.block_size) for pool in self.pools)))
        fresh = not group.parked
        if fresh:
            self._find(group)
        if not self._has_room(group, fresh):
            found = any(lane.length for lane in group.lanes) and fresh
            for lane in group.lanes if fresh else ():
                self._release(lane)
                self._begin(lane)
            # What was found may lie where it keeps a pool from making way for another: alone, it goes.
            if self.running or not found or not self._has_room(group, fresh):
                return False
        if fresh:
            self._fill(group)
        else:
            for parking, pool in zip(self.parkings, self.pools, strict=True):
                parking.fetch(group, pool.allocator, plan)
            self._writable(group, plan)  # what it needs was counted
        if group.encoder:
            group.cross.extend(group.encoder)
            scratch = BlockTable(self.blocks, self.block_size)
            scratch.extend(group.encoder)
            plan.encodes.append((group, scratch))
            group.encoded = True  # it reads before the spans of the same plan run
        return True

    def _has_room(self, group: Group, fresh: bool) -> bool:
        """Whether the blocks that a group starts with can be had."""
        needed = self._needed(group) if fresh else [parking.needed(group, self.limits.chunk)
                                                    for parking in self.parkings]
        wanted, crossing = self._may_need(group), self._blocks(group.encoder)
        needed[0], wanted[0] = needed[0] + crossing, wanted[0] + crossing  # scratch blocks of the encoder
        return (room(self.pools, needed, wanted, self.block_size)
                and self.cross.room(crossing, crossing, self.block_size))

    def _begin(self, lane: Lane) -> None:
        """Nothing of a lane has run, or what has is lost."""
        lane.length, lane.node, lane.registered, lane.border = 0, lane.group.root, 0, 0

    def _find(self, group: Group) -> None:
        """Let new lanes hold what the prefix cache has of them; their last token runs in any case."""
        for lane in group.lanes:
            if (prefix := self._prefix_of(lane)) is None or lane.group.every_row:
                continue
            node, blocks, lane.border = prefix.match(group.root, lane.ids, (len(lane.ids) - 1) // self.block_size,
                                                     lane.tables)
            for table, own in zip(lane.tables, blocks, strict=True):
                first = own.count(GONE)
                table.hold([*own[:first], *table.allocator.share(own[first:])], first)
            lane.node, lane.registered, lane.length = node, len(blocks[0]), len(blocks[0]) * self.block_size

    def _fill(self, group: Group) -> None:
        """Let new lanes hold what they need beside what was found."""
        for lane in group.lanes:
            self.counts["prompt_tokens"] += len(lane.ids)
            self._count(lane, lane.registered)
            for table in lane.tables:
                table.extend(lane.due(table, self.limits.chunk))

    def _next_block(self, lane: Lane) -> Hashable:
        """Take over blocks of the prefix cache that came into being since the lane started; see choose_spans."""
        start = lane.length
        if (prefix := self._prefix_of(lane)) is None or lane.group.every_row or start % self.block_size:
            return None
        upcoming = self._take_over(lane, prefix)
        if lane.length > start:
            self._extend(lane, [lane.due(table, self.limits.chunk) for table in lane.tables])
        return upcoming

    def _take_over(self, lane: Lane, prefix: PrefixCache) -> Hashable:
        size = self.block_size
        while lane.length + size < len(lane.ids) and lane.registered == (at := lane.length // size):
            found = prefix.find(lane.node, lane.ids, at)
            if found is None:
                return lane.node, tuple(lane.ids[lane.length:lane.length + size])
            further = min(len(lane.ids), (at + 2) * size)  # what is left to run needs a block too
            if GONE in found[1] or not self._extend(lane, [further] * len(lane.tables)):
                return None
            lane.node, blocks = found
            for table, block in zip(lane.tables, blocks, strict=True):
                if block != table.blocks[at]:
                    table.allocator.share([block])
                    table.allocator.release([table.blocks[at]])
                    table.blocks[at] = block
            lane.length, lane.registered = lane.length + size, at + 1
            self._count(lane, 1)
            for table in lane.tables:
                table.slide(lane.length, lane.border)
        return None

    def _extend(self, lane: Lane, tokens: Sequence[int]) -> bool:
        """Let each table of a lane hold so many tokens, if there is room."""
        missing = [table.missing(count) for table, count in zip(lane.tables, tokens, strict=True)]
        if any(missing) and not room(self.pools, missing, missing, self.block_size):
            return False
        for table, count in zip(lane.tables, tokens, strict=True):
            table.extend(count)
        return True

    def _count(self, lane: Lane, blocks: int) -> None:
        self.counts["prefix_tokens"] += blocks * self.block_size
        lane.group.reused = min(lane.group.reused + blocks * self.block_size, len(lane.group.prompt))
