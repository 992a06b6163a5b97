"""The scheduler without a model: random schedules, and invariants at every step."""

import random
from collections import Counter

import pytest

from numflow.engine.schedule.blocks import GONE
from numflow.engine.schedule.scheduler import StepLimits
from numflow.engine.schedule.sequence import SequenceGroup
from numflow.errors import RequestError
from numflow.network.windows import STATE
from tests.engine.machine import SIZE, Machine, following

SCHEDULES = 10_000


class Request:
    """A request whose samples end after `new` tokens. drafting: acceptance rate of drafts, None: no drafts."""

    def __init__(self, prompt, new, samples=1, drafting=None, **options):
        self.new, self.samples, self.drafting = new, samples, drafting
        self.group = SequenceGroup(prompt, len(prompt) + new, samples, **options)
        self.texts, self.sequences, self.over = {}, {}, False

    def propose(self, rng):
        for sequence in self.group.sequences if self.drafting is not None and self.group.running else ():
            tokens = list(sequence.ids)
            for _ in range(min(rng.randrange(4), self.group.limit - 1 - len(tokens)) if self.sequences else 0):
                tokens.append(following(tokens) if rng.random() < self.drafting else 9)
            sequence.drafts = tokens[len(sequence.ids):]

    def advance(self, sequence, drafts, scheduler):
        """Take a sequence's rows: pick the next tokens as long as the drafts agree."""
        if not self.sequences:
            for index in range(self.samples):
                self.sequences[sequence if index == 0 else scheduler.fork(sequence)] = index
            for index, own in enumerate(list(self.sequences)):
                own.ids.append(100 + index)  # samples part at once
        else:
            picked = 0
            for draft in [*drafts, None]:
                sequence.ids.append(following(sequence.ids))
                picked += 1
                if sequence.ids[-1] != draft or len(sequence.ids) == self.group.limit:
                    break
            if drafts and len(sequence.ids) < self.group.limit:
                scheduler.accept(sequence, picked - 1)
        for own in list(self.sequences):
            if len(own.ids) == self.group.limit:
                self.texts[self.sequences.pop(own)] = own.ids
                scheduler.drop(own)
        self.over = not self.sequences

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
    """Reference counts equal the number of table entries of every block."""
    scheduler = machine.scheduler
    groups = [*scheduler.running, *scheduler.waiting]
    sequences = [sequence for group in groups for sequence in group.sequences]
    for number, (pool, swap_space) in enumerate(zip(scheduler.pools, scheduler.swap_spaces, strict=True)):
        tables = [sequence.tables[number] for sequence in sequences]
        tried = [slot for table in tables if pool.window == STATE for slot in table.saved]
        assert Counter([*(block for table in tables for block in table.held), *tried]) == pool.allocator._holders
        leaving = [block for blocks in swap_space._releasing for block in blocks]
        assert Counter([*(block for table in tables for block in table.swapped), *leaving]) == swap_space.host._holders
        assert GONE not in [block for table in tables for block in table.held]
    assert Counter(block for group in groups for block in group.cross.blocks) == scheduler.cross._holders
    for allocator in (*(pool.allocator for pool in scheduler.pools), scheduler.cross):
        assert allocator.used + allocator.free == allocator.capacity
        assert allocator.limit is None or allocator.capacity <= allocator.limit
    if (budget := scheduler.blocks.budget) is not None:
        assert sum(pool.size * pool.allocator.capacity for pool in scheduler.pools) <= budget.nbytes
    assert scheduler.sequences <= scheduler.limits.sequences or len(scheduler.running) == 1


