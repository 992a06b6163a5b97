"""Plans of steps: the sequences that run next and their KV blocks. Integers only: no model, no arrays, no clock.

A step takes from every running request what is due: one token (and drafts) of those that generate, and of the others
a piece of their prompt, all within a budget of tokens. Requests start by priority, then first come, first served; none
overtakes another that waits for memory, so the first of them always comes to its end. When blocks run out, the last
of the running requests gives its own back, and goes on later: from a copy in the host's memory, or by running again
what it knows.
"""

from bisect import insort
from collections.abc import Iterable

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.chunks import choose_chunks
from numflow.engine.schedule.limits import StepLimits
from numflow.engine.schedule.pools import CommonMemory, Pool, room
from numflow.engine.schedule.prefix import PrefixCache
from numflow.engine.schedule.reuse import Reuse
from numflow.engine.schedule.sequence import ScheduledChunk, Sequence, SequenceGroup, StepPlan
from numflow.engine.schedule.swap_space import SwapSpace
from numflow.errors import RequestError
from numflow.network.windows import STATE
from numflow.sizes import in_words


class Scheduler:
    """Plans steps for groups (requests).

        scheduler.add(group)
        plan = scheduler.plan()     # do what it says, then, for every chunk:
        scheduler.ran(chunk)        # its known tokens have keys and values now
        sequence.ids.append(...)    # new tokens; scheduler.fork(sequence), drop(sequence) as samples part and end
        scheduler.remove(group)     # at any time

    blocks: KV blocks: an allocator, or pools for layers with different windows. host: for their copies in the host's
    memory. prefix: the prefix cache over them, None to do without. counts: totals since the beginning.
    """

    def __init__(self, blocks: BlockAllocator | Iterable[Pool], cross: BlockAllocator, block_size: int,
                 limits: StepLimits, prefix: PrefixCache | None = None,
                 host: BlockAllocator | Iterable[BlockAllocator] | None = None):
        self.pools = [Pool(blocks)] if isinstance(blocks, BlockAllocator) else list(blocks)
        self.blocks, self.cross, self.block_size = self.pools[0].allocator, cross, block_size
        self.limits, self.prefix = limits, prefix
        hosts = [BlockAllocator() for _ in self.pools] if host is None else \
            [host] if isinstance(host, BlockAllocator) else list(host)
        self.swap_spaces = [SwapSpace(own, block_size, pool) for pool, own in enumerate(hosts)]
        self.swap_space = self.swap_spaces[0]
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.counts = {"preemptions": 0, "swaps": 0, "copied_blocks": 0, "prefix_tokens": 0, "prompt_tokens": 0}
        self.reuse = Reuse(prefix, self.pools, block_size, limits, self.counts)
        self._arrivals = 0
        self._last_output = ""

    @property
    def busy(self) -> bool:
        """Whether any request is here."""
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> int:
        """Sequences that the running requests may have."""
        return sum(group.width for group in self.running)

    def check(self, group: SequenceGroup) -> None:
        """Refuse a request that could not run even alone.

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

    def add(self, group: SequenceGroup) -> None:
        """A new request, behind those of its priority."""
        group.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        group.cross = BlockTable(self.cross, self.block_size)
        insort(self.waiting, group, key=lambda g: g.rank)

    def remove(self, group: SequenceGroup) -> None:
        """A request has ended, wherever it is; all that it holds is free. May be called twice."""
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
        """The next step; blocks are taken for it. False if there is nothing to do."""
        plan = StepPlan()
        for swap_space, pool in zip(self.swap_spaces, self.pools, strict=True):
            swap_space.settle()
            pool.allocator.settle()
            pool.allocator.pinned = 0
        for group in list(self.running):
            self._make_room(group, plan)
        self._admit(plan)
        outputs = {group.output for group in self.running if group.sequences}
        if outputs:
            others = sorted(outputs - {self._last_output}) or [self._last_output]
            plan.output = self._last_output = others[0]
            plan.chunks = choose_chunks(self.running, plan.output, self.limits, self.reuse)
        return plan

    def ran(self, chunk: ScheduledChunk) -> None:
        """A chunk has run: its known tokens have keys and values now. Drafts wait for `accept`."""
        sequence, sequence.drafts = chunk.sequence, []
        if chunk.drafts:
            sequence.length, sequence.tried = chunk.start + chunk.count - len(chunk.drafts), len(chunk.drafts)
        else:
            for table in sequence.tables:
                table.decide(True)
            self._advance(sequence, chunk.start + chunk.count)

    def accept(self, sequence: Sequence, drafts: int) -> None:
        """The first `drafts` tokens after those that have run were right, and are at the end of `sequence.ids`. Behind
        a state that others have passed through they run again."""
        right = drafts == sequence.tried
        for table in sequence.tables:
            table.decide(right, sequence.is_worth(sequence.length - 1))
        self._advance(sequence, sequence.length + drafts if right or not sequence.recurrent else sequence.length - 1)

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence of the same group with the same tokens; blocks are shared until one of them writes."""
        blocks = self._blocks(sequence.length)
        twin = Sequence(sequence.group, list(sequence.ids), *(table.fork(blocks) for table in sequence.tables))
        twin.length, twin.border = sequence.length, sequence.border
        twin.node, twin.registered = sequence.node, sequence.registered
        sequence.group.sequences.append(twin)
        return twin

    def shift(self, sequence: Sequence, keep: int, count: int) -> None:
        """Forget `count` tokens of a sequence behind the first `keep`: the others have new positions and run again."""
        del sequence.ids[keep:keep + count]
        self._release(sequence)
        sequence.drafts = []
        self._begin(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._release(sequence)
        sequence.group.sequences.remove(sequence)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _most(self, tokens: int) -> list[int]:
        """Blocks of each pool that a sequence of so many tokens may hold at a time."""
        return [pool.most(tokens, self.limits.chunk, self.block_size) for pool in self.pools]

    def _release(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            table.release()
        for swap_space in self.swap_spaces:
            swap_space.forget(sequence)

    def _advance(self, sequence: Sequence, length: int) -> None:
        sequence.length = length
        for table in sequence.tables:
            table.truncate(max(length, len(sequence.ids)))
        self.reuse.keep(sequence, length)
        for table in sequence.tables:
            table.slide(length, sequence.border)

    def _make_room(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Let every sequence of a running group write what is due, if others have to go for it."""
        while group.running and not self._writable(group, plan):
            self._preempt(self.running[-1], plan)

    def _writable(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Take the blocks that the known tokens and drafts of a group need, own ones where they are written to."""
        for sequence in group.sequences:
            for table in sequence.tables:
                table.decide(True)  # drafts that did not run after all
        needed = self._needed(group)
        if any(needed) and not room(self.pools, needed, self._may_need(group), self.block_size):
            for sequence in group.sequences:
                sequence.drafts = []
                for table in sequence.tables:
                    table.unshare(sequence.length)
            needed = self._needed(group)
            if not room(self.pools, needed, needed, self.block_size):
                return False
        if any(needed):
            for sequence in group.sequences:
                for pool, table in enumerate(sequence.tables):
                    copy = table.try_out() if sequence.drafts else None
                    if copy is None and table.shared(sequence.length):
                        copy = table.own(sequence.length, sequence.is_worth(sequence.length))
                    if copy is not None:
                        plan.moves(pool).copies.append(copy)
                        self.counts["copied_blocks"] += 1
                        self._pin(plan)
                    table.extend(sequence.due(table, self.limits.chunk))
        return True

    def _needed(self, group: SequenceGroup) -> list[int]:
        """Blocks of each pool that `_writable` has to take: new ones, and copies for all but one of those that share a
        block."""
        found = []
        for number, pool in enumerate(self.pools):
            needed = 0
            shared: dict[int, int] = {}
            for sequence, table in ((sequence, sequence.tables[number]) for sequence in group.sequences):
                needed += table.missing(sequence.due(table, self.limits.chunk))
                if sequence.drafts and pool.window == STATE:
                    needed += 1  # to try them out
                elif table.shared(sequence.length):
                    block = table.blocks[table.place(sequence.length)]
                    shared[block] = shared.get(block, 0) + 1
            found.append(needed + sum(min(count, pool.allocator.holders(block) - 1 + pool.allocator.kept(block))
                                      for block, count in shared.items()))
        return found

    def _may_need(self, group: SequenceGroup) -> list[int]:
        """Blocks of each pool that the group may come to need beyond those it has.

        Beside others, or where prefixes are kept, at least half of those that there are: memory that grows is copied,
        and by a few blocks at a time that would be most of the work.
        """
        own = [max(0, group.width * most - sum(len(sequence.tables[number].held) for sequence in group.sequences))
               for number, most in enumerate(self._most(group.limit))]
        alone = self.prefix is None and len(self.running) + len(self.waiting) <= 1
        return own if alone else [max(count, pool.allocator.capacity // 2)
                                  for count, pool in zip(own, self.pools, strict=True)]

    def lost(self) -> None:
        """Handle the loss of all KV blocks: running requests wait, and run their texts from the first token again."""
        for group in list(self.running):
            self._preempt(group, StepPlan(), swap=False)
        for sequence in (sequence for group in self.waiting for sequence in group.sequences if sequence.swapped):
            for swap_space in self.swap_spaces:
                swap_space.forget(sequence)  # it may not have been saved yet
            self._begin(sequence)
        if self.prefix is not None:
            self.prefix.clear()

    def _preempt(self, group: SequenceGroup, plan: StepPlan, swap: bool = True) -> None:
        """Take a running group's blocks away; it waits in its old place."""
        self.running.remove(group)
        group.running = group.encoded = False
        insort(self.waiting, group, key=lambda g: g.rank)
        self.counts["preemptions"] += 1
        origins = []
        for pool in range(len(self.pools)):
            moves = plan.moves(pool)
            origins.append({new: old for old, new in moves.copies})  # of copies that have not been made yet
            taken = {block for sequence in group.sequences for block in sequence.tables[pool].held}
            moves.copies = [copy for copy in moves.copies if copy[1] not in taken]
        if swap and self.limits.preemption == "swap" and all(swap_space.room(group) for swap_space in self.swap_spaces):
            self.counts["swaps"] += 1
            for swap_space, origin in zip(self.swap_spaces, origins, strict=True):
                swap_space.swap_out(group, plan, origin)
            self._pin(plan)
        for sequence in group.sequences:
            for table in sequence.tables:
                table.release()
            sequence.drafts = []
            if not sequence.swapped:
                self._begin(sequence)
        group.cross.release()

    def _pin(self, plan: StepPlan) -> None:
        """Pin the blocks that the plan saves and copies until it has run, whatever memory makes way for."""
        for pool, moves in plan.moving.items():
            sources = [block for block, _ in (*moves.saves, *moves.copies)]
            self.pools[pool].allocator.pinned = max(sources, default=-1) + 1

    def _admit(self, plan: StepPlan) -> None:
        """Start requests that wait, in order, as long as they fit."""
        if self.limits.batching == "static" and self.running:
            return
        while self.waiting and self._start(self.waiting[0], plan):
            pass
        held = self.cross.used or any(pool.allocator.used for pool in self.pools)
        if self.waiting and not (self.running or held):  # there is nobody to wait for
            group = self.waiting[0]
            known = sum(len(sequence.ids) for sequence in group.sequences)
            plan.refused.append((group, max(group.encoder, known or group.limit)))
            self.remove(group)

    def _start(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Start the first of the waiting requests, if it fits; those of lower priority make place."""
        if group.encoder and plan.encodes and (
                sum(other.encoder for other, _ in plan.encodes) + group.encoder > self.limits.encoder_tokens):
            return False
        lower = [other for other in self.running if other.priority < group.priority]
        above = self.sequences - sum(other.width for other in lower)
        if above and above + group.width > self.limits.sequences:
            return False
        while (self.sequences and self.sequences + group.width > self.limits.sequences) or not self._take(group, plan):
            if not lower:
                return False
            self._preempt(lower.pop(), plan)
        self.waiting.remove(group)
        insort(self.running, group, key=lambda g: g.rank)
        group.running = True
        return True

    def _take(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Take the blocks that a group starts with, or none."""
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
                self._begin(sequence)
            # What was found may lie where it keeps a pool from making way for another: alone, it goes.
            if self.running or not found or not self._has_room(group, fresh):
                return False
        if fresh:
            self._fill(group)
        else:
            for swap_space, pool in zip(self.swap_spaces, self.pools, strict=True):
                swap_space.swap_in(group, pool.allocator, plan)
        if group.encoder:
            group.cross.extend(group.encoder)
            scratch = BlockTable(self.blocks, self.block_size)
            scratch.extend(group.encoder)
            plan.encodes.append((group, scratch))
            group.encoded = True  # it reads before the chunks of the same plan run
        self._writable(group, plan)  # what it needs was counted
        return True

    def _has_room(self, group: SequenceGroup, fresh: bool) -> bool:
        """Whether the blocks that a group starts with can be had."""
        needed = self._needed(group) if fresh else [
            swap_space.needed(group, self.limits.chunk) for swap_space in self.swap_spaces]
        wanted, crossing = self._may_need(group), self._blocks(group.encoder)
        needed[0], wanted[0] = needed[0] + crossing, wanted[0] + crossing  # scratch blocks of the encoder
        return (room(self.pools, needed, wanted, self.block_size)
                and self.cross.room(crossing, crossing, self.block_size))

    def _begin(self, sequence: Sequence) -> None:
        """Nothing of a sequence has run, or what has is lost."""
        sequence.length, sequence.node, sequence.registered, sequence.border = 0, sequence.group.root, 0, 0

    def _fill(self, group: SequenceGroup) -> None:
        """Let new sequences hold what they need beside what was found."""
        for sequence in group.sequences:
            self.counts["prompt_tokens"] += len(sequence.ids)
            self.reuse.count(sequence, sequence.registered)
            for table in sequence.tables:
                table.extend(sequence.due(table, self.limits.chunk))
