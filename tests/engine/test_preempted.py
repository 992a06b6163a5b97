"""Preemption during planning: copies, swapped blocks and loads of preempted requests in a step plan."""

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.scheduler import StepLimits
from numflow.engine.schedule.sequence import Sequence, SequenceGroup, StepPlan
from numflow.engine.schedule.swap_space import SwapSpace
from tests.engine.machine import SIZE, Machine


def run(machine, token=7):
    """A step, after which every sequence with rows has one more token."""
    plan = machine.step()
    for chunk in plan.chunks:
        machine.scheduler.ran(chunk)
    for chunk in plan.chunks:
        if chunk.rows:
            chunk.sequence.ids.append(token)
    return plan


def test_a_copy_for_a_preempted_fork_is_not_made_into_a_block_that_is_loaded():
    """Two sequences of one request share a block that one of them has to copy; then a request of higher priority takes
    all but one block, and into that one, which the copy was to go to, a third request comes back in the same step:
    it fits now, as its drafts, which had taken a block, are gone."""
    machine = Machine(StepLimits(), blocks=5, prefix=False)
    drafting, forked = SequenceGroup([1, 2, 3], 8), SequenceGroup([4, 5, 6, 4, 5], 8, width=2)
    machine.scheduler.add(drafting)
    machine.scheduler.add(forked)
    plan = machine.step()
    for chunk in plan.chunks:
        machine.scheduler.ran(chunk)
    machine.scheduler.fork(forked.sequences[0])
    for number, sequence in enumerate([*drafting.sequences, *forked.sequences]):
        sequence.ids.append(10 + number)
    drafting.sequences[0].drafts = [11]
    urgent = SequenceGroup([8] * 16, 16, priority=1)
    machine.scheduler.add(urgent)
    plan = machine.step()  # every token finds before it what it must
    assert machine.scheduler.running == [urgent, drafting]
    assert machine.scheduler.waiting == [forked]
    (_, loaded), = plan.loads
    assert plan.copies == [] and loaded == 4
    for chunk in plan.chunks:
        machine.scheduler.ran(chunk)
    machine.scheduler.remove(urgent)
    machine.scheduler.remove(drafting)
    machine.step()
    assert machine.scheduler.running == [forked]


def test_what_was_swapped_out_is_forgotten_with_the_memory():
    """Swapped blocks may never have been saved: nothing is loaded, and the host blocks are released."""
    machine = Machine(StepLimits(sequences=1), prefix=False)
    low, high = SequenceGroup([1, 2, 3, 4, 5, 6], 12), SequenceGroup([9], 12, priority=1)
    machine.scheduler.add(low)
    run(machine)
    machine.scheduler.add(high)
    plan = machine.scheduler.plan()  # which is lost before it is carried out
    assert len(plan.saves) == 2 and machine.scheduler.swap_space.host.used == 2
    machine.scheduler.lost()
    assert machine.scheduler.swap_space.host.used == 0 and not low.swapped
    machine.memory.clear()
    assert run(machine).loads == []
    machine.scheduler.remove(high)
    plan = run(machine)
    chunk, = plan.chunks
    assert plan.loads == [] and (chunk.sequence, chunk.start, chunk.count) == (low.sequences[0], 0, 7)


def _lane(blocks, tokens):
    group = SequenceGroup([0] * tokens, tokens)
    sequence = Sequence(group, [0] * tokens, BlockTable(blocks, SIZE))
    sequence.table.extend(tokens)
    sequence.length = tokens
    group.sequences.append(sequence)
    return group


def test_a_block_that_is_loaded_is_not_saved_over_in_the_same_step():
    """Saves precede loads: a host block is released when the plan that loads it has been executed."""
    blocks, swap_space = BlockAllocator(8), SwapSpace(BlockAllocator(limit=2), SIZE)
    first, second = _lane(blocks, 8), _lane(blocks, 8)
    assert swap_space.swap_out(first, StepPlan(), {})
    first.sequences[0].table.release()
    plan = StepPlan()
    swap_space.swap_in(first, blocks, plan)
    assert not swap_space.swap_out(second, plan, {}) and plan.saves == []
    assert swap_space.host.used == 2
    swap_space.settle()
    later = StepPlan()
    assert swap_space.host.used == 0 and swap_space.swap_out(second, later, {}) and len(later.saves) == 2


def test_blocks_of_the_host_that_a_plan_loads_and_saves_are_different_ones():
    blocks, swap_space = BlockAllocator(8), SwapSpace(BlockAllocator(limit=4), SIZE)
    first, second = _lane(blocks, 8), _lane(blocks, 8)
    swap_space.swap_out(first, StepPlan(), {})
    first.sequences[0].table.release()
    plan = StepPlan()
    swap_space.swap_in(first, blocks, plan)
    assert swap_space.swap_out(second, plan, {})
    assert not {host for host, _ in plan.loads} & {host for _, host in plan.saves}
