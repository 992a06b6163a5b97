"""Continuous batching: plans of steps with their KV blocks. Integers only: no models, no arrays, no clock.

A step runs one token (and drafts) of each decoding sequence and a chunk of each prompt, within a token budget. Requests
start by priority, then first come, first served. No request overtakes another that waits for memory, so the first one
always finishes. When KV blocks run out, the last running request is preempted: its blocks are released, and the request
continues later from blocks swapped out to host memory, or by recomputing its tokens.
"""

from bisect import insort
from collections.abc import Iterable

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.chunks import choose_chunks
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.pools import MemoryBudget, Pool, can_allocate
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.reuse import Reuse
from numflow.engine.schedule.sequence import ScheduledChunk, Sequence, SequenceGroup, StepPlan
from numflow.engine.schedule.swap_space import SwapSpace
from numflow.errors import RequestError
from numflow.network.windows import STATE
from numflow.sizes import in_words


class Scheduler:
    """Plan steps for sequence groups (requests).

        scheduler.add(group)
        plan = scheduler.plan()     # execute the plan, then, for every chunk:
        scheduler.ran(chunk)        # its tokens have keys and values now
        sequence.ids.append(...)    # new tokens; scheduler.fork(sequence), drop(sequence) when samples diverge and end
        scheduler.remove(group)     # at any time

    blocks: KV blocks: one allocator, or pools for layers with different windows. cross: blocks for cross-attention.
    host:   allocators of host blocks for swapping. prefix: prefix cache of the KV blocks, None: no prefix cache.
    counts: totals since the start.
    """

    def __init__(self, blocks: BlockAllocator | Iterable[Pool], cross: BlockAllocator, block_size: int,
                 limits: StepLimits, prefix: PrefixCache | None = None,
                 host: BlockAllocator | Iterable[BlockAllocator] | None = None):
        self.pools = [Pool(blocks)] if isinstance(blocks, BlockAllocator) else list(blocks)
        self.blocks, self.cross, self.block_size = self.pools[0].allocator, cross, block_size
        self.limits, self.prefix = limits, prefix
        hosts = [BlockAllocator() for _ in self.pools] if host is None else \
            [host] if isinstance(host, BlockAllocator) else list(host)
        self.swap_spaces = [SwapSpace(allocator, block_size, pool) for pool, allocator in enumerate(hosts)]
        self.swap_space = self.swap_spaces[0]
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.counts = {"preemptions": 0, "swaps": 0, "copied_blocks": 0, "prefix_tokens": 0, "prompt_tokens": 0}
        self.reuse = Reuse(prefix, self.pools, block_size, limits, self.counts)
        self._arrivals = 0
        self._last_output = ""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> int:
        """Maximum number of sequences of the running requests."""
        return sum(group.width for group in self.running)

    def check(self, group: SequenceGroup) -> None:
        """Refuse a request that could not run even alone.

        Raises:
            RequestError: the request may need more blocks than the limit.
        """
        needed = [group.width * blocks for blocks in self._max_blocks(group.limit)]
        budget: MemoryBudget | None = self.blocks.budget
        separate = [] if budget is not None else zip([pool.allocator for pool in self.pools], needed)
        for allocator, blocks in (*separate, (self.blocks, self._blocks(group.encoder)),
                                  (self.cross, self._blocks(group.encoder))):
            if allocator.limit is not None and blocks > allocator.limit:
                raise RequestError(f"{blocks} KV blocks of {self.block_size} tokens may be needed, and the memory for "
                                   f"keys and values holds {allocator.limit}: ask for fewer tokens, or give it more")
        nbytes = sum(pool.size * count for pool, count in zip(self.pools, needed))
        if budget is not None and nbytes > budget.nbytes:
            raise RequestError(f"{in_words(nbytes)} of keys and values may be needed, and the memory for them holds "
                               f"{in_words(budget.nbytes)}: ask for fewer tokens, or give it more")

    def add(self, group: SequenceGroup) -> None:
        """Queue a new request after the requests of the same priority."""
        group.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        group.cross = BlockTable(self.cross, self.block_size)
        insort(self.waiting, group, key=lambda g: g.rank)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a waiting or running request and release its blocks. May be called twice."""
        for queue in (self.running, self.waiting):
            if group in queue:
                queue.remove(group)
        for sequence in group.sequences:
            self._release(sequence)
        group.sequences = []
        if group.arrival >= 0:
            group.cross.release()
        group.running = False

    def plan(self) -> StepPlan:
        """Plan of the next step; its blocks are allocated. The plan is falsy if there is nothing to do."""
        plan = StepPlan()
        for swap_space, pool in zip(self.swap_spaces, self.pools, strict=True):
            swap_space.settle()
            pool.allocator.settle()
            pool.allocator.pinned = 0
        for group in list(self.running):
            self._ensure_blocks(group, plan)
        self._admit(plan)
        outputs = {group.output for group in self.running if group.sequences}
        if outputs:
            others = sorted(outputs - {self._last_output}) or [self._last_output]
            plan.output = self._last_output = others[0]
            plan.chunks = choose_chunks(self.running, plan.output, self.limits, self.reuse)
        return plan

    def ran(self, chunk: ScheduledChunk) -> None:
        """Note that a chunk has run: its tokens have keys and values now. Drafts wait for `accept`."""
        sequence, sequence.drafts = chunk.sequence, []
        if chunk.drafts:
            sequence.length, sequence.drafts_run = chunk.start + chunk.count - len(chunk.drafts), len(chunk.drafts)
        else:
            for table in sequence.tables:
                table.end_drafts(True)
            self._advance(sequence, chunk.start + chunk.count)

    def accept(self, sequence: Sequence, drafts: int) -> None:
        """Accept the first `drafts` draft tokens, which are at the end of `sequence.ids` already. With a recurrent
        state, accepted drafts run again if others were rejected: the state saved before the drafts is restored."""
        all_accepted = drafts == sequence.drafts_run
        for table in sequence.tables:
            table.end_drafts(all_accepted, sequence.is_reusable(sequence.length - 1))
        roll_back = sequence.recurrent and not all_accepted
        self._advance(sequence, sequence.length - 1 if roll_back else sequence.length + drafts)

    def fork(self, sequence: Sequence) -> Sequence:
        """New sequence of the same group with the same tokens; blocks are shared until one of the two writes to
        them."""
        blocks = self._blocks(sequence.length)
        twin = Sequence(sequence.group, list(sequence.ids), *(table.fork(blocks) for table in sequence.tables))
        twin.length, twin.shared_blocks = sequence.length, sequence.shared_blocks
        twin.node, twin.cached_blocks = sequence.node, sequence.cached_blocks
        sequence.group.sequences.append(twin)
        return twin

    def shift(self, sequence: Sequence, keep: int, count: int) -> None:
        """Remove `count` tokens after the first `keep` from a sequence: the others get new positions and run again."""
        del sequence.ids[keep:keep + count]
        self._release(sequence)
        sequence.drafts = []
        self._reset(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._release(sequence)
        sequence.group.sequences.remove(sequence)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _max_blocks(self, tokens: int) -> list[int]:
        """Maximum number of blocks of each pool that a sequence of `tokens` tokens holds at a time."""
        return [pool.max_blocks(tokens, self.limits.chunk, self.block_size) for pool in self.pools]

    def _release(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            table.release()
        for swap_space in self.swap_spaces:
            swap_space.forget(sequence)

    def _advance(self, sequence: Sequence, length: int) -> None:
        sequence.length = length
        for table in sequence.tables:
            table.truncate(max(length, len(sequence.ids)))
        self.reuse.insert(sequence, length)
        for table in sequence.tables:
            table.slide(length, sequence.shared_blocks)

    def _ensure_blocks(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Allocate the blocks for the next tokens of a running group; preempt the last running groups if blocks
        lack."""
        while group.running and not self._take_blocks(group, plan):
            self._preempt(self.running[-1], plan)

    def _take_blocks(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Allocate the blocks that the tokens and drafts of a group need; copy shared blocks that will be written (copy
        on write). Returns False if blocks lack."""
        for sequence in group.sequences:
            for table in sequence.tables:
                table.end_drafts(True)  # drafts that were planned and did not run
        needed = self._blocks_needed(group)
        if any(needed) and not can_allocate(self.pools, needed, self._growth_hint(group), self.block_size):
            for sequence in group.sequences:
                sequence.drafts = []
                for table in sequence.tables:
                    table.drop_snapshot(sequence.length)
            needed = self._blocks_needed(group)
            if not can_allocate(self.pools, needed, needed, self.block_size):
                return False
        if any(needed):
            for sequence in group.sequences:
                for pool, table in enumerate(sequence.tables):
                    copy = table.begin_drafts() if sequence.drafts else None
                    if copy is None and table.shared(sequence.length):
                        copy = table.own(sequence.length, sequence.is_reusable(sequence.length))
                    if copy is not None:
                        plan.moves(pool).copies.append(copy)
                        self.counts["copied_blocks"] += 1
                        self._pin(plan)
                    table.extend(sequence.tokens_needed(table, self.limits.chunk))
        return True

    def _blocks_needed(self, group: SequenceGroup) -> list[int]:
        """Number of blocks of each pool that `_take_blocks` allocates: new ones, and copies of shared blocks for all
        holders but one."""
        counts = []
        for index, pool in enumerate(self.pools):
            needed = 0
            shared: dict[int, int] = {}
            for sequence, table in ((sequence, sequence.tables[index]) for sequence in group.sequences):
                needed += table.missing(sequence.tokens_needed(table, self.limits.chunk))
                if sequence.drafts and pool.window == STATE:
                    needed += 1  # a copy of the state for the drafts
                elif table.shared(sequence.length):
                    block = table.blocks[table.block_index(sequence.length)]
                    shared[block] = shared.get(block, 0) + 1
            counts.append(needed + sum(min(count, pool.allocator.holders(block) - 1 + pool.allocator.is_cached(block))
                                       for block, count in shared.items()))
        return counts

    def _growth_hint(self, group: SequenceGroup) -> list[int]:
        """Number of blocks of each pool that the group may still need, as a hint for growing the memory.

        With other requests or a prefix cache, at least half of the capacity: growing copies the memory, and growing by
        a few blocks at a time would mostly copy.
        """
        missing = [max(0, group.width * count - sum(len(sequence.tables[pool].held) for sequence in group.sequences))
                   for pool, count in enumerate(self._max_blocks(group.limit))]
        alone = self.prefix is None and len(self.running) + len(self.waiting) <= 1
        return missing if alone else [max(count, pool.allocator.capacity // 2)
                                      for count, pool in zip(missing, self.pools, strict=True)]

    def lost(self) -> None:
        """Handle the loss of all KV blocks: running requests wait and recompute their tokens from the first one."""
        for group in list(self.running):
            self._preempt(group, StepPlan(), swap=False)
        for sequence in (sequence for group in self.waiting for sequence in group.sequences if sequence.swapped):
            for swap_space in self.swap_spaces:
                swap_space.forget(sequence)  # it may not have been saved yet
            self._reset(sequence)
        if self.prefix is not None:
            self.prefix.clear()

    def _preempt(self, group: SequenceGroup, plan: StepPlan, swap: bool = True) -> None:
        """Preempt a running group: release its blocks and queue it by its rank."""
        self.running.remove(group)
        group.running = group.encoded = False
        insort(self.waiting, group, key=lambda g: g.rank)
        self.counts["preemptions"] += 1
        origins = []
        for pool in range(len(self.pools)):
            moves = plan.moves(pool)
            origins.append({new: old for old, new in moves.copies})  # copies that have not been made yet
            taken = {block for sequence in group.sequences for block in sequence.tables[pool].held}
            moves.copies = [copy for copy in moves.copies if copy[1] not in taken]
        swap = swap and self.limits.preemption == "swap"
        if swap and all(swap_space.can_swap_out(group) for swap_space in self.swap_spaces):
            self.counts["swaps"] += 1
            for swap_space, origin in zip(self.swap_spaces, origins, strict=True):
                swap_space.swap_out(group, plan, origin)
            self._pin(plan)
        for sequence in group.sequences:
            for table in sequence.tables:
                table.release()
            sequence.drafts = []
            if not sequence.swapped:
                self._reset(sequence)
        group.cross.release()

    def _pin(self, plan: StepPlan) -> None:
        """Pin the blocks that the plan saves and copies, so that their memory stays until the plan has been
        executed."""
        for pool, moves in plan.moving.items():
            sources = [block for block, _ in (*moves.saves, *moves.copies)]
            self.pools[pool].allocator.pinned = max(sources, default=-1) + 1

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting requests in order, as long as they fit."""
        if self.limits.batching == "static" and self.running:
            return
        while self.waiting and self._start(self.waiting[0], plan):
            pass
        held = self.cross.used or any(pool.allocator.used for pool in self.pools)
        if self.waiting and not (self.running or held):  # no block will be released
            group = self.waiting[0]
            tokens = sum(len(sequence.ids) for sequence in group.sequences)
            plan.refused.append((group, max(group.encoder, tokens or group.limit)))
            self.remove(group)

    def _start(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Start the first waiting request if it fits; running requests of lower priority are preempted for it."""
        if group.encoder and plan.encodes and (
                sum(other.encoder for other, _ in plan.encodes) + group.encoder > self.limits.encoder_tokens):
            return False
        lower = [other for other in self.running if other.priority < group.priority]
        remaining = self.sequences - sum(other.width for other in lower)
        if remaining and remaining + group.width > self.limits.sequences:
            return False
        while ((self.sequences and self.sequences + group.width > self.limits.sequences)
               or not self._start_blocks(group, plan)):
            if not lower:
                return False
            self._preempt(lower.pop(), plan)
        self.waiting.remove(group)
        insort(self.running, group, key=lambda g: g.rank)
        group.running = True
        return True

    def _start_blocks(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Allocate the blocks that a group starts with, all or none."""
        if group.limit and not group.sequences:
            tables = [pool.table(self.block_size) for pool in self.pools]
            group.sequences.append(Sequence(group, list(group.prompt), *tables))
        fresh = not group.swapped
        if fresh:
            self.reuse.find(group)
        if not self._has_room(group, fresh):
            found = any(sequence.length for sequence in group.sequences) and fresh
            for sequence in group.sequences if fresh else ():
                self._release(sequence)
                self._reset(sequence)
            # The ids of cached blocks may keep a pool from shrinking for another pool. A request alone does without
            # them.
            if self.running or not found or not self._has_room(group, fresh):
                return False
        if fresh:
            self._extend_tables(group)
        else:
            for swap_space, pool in zip(self.swap_spaces, self.pools, strict=True):
                swap_space.swap_in(group, pool.allocator, plan)
        if group.encoder:
            group.cross.extend(group.encoder)
            scratch = BlockTable(self.blocks, self.block_size)
            scratch.extend(group.encoder)
            plan.encodes.append((group, scratch))
            group.encoded = True  # the encoder runs before the chunks of the same plan
        self._take_blocks(group, plan)  # cannot fail: _has_room counted these blocks
        return True

    def _has_room(self, group: SequenceGroup, fresh: bool) -> bool:
        """Whether the blocks that a group starts with can be allocated."""
        needed = self._blocks_needed(group) if fresh else [
            swap_space.needed(group, self.limits.chunk) for swap_space in self.swap_spaces]
        wanted, cross = self._growth_hint(group), self._blocks(group.encoder)
        needed[0], wanted[0] = needed[0] + cross, wanted[0] + cross  # scratch blocks of the encoder
        return (can_allocate(self.pools, needed, wanted, self.block_size)
                and self.cross.can_allocate(cross, cross, self.block_size))

    def _reset(self, sequence: Sequence) -> None:
        """Reset a sequence: no token has run."""
        sequence.length, sequence.node, sequence.cached_blocks, sequence.shared_blocks = 0, sequence.group.root, 0, 0

    def _extend_tables(self, group: SequenceGroup) -> None:
        """Allocate the blocks of new sequences after their cached prefix."""
        for sequence in group.sequences:
            self.counts["prompt_tokens"] += len(sequence.ids)
            self.reuse.count(sequence, sequence.cached_blocks)
            for table in sequence.tables:
                table.extend(sequence.tokens_needed(table, self.limits.chunk))