def run_schedule(seed, cancel_at=None, windows=(0,)):
    """One random schedule to its end; returns the steps it took and what happened."""
    rng = random.Random(seed)
    limits = StepLimits(rng.choice((1, 2, 4, 8)), rng.choice((3, 8, 32)), rng.choice((2, 5, 32)), rng.choice((4, 16)),
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
        rows = sum(chunk.count for chunk in plan.chunks)
        assert rows <= max(limits.tokens, scheduler.sequences) + 1  # what generates, and one token of a prompt
        by_group = {request.group: request for request in here}
        for chunk in plan.chunks:
            scheduler.ran(chunk)
        for chunk in plan.chunks:
            if chunk.rows:
                by_group[chunk.sequence.group].advance(chunk.sequence, chunk.drafts, scheduler)
        for request in [request for request in here if request.over]:
            assert all(request.texts[index] == request.expected(index) for index in range(request.samples))
            scheduler.remove(request.group)
            here.remove(request)
        check(machine)
        assert steps < 60 + 40 * tokens, "somebody starves"
    for pool, swap_space in zip(scheduler.pools, scheduler.swap_spaces, strict=True):
        swap_space.settle()
        assert pool.allocator.used == swap_space.host.used == 0
    assert scheduler.cross.used == 0
    return steps, scheduler.counts


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_schedules_end_and_leak_nothing(part):
    totals = Counter()
    for seed in range(part * SCHEDULES // 10, (part + 1) * SCHEDULES // 10):
        try:
            totals.update(run_schedule(seed)[1])
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    assert min(totals["preemptions"], totals["swaps"], totals["prefix_tokens"]) > 40  # they have been tried


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("windows", [(0, 5), (0, 1, 9), (4,), (7, 12), (0, STATE), (6, STATE)])
@pytest.mark.thin(3)
def test_random_schedules_with_windows_end_and_leak_nothing(windows, seeds):
    totals = Counter()
    for seed in seeds:
        try:
            totals.update(run_schedule(seed, windows=windows)[1])
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    assert min(totals["preemptions"], totals["swaps"], totals["prefix_tokens"]) > len(seeds) // 25


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.thin(3)
def test_a_request_may_end_at_every_moment(seed):
    steps, _ = run_schedule(seed, cancel_at=-1)
    for moment in range(steps):
        run_schedule(seed, cancel_at=moment)


def add(machine, *groups):
    for group in groups:
        machine.scheduler.add(group)
    return groups


def test_prompts_are_cut_and_mixed_with_decoding():
    machine = Machine(StepLimits(4, tokens=6, chunk=6), prefix=False)
    first, = add(machine, SequenceGroup([1, 2], 20))
    machine.scheduler.ran(machine.step().chunks[0])
    first.sequences[0].ids.append(3)
    add(machine, SequenceGroup(list(range(12)), 20))
    for sizes in ([1, 5], [1, 5], [1, 2]):
        plan = machine.step()
        assert [chunk.count for chunk in plan.chunks] == sizes
        for chunk in plan.chunks:
            machine.scheduler.ran(chunk)
        assert list(plan.chunks[1].rows) == ([1] if sizes == [1, 2] else [])
        first.sequences[0].ids.append(3)


def test_priority_goes_first_and_takes_the_place_of_others():
    machine = Machine(StepLimits(sequences=2))
    low = add(machine, *(SequenceGroup([i, i, i], 8, priority=0) for i in range(3)))
    for chunk in machine.step().chunks:
        machine.scheduler.ran(chunk)
        chunk.sequence.ids.append(7)
    assert machine.scheduler.running == [low[0], low[1]]
    high, = add(machine, SequenceGroup([5], 8, priority=1))
    plan = machine.step()
    assert machine.scheduler.running == [high, low[0]]
    assert machine.scheduler.waiting == [low[1], low[2]]
    assert len(plan.saves) == 1
    machine.scheduler.remove(high)
    plan = machine.step()
    assert machine.scheduler.running == [low[0], low[1]]
    assert len(plan.loads) == 1


def test_static_batches_wait_for_their_last_member():
    machine = Machine(StepLimits(sequences=2, batching="static"))
    a, b, c = add(machine, *(SequenceGroup([i], 8) for i in range(3)))
    machine.step()
    machine.scheduler.remove(a)
    machine.step()
    assert (machine.scheduler.running, machine.scheduler.waiting) == ([b], [c])
    machine.scheduler.remove(b)
    machine.step()
    assert machine.scheduler.running == [c]


def test_known_beginnings_are_not_run_again():
    machine = Machine(StepLimits())
    prompt = list(range(10))
    for expected, ids in ((10, prompt), (2, prompt), (6, [*prompt[:5], 50, 51, 52, 53, 54]), (8, [9, *prompt[:7]])):
        group, = add(machine, SequenceGroup(ids, 20))
        chunk, = machine.step().chunks
        assert chunk.count == expected
        machine.scheduler.ran(chunk)
        machine.scheduler.remove(group)
    assert machine.scheduler.counts["prefix_tokens"] == 8 + 4
    elsewhere, = add(machine, SequenceGroup(prompt, 20, root="another encoder text"))
    assert machine.step().chunks[0].count == 10
    machine.scheduler.remove(elsewhere)


@pytest.mark.parametrize("tokens", [8, 11, 100])
def test_requests_that_come_together_run_what_they_share_once(tokens):
    machine = Machine(StepLimits(tokens=tokens, chunk=tokens))
    prompt = list(range(22))
    add(machine, *(SequenceGroup([*prompt, number], 30) for number in range(5)), SequenceGroup([99] * 5, 30))
    counts = []
    while machine.scheduler.busy:
        plan = machine.step()
        counts += [chunk.count for chunk in plan.chunks]
        for chunk in plan.chunks:
            machine.scheduler.ran(chunk)
            if chunk.rows:
                machine.scheduler.remove(chunk.sequence.group)
    assert sum(counts) == 23 + 4 * 3 + 5


def test_the_least_recently_used_is_forgotten_first():
    machine = Machine(StepLimits(), blocks=6)
    texts = [[i] * 9 for i in range(3)]
    for ids in texts:  # two full blocks each, and a third one
        group, = add(machine, SequenceGroup(ids, 9))
        machine.scheduler.ran(machine.step().chunks[0])
        machine.scheduler.remove(group)
    counts = []
    for ids in (texts[2], texts[1], texts[0]):
        group, = add(machine, SequenceGroup(ids, 9))
        counts.append(machine.step().chunks[0].count)
        machine.scheduler.remove(group)
    assert counts == [1, 1, 9] or counts == [1, 1, 5]


def test_what_can_never_fit_is_refused():
    machine = Machine(StepLimits(), blocks=4)
    machine.scheduler.check(SequenceGroup([1], 16))
    for group in (SequenceGroup([1], 17), SequenceGroup([1], 9, width=2), SequenceGroup([1], 4, encoder=17)):
        with pytest.raises(RequestError, match="KV blocks of 4 tokens may be needed, and the memory"):
            machine.scheduler.check(group)
    group, = add(machine, SequenceGroup([1] * 20, 24))
    plan = machine.scheduler.plan()
    assert plan.refused == [(group, 20)]
    assert machine.scheduler.plan().chunks == []


@pytest.mark.parametrize(("options", "message"), [
    ({"sequences": 0}, "sequences should be"), ({"tokens": 1.5}, "tokens should be"),
    ({"batching": "dynamik"}, "no batching 'dynamik'; did you mean 'dynamic'"),
    ({"preemption": "drop"}, "no preemption 'drop'")])
def test_bad_limits(options, message):
    with pytest.raises(RequestError, match=message):
        StepLimits(**options)
