"""What preempted requests leave behind in a step that has been planned: copies, parked blocks, loads."""

from numflow.engine.schedule.blocks import BlockAllocator, BlockTable
from numflow.engine.schedule.scheduler import Limits
from numflow.engine.schedule.sequence import Group, Lane, Plan
from numflow.engine.schedule.swap_space import Parking
from tests.engine.machine import SIZE, Machine


def run(machine, token=7):
    """A step, after which every lane with rows has one more token."""
    plan = machine.step()
    for span in plan.spans:
        machine.scheduler.ran(span)
    for span in plan.spans:
        if span.rows:
            span.lane.ids.append(token)
    return plan


def test_a_copy_for_a_preempted_fork_is_not_made_into_a_block_that_is_loaded():
    """Two lanes of one request share a block that one of them has to copy; then a request of higher priority takes
    all but one block, and into that one, which the copy was to go to, a third request comes back in the same step:
    it fits now, as its drafts, which had taken a block, are gone."""
    machine = Machine(Limits(), blocks=5, prefix=False)
    drafting, forked = Group([1, 2, 3], 8), Group([4, 5, 6, 4, 5], 8, width=2)
    machine.scheduler.add(drafting)
    machine.scheduler.add(forked)
    plan = machine.step()
    for span in plan.spans:
        machine.scheduler.ran(span)
    machine.scheduler.fork(forked.lanes[0])
    for number, lane in enumerate([*drafting.lanes, *forked.lanes]):
        lane.ids.append(10 + number)
    drafting.lanes[0].drafts = [11]
    urgent = Group([8] * 16, 16, priority=1)
    machine.scheduler.add(urgent)
    plan = machine.step()  # every token finds before it what it must
    assert machine.scheduler.running == [urgent, drafting]
    assert machine.scheduler.waiting == [forked]
    (_, loaded), = plan.loads
    assert plan.copies == [] and loaded == 4
    for span in plan.spans:
        machine.scheduler.ran(span)
    machine.scheduler.remove(urgent)
    machine.scheduler.remove(drafting)
    machine.step()
    assert machine.scheduler.running == [forked]


def test_what_was_parked_is_forgotten_with_the_memory():
    """It may be that it was never saved: nothing of it is loaded, and its blocks in the host's memory are free."""
    machine = Machine(Limits(lanes=1), prefix=False)
    low, high = Group([1, 2, 3, 4, 5, 6], 12), Group([9], 12, priority=1)
    machine.scheduler.add(low)
    run(machine)
    machine.scheduler.add(high)
    plan = machine.scheduler.plan()  # which is lost before it is carried out
    assert len(plan.saves) == 2 and machine.scheduler.parking.host.used == 2
    machine.scheduler.lost()
    assert machine.scheduler.parking.host.used == 0 and not low.parked
    machine.memory.clear()
    assert run(machine).loads == []
    machine.scheduler.remove(high)
    plan = run(machine)
    assert plan.loads == [] and [(span.lane, span.start, span.count) for span in plan.spans] == [(low.lanes[0], 0, 7)]


def _lane(blocks, tokens):
    group = Group([0] * tokens, tokens)
    lane = Lane(group, [0] * tokens, BlockTable(blocks, SIZE))
    lane.table.extend(tokens)
    lane.length = tokens
    group.lanes.append(lane)
    return group


def test_a_block_that_is_loaded_is_not_saved_over_in_the_same_step():
    """Saves are made before loads: a block of the host is free when the plan that loads it has been carried out."""
    blocks, parking = BlockAllocator(8), Parking(BlockAllocator(limit=2), SIZE)
    first, second = _lane(blocks, 8), _lane(blocks, 8)
    assert parking.park(first, Plan(), {})
    first.lanes[0].table.release()
    plan = Plan()
    parking.fetch(first, blocks, plan)
    assert not parking.park(second, plan, {}) and plan.saves == []
    assert parking.host.used == 2
    parking.settle()
    later = Plan()
    assert parking.host.used == 0 and parking.park(second, later, {}) and len(later.saves) == 2


def test_blocks_of_the_host_that_a_plan_loads_and_saves_are_different_ones():
    blocks, parking = BlockAllocator(8), Parking(BlockAllocator(limit=4), SIZE)
    first, second = _lane(blocks, 8), _lane(blocks, 8)
    parking.park(first, Plan(), {})
    first.lanes[0].table.release()
    plan = Plan()
    parking.fetch(first, blocks, plan)
    assert parking.park(second, plan, {})
    assert not {host for host, _ in plan.loads} & {host for _, host in plan.saves}
