"""Who runs next, and in which KV blocks. Integers only: no model, no arrays, no clock.

A step takes from every running request what is due: one token (and drafts) of those that generate, and of the others
a piece of their prompt, all within a budget of tokens. Requests start by priority, then first come, first served; none
overtakes another that waits for memory, so the first of them always comes to its end. When blocks run out, the last
of the running requests gives its own back, and goes on later: from a copy in the host's memory, or by running again
what it knows.
"""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.lane import Group, Lane, Plan, Span
from numflow.engine.schedule.parking import Parking
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.spans import choose_spans
from numflow.errors import RequestError, did_you_mean

BATCHING = ("dynamic", "static")
PREEMPTION = ("swap", "recompute")


@dataclass
class Limits:
    """What a step may hold.

    lanes:      sequences that run side by side; a request that has more runs alone.
    tokens:     of a step; soft, what generates always runs.
    chunk:      tokens of one prompt in a step. encoder_tokens: that encoders read in a step; a longer text runs alone.
    batching:   "dynamic": requests join and leave at every step; "static": new ones start when all others have ended.
    preemption: "swap" or "recompute": what becomes of a request's blocks when memory runs out.

    Raises:
        RequestError: a value out of range.
    """

    lanes: int = 32
    tokens: int = 512
    chunk: int = 512
    encoder_tokens: int = 512
    batching: str = "dynamic"
    preemption: str = "swap"

    def __post_init__(self):
        for name in ("lanes", "tokens", "chunk", "encoder_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RequestError(f"{name} should be a whole number from 1, is {value!r}")
        for name, known in (("batching", BATCHING), ("preemption", PREEMPTION)):
            if getattr(self, name) not in known:
                raise RequestError(f"no {name} {getattr(self, name)!r}{did_you_mean(getattr(self, name), known)}")


class Scheduler:
    """Plans steps for groups (requests).

        scheduler.add(group)
        plan = scheduler.plan()          # do what it says, then, for every span:
        scheduler.ran(span)              # its known tokens have keys and values now
        lane.ids.append(...)             # new tokens; scheduler.fork(lane) and drop(lane) as samples part and end
        scheduler.remove(group)          # at any time

    prefix: the prefix cache over `blocks`, None to do without. counts: totals since the beginning.
    """

    def __init__(self, blocks: BlockAllocator, cross: BlockAllocator, block_size: int, limits: Limits,
                 prefix: PrefixCache | None = None, host: BlockAllocator | None = None):
        self.blocks, self.cross, self.block_size = blocks, cross, block_size
        self.limits, self.prefix = limits, prefix
        self.parking = Parking(BlockAllocator() if host is None else host, block_size)
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
        for allocator, blocks in ((self.blocks, group.width * self._blocks(group.limit)),
                                  (self.blocks, self._blocks(group.encoder)),
                                  (self.cross, self._blocks(group.encoder))):
            if allocator.limit is not None and blocks > allocator.limit:
                raise RequestError(f"{blocks} KV blocks of {self.block_size} tokens may be needed, and the memory for "
                                   f"keys and values holds {allocator.limit}: ask for fewer tokens, or give it more")

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
        self.parking.settle()
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
        twin = Lane(lane.group, list(lane.ids), lane.table.fork(self._blocks(lane.length)))
        twin.length, twin.node, twin.registered = lane.length, lane.node, lane.registered
        lane.group.lanes.append(twin)
        return twin

    def drop(self, lane: Lane) -> None:
        """A lane has ended."""
        self._release(lane)
        lane.group.lanes.remove(lane)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _release(self, lane: Lane) -> None:
        lane.table.release()
        self.parking.forget(lane)

    def _advance(self, lane: Lane, length: int) -> None:
        lane.length = length
        lane.table.truncate(max(length, len(lane.ids)))
        if self.prefix is None or not lane.group.cached:
            return
        for at in range(lane.registered, length // self.block_size):
            lane.node = self.prefix.insert(lane.node, lane.ids, at, lane.table.blocks[at])
            lane.registered = at + 1

    def _make_room(self, group: Group, plan: Plan) -> None:
        """Let every lane of a running group write what is due, if others have to go for it."""
        while group.running and not self._writable(group, plan):
            self._preempt(self.running[-1], plan)

    def _writable(self, group: Group, plan: Plan) -> bool:
        """Take the blocks that the known tokens and drafts of a group need, own ones where they are written to."""
        needed = self._needed(group)
        if needed and not self.blocks.room(needed, self._may_need(group), self.block_size):
            for lane in group.lanes:
                lane.drafts = []
            needed = self._needed(group)
            if not self.blocks.room(needed, needed, self.block_size):
                return False
        if needed:
            for lane in group.lanes:
                if lane.table.shared(lane.length):
                    plan.copies.append(lane.table.own(lane.length))
                lane.table.extend(len(lane.ids) + len(lane.drafts))
        return True

    def _needed(self, group: Group) -> int:
        """Blocks that `_writable` has to take: new ones, and copies for all but one of those that share a block."""
        needed = 0
        shared: dict[int, int] = {}
        for lane in group.lanes:
            needed += lane.table.missing(len(lane.ids) + len(lane.drafts))
            if lane.table.shared(lane.length):
                block = lane.table.blocks[lane.length // self.block_size]
                shared[block] = shared.get(block, 0) + 1
        return needed + sum(min(count, self.blocks.holders(block) - 1) for block, count in shared.items())

    def _may_need(self, group: Group) -> int:
        """Blocks that the group may come to need beyond those it has.

        Beside others, or where prefixes are kept, at least half of those that there are: memory that grows is copied,
        and by a few blocks at a time that would be most of the work.
        """
        own = max(0, group.width * self._blocks(group.limit) - sum(len(lane.table.blocks) for lane in group.lanes))
        alone = self.prefix is None and len(self.running) + len(self.waiting) <= 1
        return own if alone else max(own, self.blocks.capacity // 2)

    def lost(self) -> None:
        """What all KV blocks held is gone: running requests wait, and read their texts from the first token again."""
        for group in list(self.running):
            self._preempt(group, Plan(), swap=False)
        for lane in (lane for group in self.waiting for lane in group.lanes if lane.parked):
            self.parking.forget(lane)  # it may not have been saved yet
            lane.length, lane.node, lane.registered = 0, lane.group.root, 0
        if self.prefix is not None:
            self.prefix.clear()

    def _preempt(self, group: Group, plan: Plan, swap: bool = True) -> None:
        """Take a running group's blocks away; it waits in its old place."""
        self.running.remove(group)
        group.running = group.encoded = False
        insort(self.waiting, group, key=lambda g: g.rank)
        self.counts["preemptions"] += 1
        origin = {new: old for old, new in plan.copies}  # of copies that have not been made yet
        taken = {block for lane in group.lanes for block in lane.table.blocks}
        plan.copies = [copy for copy in plan.copies if copy[1] not in taken]
        if swap and self.limits.preemption == "swap" and self.parking.park(group, plan, origin):
            self.counts["swaps"] += 1
        for lane in group.lanes:
            lane.table.release()
            lane.drafts = []
            if not lane.parked:
                lane.length, lane.node, lane.registered = 0, group.root, 0
        group.cross.release()

    def _admit(self, plan: Plan) -> None:
        """Start requests that wait, in order, as long as they fit."""
        if self.limits.batching == "static" and self.running:
            return
        while self.waiting and self._start(self.waiting[0], plan):
            pass
        if self.waiting and not (self.running or self.blocks.used or self.cross.used):  # there is nobody to wait for
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
            group.lanes.append(Lane(group, list(group.prompt), BlockTable(self.blocks, self.block_size)))
        fresh = not group.parked
        matches = [self._match(lane) for lane in group.lanes] if fresh else []
        needed = self._blocks(group.encoder) + (self._starting(group, matches) if fresh else self.parking.needed(group))
        crossing = self._blocks(group.encoder)
        if not (self.blocks.room(needed, self._may_need(group) + crossing, self.block_size)
                and self.cross.room(crossing, crossing, self.block_size)):
            return False
        if fresh:
            self._fill(group, matches)
        else:
            self.parking.fetch(group, self.blocks, plan)
            self._writable(group, plan)  # what it needs was counted
        if group.encoder:
            group.cross.extend(group.encoder)
            scratch = BlockTable(self.blocks, self.block_size)
            scratch.extend(group.encoder)
            plan.encodes.append((group, scratch))
            group.encoded = True  # it reads before the spans of the same plan run
        return True

    def _match(self, lane: Lane) -> tuple:
        """(node, blocks) of the prefix cache for a lane; its last token runs in any case."""
        if self.prefix is None or not lane.group.cached or lane.group.every_row:
            return lane.node, []
        return self.prefix.match(lane.group.root, lane.ids, (len(lane.ids) - 1) // self.block_size)

    def _starting(self, group: Group, matches) -> int:
        """Free blocks that filling the lanes takes, those that are kept and matched included."""
        idle = {block for _, blocks in matches for block in blocks if not self.blocks.holders(block)}
        new = sum(self._blocks(len(lane.ids)) - len(blocks) for lane, (_, blocks) in zip(group.lanes, matches))
        return len(idle) + new

    def _fill(self, group: Group, matches) -> None:
        for lane, (node, blocks) in zip(group.lanes, matches):
            lane.table.blocks = self.blocks.share(blocks)
            lane.node, lane.registered, lane.length = node, len(blocks), len(blocks) * self.block_size
            self.counts["prompt_tokens"] += len(lane.ids)
            self._count(lane, len(blocks))
        for lane in group.lanes:
            lane.table.extend(len(lane.ids))

    def _next_block(self, lane: Lane) -> Hashable:
        """Take over blocks of the prefix cache that came into being since the lane started; see choose_spans."""
        size = self.block_size
        if self.prefix is None or not lane.group.cached or lane.group.every_row or lane.length % size:
            return None
        while lane.length + size < len(lane.ids) and lane.registered == (at := lane.length // size):
            found = self.prefix.find(lane.node, lane.ids, at)
            if found is None:
                return lane.node, tuple(lane.ids[lane.length:lane.length + size])
            lane.node, block = found
            if block != lane.table.blocks[at]:
                self.blocks.share([block])
                self.blocks.release([lane.table.blocks[at]])
                lane.table.blocks[at] = block
            lane.length, lane.registered = lane.length + size, at + 1
            self._count(lane, 1)
        return None

    def _count(self, lane: Lane, blocks: int) -> None:
        self.counts["prefix_tokens"] += blocks * self.block_size
        lane.group.reused = min(lane.group.reused + blocks * self.block_size, len(lane.group.prompt))
