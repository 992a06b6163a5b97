"""The scheduler on integers alone: random schedules, and what must hold at every step."""

import random
from collections import Counter

import pytest

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.scheduler import Limits
from numflow.engine.schedule.sequence import Group
from numflow.errors import RequestError
from tests.engine.machine import SIZE, Machine, following

SCHEDULES = 10_000


class Request:
    """Samples that end after `new` tokens each. drafting: chance that a proposal is right, None for no proposals."""

    def __init__(self, prompt, new, samples=1, drafting=None, **options):
        self.new, self.samples, self.drafting = new, samples, drafting
        self.group = Group(prompt, len(prompt) + new, samples, **options)
        self.texts, self.lanes, self.over = {}, {}, False

    def propose(self, rng):
        for lane in self.group.lanes if self.drafting is not None and self.group.running else ():
            tokens = list(lane.ids)
            for _ in range(min(rng.randrange(4), self.group.limit - 1 - len(tokens)) if self.lanes else 0):
                tokens.append(following(tokens) if rng.random() < self.drafting else 9)
            lane.drafts = tokens[len(lane.ids):]

    def advance(self, lane, drafts, scheduler):
        """A lane's rows have come: pick what follows, as long as the drafts agree."""
        if not self.lanes:
            for index in range(self.samples):
                self.lanes[lane if index == 0 else scheduler.fork(lane)] = index
            for index, own in enumerate(list(self.lanes)):
                own.ids.append(100 + index)  # samples part at once
        else:
            picked = 0
            for draft in [*drafts, None]:
                lane.ids.append(following(lane.ids))
                picked += 1
                if lane.ids[-1] != draft or len(lane.ids) == self.group.limit:
                    break
            if drafts and len(lane.ids) < self.group.limit:
                scheduler.accept(lane, picked - 1)
        for own in list(self.lanes):
            if len(own.ids) == self.group.limit:
                self.texts[self.lanes.pop(own)] = own.ids
                scheduler.drop(own)
        self.over = not self.lanes

    def expected(self, index):
        ids = [*self.group.prompt, 100 + index]
        while len(ids) < self.group.limit:
            ids.append(following(ids))
        return ids


def random_request(rng, encoders):
    prompt = [0] * rng.choice((0, 4, 9)) + [rng.randrange(3) for _ in range(rng.randint(1, 11))]
    return Request(prompt, rng.randint(1, 9), rng.choice((1, 1, 1, 2, 3)), rng.choice((None, None, 0.5, 1.0)),
                   priority=rng.choice((0, 0, 0, 1, 2)),
                   encoder=rng.randint(1, 9) if encoders else 0, root=rng.choice((0, "other")))


def check(machine):
    """Every block is held as often as tables name it; nothing is held that no table names."""
    scheduler = machine.scheduler
    groups = [*scheduler.running, *scheduler.waiting]
    lanes = [lane for group in groups for lane in group.lanes]
    for number, (pool, parking) in enumerate(zip(scheduler.pools, scheduler.parkings, strict=True)):
        tables = [lane.tables[number] for lane in lanes]
        assert Counter(block for table in tables for block in table.held) == pool.allocator._holders
        leaving = [block for blocks in parking._leaving for block in blocks]
        assert Counter([*(block for table in tables for block in table.parked), *leaving]) == parking.host._holders
        assert GONE not in [block for table in tables for block in table.held]
    assert Counter(block for group in groups for block in group.cross.blocks) == scheduler.cross._holders
    for allocator in (*(pool.allocator for pool in scheduler.pools), scheduler.cross):
        assert allocator.used + allocator.free == allocator.capacity
        assert allocator.limit is None or allocator.capacity <= allocator.limit
    if (common := scheduler.blocks.common) is not None:
        assert sum(pool.size * pool.allocator.capacity for pool in scheduler.pools) <= common.nbytes
    assert scheduler.lanes <= scheduler.limits.lanes or len(scheduler.running) == 1


def run_schedule(seed, cancel_at=None, windows=(0,)):
    """One random schedule to its end; returns the steps it took and what happened."""
    rng = random.Random(seed)
    limits = Limits(rng.choice((1, 2, 4, 8)), rng.choice((3, 8, 32)), rng.choice((2, 5, 32)), rng.choice((4, 16)),
                    batching=rng.choice(("dynamic", "dynamic", "static")),
                    preemption=rng.choice(("swap", "recompute")))
    encoders = rng.random() < 0.2
    coming = [random_request(rng, encoders) for _ in range(rng.randint(1, 7))]
    most = max(max(r.samples * -(-r.group.limit // SIZE), 3) for r in coming) + (3 if encoders else 0)
    machine = Machine(limits, rng.choice((None, most, most + 3)), rng.random() < 0.7, rng.choice((None, 0, 5)),
                      windows)
    scheduler, here, steps = machine.scheduler, [], 0
    tokens = sum(len(r.group.prompt) + r.samples * r.new for r in coming)
    while coming or here:
        while coming and rng.random() < 0.5:
            request = coming.pop()
            scheduler.check(request.group)
            scheduler.add(request.group)
            here.append(request)
        for request in here:
            request.propose(rng)
        if (cancel_at is None and here and rng.random() < 0.02) or (steps == cancel_at and here):
            victim = here.pop(rng.randrange(len(here)))
            scheduler.remove(victim.group)
        steps += 1
        plan = machine.step()
        assert plan or not scheduler.busy, "requests wait and nothing runs"
        assert not plan.refused
        rows = sum(span.count for span in plan.spans)
        assert rows <= max(limits.tokens, scheduler.lanes) + 1  # what generates always runs, and one token of a prompt
        by_group = {request.group: request for request in here}
        for span in plan.spans:
            scheduler.ran(span)
        for span in plan.spans:
            if span.rows:
                by_group[span.lane.group].advance(span.lane, span.drafts, scheduler)
        for request in [request for request in here if request.over]:
            assert all(request.texts[index] == request.expected(index) for index in range(request.samples))
            scheduler.remove(request.group)
            here.remove(request)
        check(machine)
        assert steps < 60 + 40 * tokens, "somebody starves"
    for pool, parking in zip(scheduler.pools, scheduler.parkings, strict=True):
        parking.settle()
        assert pool.allocator.used == parking.host.used == 0
    assert scheduler.cross.used == 0
    return steps, scheduler.counts


@pytest.mark.parametrize("part", range(10))
def test_random_schedules_end_and_leak_nothing(part):
    totals = Counter()
    for seed in range(part * SCHEDULES // 10, (part + 1) * SCHEDULES // 10):
        try:
            totals.update(run_schedule(seed)[1])
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    assert min(totals["preemptions"], totals["swaps"], totals["prefix_tokens"]) > 40  # they have been tried


@pytest.mark.parametrize("windows", [(0, 5), (0, 1, 9), (4,), (7, 12)])
def test_random_schedules_with_windows_end_and_leak_nothing(windows):
    totals = Counter()
    for seed in range(1000):
        try:
            totals.update(run_schedule(seed, windows=windows)[1])
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    assert min(totals["preemptions"], totals["swaps"], totals["prefix_tokens"]) > 40


@pytest.mark.parametrize("seed", range(12))
def test_a_request_may_end_at_every_moment(seed):
    steps, _ = run_schedule(seed, cancel_at=-1)
    for moment in range(steps):
        run_schedule(seed, cancel_at=moment)


def add(machine, *groups):
    for group in groups:
        machine.scheduler.add(group)
    return groups


def test_prompts_are_cut_and_mixed_with_decoding():
    machine = Machine(Limits(4, tokens=6, chunk=6), prefix=False)
    first, = add(machine, Group([1, 2], 20))
    machine.scheduler.ran(machine.step().spans[0])
    first.lanes[0].ids.append(3)
    add(machine, Group(list(range(12)), 20))
    for sizes in ([1, 5], [1, 5], [1, 2]):
        plan = machine.step()
        assert [span.count for span in plan.spans] == sizes
        for span in plan.spans:
            machine.scheduler.ran(span)
        assert list(plan.spans[1].rows) == ([1] if sizes == [1, 2] else [])
        first.lanes[0].ids.append(3)


def test_priority_goes_first_and_takes_the_place_of_others():
    machine = Machine(Limits(lanes=2))
    low = add(machine, *(Group([i, i, i], 8, priority=0) for i in range(3)))
    for span in machine.step().spans:
        machine.scheduler.ran(span)
        span.lane.ids.append(7)
    assert machine.scheduler.running == [low[0], low[1]]
    high, = add(machine, Group([5], 8, priority=1))
    plan = machine.step()
    assert machine.scheduler.running == [high, low[0]]
    assert machine.scheduler.waiting == [low[1], low[2]]
    assert len(plan.saves) == 1
    machine.scheduler.remove(high)
    plan = machine.step()
    assert machine.scheduler.running == [low[0], low[1]]
    assert len(plan.loads) == 1


def test_static_batches_wait_for_their_last_member():
    machine = Machine(Limits(lanes=2, batching="static"))
    a, b, c = add(machine, *(Group([i], 8) for i in range(3)))
    machine.step()
    machine.scheduler.remove(a)
    machine.step()
    assert (machine.scheduler.running, machine.scheduler.waiting) == ([b], [c])
    machine.scheduler.remove(b)
    machine.step()
    assert machine.scheduler.running == [c]


def test_known_beginnings_are_not_run_again():
    machine = Machine(Limits())
    prompt = list(range(10))
    for expected, ids in ((10, prompt), (2, prompt), (6, [*prompt[:5], 50, 51, 52, 53, 54]), (8, [9, *prompt[:7]])):
        group, = add(machine, Group(ids, 20))
        span, = machine.step().spans
        assert span.count == expected
        machine.scheduler.ran(span)
        machine.scheduler.remove(group)
    assert machine.scheduler.counts["prefix_tokens"] == 8 + 4
    elsewhere, = add(machine, Group(prompt, 20, root="another encoder text"))
    assert machine.step().spans[0].count == 10
    machine.scheduler.remove(elsewhere)


@pytest.mark.parametrize("tokens", [8, 11, 100])
def test_requests_that_come_together_run_what_they_share_once(tokens):
    machine = Machine(Limits(tokens=tokens, chunk=tokens))
    prompt = list(range(22))
    add(machine, *(Group([*prompt, number], 30) for number in range(5)), Group([99] * 5, 30))
    counts = []
    while machine.scheduler.busy:
        plan = machine.step()
        counts += [span.count for span in plan.spans]
        for span in plan.spans:
            machine.scheduler.ran(span)
            if span.rows:
                machine.scheduler.remove(span.lane.group)
    assert sum(counts) == 23 + 4 * 3 + 5


def test_the_least_recently_used_is_forgotten_first():
    machine = Machine(Limits(), blocks=6)
    texts = [[i] * 9 for i in range(3)]
    for ids in texts:  # two full blocks each, and a third one
        group, = add(machine, Group(ids, 9))
        machine.scheduler.ran(machine.step().spans[0])
        machine.scheduler.remove(group)
    counts = []
    for ids in (texts[2], texts[1], texts[0]):
        group, = add(machine, Group(ids, 9))
        counts.append(machine.step().spans[0].count)
        machine.scheduler.remove(group)
    assert counts == [1, 1, 9] or counts == [1, 1, 5]


def test_what_can_never_fit_is_refused():
    machine = Machine(Limits(), blocks=4)
    machine.scheduler.check(Group([1], 16))
    for group in (Group([1], 17), Group([1], 9, width=2), Group([1], 4, encoder=17)):
        with pytest.raises(RequestError, match="KV blocks of 4 tokens may be needed, and the memory"):
            machine.scheduler.check(group)
    group, = add(machine, Group([1] * 20, 24))
    plan = machine.scheduler.plan()
    assert plan.refused == [(group, 20)]
    assert machine.scheduler.plan().spans == []


@pytest.mark.parametrize(("options", "message"), [
    ({"lanes": 0}, "lanes should be"), ({"tokens": 1.5}, "tokens should be"),
    ({"batching": "dynamik"}, "no batching 'dynamik'; did you mean 'dynamic'"),
    ({"preemption": "drop"}, "no preemption 'drop'")])
def test_bad_limits(options, message):
    with pytest.raises(RequestError, match=message):
        Limits(**options)
