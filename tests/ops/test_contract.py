"""The contract of a Program (docs/architecture.md): one suite for all implementations. Ray's actors are replaced by
threads of this process, the GPU by its simulator."""

import ast
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from numflow.cpu.program import Program as CpuProgram
from numflow.cuda.program import Program as CudaProgram
from numflow.decoding.choice import Choice
from numflow.decoding.sampler import Sampler
from numflow.decoding.settings import Sampling
from numflow.errors import NumflowError, RequestError
from numflow.executor import contract
from numflow.executor.contract import ADAPT, DECODE, PROFILE, SAMPLE, TRACE, WALK
from numflow.network import WeightSource
from numflow.network.passes.merge_linears import fuse_linears
from numflow.network.windows import STATE, windows
from numflow.ops import Batch
from numflow.partition.cluster import program as cluster
from numflow.partition.cut.cut import partition
from numflow.partition.run.program import PlanProgram
from numflow.reference.program import Program as Reference
from tests.conftest import REPO
from tests.ops.actors import StandInRay
from tests.partition.plans import error, executor, model_of

PACKAGE = REPO / "numflow"
SIZE, BLOCKS = 64, 6
EXACT = {"activations": "f32", "block_size": SIZE}
PROGRAMS = ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.slow), "plan", "ray"]
CAN = {"reference": {TRACE, WALK, ADAPT}, "cpu": {TRACE, WALK, PROFILE, DECODE, ADAPT},
       "cuda": {TRACE, SAMPLE, DECODE, ADAPT},
       "plan": {TRACE, ADAPT}, "ray": set()}


class Sources:
    """Weight sources of the devices' networks, as passed to actors."""

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def __call__(self, network):
        return WeightSource(network, self.checkpoint)


def made(kind, name, monkeypatch):
    """A program of a family's tiny model, with keys and values of float32."""
    built, checkpoint, _ = model_of(name)
    whole = fuse_linears(built)
    if kind == "reference":
        return Reference(whole, WeightSource(whole, checkpoint), block_size=SIZE)
    if kind == "cpu":
        return CpuProgram(whole, WeightSource(whole, checkpoint), threads=2, **EXACT)
    if kind == "cuda":
        return CudaProgram(whole, WeightSource(whole, checkpoint), gpu="simulator", **EXACT)
    plan = partition(built, "0&1;2", "cpu")
    if kind == "plan":
        return PlanProgram(plan, executor("cpu"), Sources(checkpoint), threads=1, **EXACT)
    monkeypatch.setattr(cluster, "connected", StandInRay)
    return cluster.RayProgram(plan, {"cpu": "numflow.cpu.program"}, Sources(checkpoint), threads=1, **EXACT)


@pytest.fixture(params=PROGRAMS)
def kind(request):
    return request.param


@pytest.fixture
def program(kind, monkeypatch):
    with closing(made(kind, "qwen3", monkeypatch)) as program:
        yield program


@contextmanager
def closing(program):
    try:
        yield program
    finally:
        program.close()


def batch(ids, start=0, blocks=(0, 1), rows=None):
    """Tokens of one sequence, in these blocks, from position `start` on; the last row is wanted by default."""
    count = len(ids)
    return Batch(np.array(ids, np.int32), np.arange(start, start + count, dtype=np.int32),
                 np.array([0, count], np.int32), np.array([blocks], np.int32),
                 np.array([count - 1] if rows is None else rows, np.int32))


def following(tokens, start):
    """One token of a sequence of up to 300 tokens."""
    return replace(batch(tokens, start), limits=np.array([300], np.int32))


def text(count, seed=3):
    return np.random.default_rng(seed).integers(0, 50, count).tolist()


@pytest.fixture(scope="module")
def expected():
    """Logits of the last of five tokens, and of the next token."""
    built, checkpoint, _ = model_of("qwen3")
    whole = fuse_linears(built)
    with closing(Reference(whole, WeightSource(whole, checkpoint), block_size=SIZE)) as program:
        program.reserve(BLOCKS)
        return program.run(batch(text(5))), program.run(batch([7], 5))


def test_what_a_program_says_of_itself(program, kind):
    assert program.block_size == SIZE and program.activations == "f32" and program.failure == ""
    assert program.threads == {"reference": None, "cpu": 2, "cuda": None, "plan": 3, "ray": 3}[kind]
    assert contract.Program in type(program).__mro__ and program.can == CAN[kind] and program.compile_s >= 0
    assert "main" in program.network.entries
    assert program.weights_bytes >= 4 * 50 * 16
    assert program.kv_bytes == 0
    program.reserve(BLOCKS)
    assert program.kv_bytes == BLOCKS * program.block_bytes > 0
    program.reserve(2)
    assert program.kv_bytes == 2 * program.block_bytes
    assert program.window_bytes == {0: program.block_bytes} and program.cross_block_bytes == 0


def test_runs_give_the_numbers_of_the_reference(program, expected):
    program.reserve(BLOCKS)
    for start, ids, logits in ((0, text(5), expected[0]), (5, [7], expected[1])):
        found = program.run(batch(ids, start))
        assert found.dtype == np.float32 and error(found, logits) < 1e-4
        kept = found.copy()
        program.run(batch([1], 0, (2, 3)))
        np.testing.assert_array_equal(found, kept)  # a copy
    assert program.run(batch(text(4), 0, (2, 3)), output=None) is None
    assert program.run(batch(text(4), 0, (2, 3)), wanted=False) is None
    assert program.run(batch(text(4), 0, (2, 3), rows=[0, 3]), output="hidden").shape[0] == 2


def test_a_long_batch_makes_it_grow(program):
    """More rows than the initial capacity, then the same number as before."""
    program.reserve(BLOCKS)
    short = program.run(batch(text(5)))
    assert program.run(batch(text(12), rows=range(12))).shape[0] == 12
    np.testing.assert_array_equal(program.run(batch(text(5))), short)


def test_what_there_is_not(program):
    program.reserve(BLOCKS)
    before = program.run(batch(text(5)))
    for options, message in (({"entry": "mian"}, "has no entry 'mian'; did you mean 'main'?"),
                             ({"output": "logit"}, "has no 'logit'; did you mean 'logits'?")):
        with pytest.raises(RequestError) as found:
            program.run(batch(text(5)), **options)
        assert str(found.value) == f"{program.network.name} {message}"
    np.testing.assert_array_equal(program.run(batch(text(5))), before)


WRONG = [
    (batch([10**6]), r"token id 1000000 is out of range: it should be in 0 \.\. \d+"),
    (batch([1], blocks=(BLOCKS, 1)), rf"KV block {BLOCKS} is out of range: it should be in 0 \.\. {BLOCKS - 1}"),
    (batch([1], rows=[1]), r"logit row 1 is out of range: it should be in 0 \.\. 0"),
    (replace(batch([1]), positions=np.zeros(2, np.int32)), "a batch of 1 tokens has 2 positions and 1 types"),
]


def test_wrong_batches_hurt_nothing(program):
    program.reserve(BLOCKS)
    before = program.run(batch(text(5)))
    for wrong, message in WRONG:
        with pytest.raises(RequestError, match=message):
            program.run(wrong)
    np.testing.assert_array_equal(program.run(batch(text(5))), before)


def test_blocks_that_are_not_there(program):
    program.reserve(BLOCKS)
    for block in (BLOCKS, -1):
        message = rf"KV block {block} is out of range: it should be in 0 \.\. {BLOCKS - 1}"
        with pytest.raises(RequestError, match=message):
            program.save_blocks([block])
        with pytest.raises(RequestError, match=message):
            program.copy_blocks([0], [block])
        with pytest.raises(RequestError, match=message):
            program.load_blocks([block], np.zeros((1, program.block_bytes), np.uint8))
    with pytest.raises(RequestError, match="2 blocks cannot be copied to 1"):
        program.copy_blocks([0, 1], [2])


def test_a_text_goes_on_in_other_blocks(program):
    program.reserve(BLOCKS)
    program.run(batch(text(5)))
    follow = program.run(batch([7], 5))
    program.run(batch(text(5)))
    program.copy_blocks([0, 1], [2, 3])
    saved = program.save_blocks([0, 1])
    assert saved.dtype == np.uint8 and saved.shape == (2, program.block_bytes) and saved.any()
    np.testing.assert_array_equal(program.run(batch([7], 5, (2, 3))), follow)
    program.load_blocks([0], np.zeros((1, program.block_bytes), np.uint8))
    assert not program.save_blocks([0]).any()
    program.reserve(BLOCKS + 2)
    program.load_blocks([BLOCKS + 1, 4], saved)
    np.testing.assert_array_equal(program.run(batch([7], 5, (BLOCKS + 1, 4))), follow)
    assert program.save_blocks([]).shape == (0, program.block_bytes)
    program.copy_blocks([], [])


def test_layers_with_windows_have_blocks_of_their_own(kind, monkeypatch):
    with closing(made(kind, "gemma3", monkeypatch)) as program:
        (_, window), size = windows(program.network), program.window_bytes
        assert program.block_bytes == sum(size.values()) and set(size) == {0, window}
        program.reserve(BLOCKS, 0, {window: 2})
        assert program.kv_bytes == BLOCKS * size[0] + 2 * size[window]
        rest = program.save_blocks(range(BLOCKS), 0)
        data = np.random.default_rng(0).integers(0, 50, (1, size[window]), dtype=np.uint8)
        program.load_blocks([0], data, window)
        program.copy_blocks([0], [1], window)
        np.testing.assert_array_equal(program.save_blocks([1], window), data)
        np.testing.assert_array_equal(program.save_blocks(range(BLOCKS), 0), rest)


def test_states_lie_in_slots(kind, monkeypatch):
    with closing(made(kind, "lfm2", monkeypatch)) as program:
        sizes = program.window_bytes
        program.reserve(BLOCKS, 0, {STATE: 3})
        assert set(sizes) == {0, STATE} and program.block_bytes == sizes[0]
        assert program.kv_bytes == BLOCKS * sizes[0] + 3 * sizes[STATE]

        def run(ids, start, slot):
            return program.run(replace(batch(ids, start), slots=np.array([slot])))

        run(text(5), 0, 2)
        saved = program.save_blocks([2], STATE)
        assert saved.shape == (1, sizes[STATE]) and saved.any()
        program.copy_blocks([2], [0], STATE)
        follow = run([7], 5, 2)
        np.testing.assert_array_equal(run([7], 5, 0), follow)
        program.reserve(BLOCKS, 0, {STATE: 5})
        program.load_blocks([4], saved, STATE)
        np.testing.assert_array_equal(run([7], 5, 4), follow)
        assert not np.array_equal(run([7], 5, 4), follow)  # the state has changed
        with pytest.raises(RequestError, match=r"state slot 5 is out of range: it should be in 0 \.\. 4"):
            run([7], 5, 5)


def test_tokens_are_picked_where_a_program_can(program, expected):
    program.reserve(BLOCKS)
    if SAMPLE not in program.can:
        with pytest.raises(RequestError, match="this backend does not pick tokens"):
            program.sample(batch(text(5)), [Choice()])
        return
    rows = program.run(batch(text(5), rows=range(5)))
    ids = program.sample(batch(text(5), rows=range(5)), [Choice()] * 5)
    assert ids.dtype == np.int32 and ids.tolist() == rows.argmax(1).tolist()


def test_several_steps_take_the_likeliest_tokens(program):
    program.reserve(BLOCKS)
    program.run(batch(text(5)))
    if DECODE not in program.can:
        with pytest.raises(RequestError, match="this backend runs one step at a time"):
            program.decode(following([7], 5), 2)
        return
    wanted, token = [], 7
    for at in range(5):
        token = int(program.run(batch([token], 5 + at)).argmax())
        wanted.append(token)
    several = following([7], 5)
    assert program.decode(several, 3).tolist() == [[token] for token in wanted[:3]]
    assert several.positions.tolist() == [7]
    several.go_on(wanted[2:3])
    assert program.decode(several, 2).tolist() == [[token] for token in wanted[3:]]
    for bad, steps in ((following([7], 60), 5), (batch([7, 8], 5), 2), (batch([7], 5), 2), (following([7], 5), 0),
                       (following([7], 5), 9)):
        with pytest.raises(RequestError, match=r"end within the KV blocks|one token for each sequence|be 1 to 8"):
            program.decode(bad, steps)


def test_several_steps_draw_what_the_sampler_draws(program):
    program.reserve(BLOCKS)
    program.run(batch(text(5)))
    if DECODE not in program.can:
        with pytest.raises(RequestError, match="this backend runs one step at a time"):
            program.decode(following([7], 5), 2, [Choice()])
        return
    sampler = Sampler(Sampling(temperature=1.5, top_p=0.95, seed=4))
    choice, wanted, token = sampler.choice(steps=4), [], 7
    for at in range(4):
        token = sampler.pick(program.run(batch([token], 5 + at))[0])
        wanted.append([token])
    assert program.decode(following([7], 5), 4, [choice]).tolist() == wanted
    assert len(choice.later) == 3 and len({token for token, in wanted}) > 1
    for bad, steps in (([choice] * 2, 3), ([choice], 5), ([], 1)):
        with pytest.raises(RequestError, match=r"1 rows cannot be picked from|5 steps at once need as many"):
            program.decode(following([7], 5), steps, bad)


def test_a_batch_that_goes_on_is_checked_and_gives_the_same(program):
    program.reserve(BLOCKS)
    wanted = []
    for at in range(60, 70):  # across a block boundary
        wanted.append(program.run(following([at % 50], at)))
    going = following([10], 60)
    found = [program.run(going)]
    for at in range(61, 70):
        going.go_on([at % 50])
        found.append(program.run(going))
    np.testing.assert_array_equal(found, wanted)
    going.go_on([10**6])
    with pytest.raises(RequestError, match="token id 1000000 is out of range"):
        program.run(going)
    program.reserve(1)
    with pytest.raises(RequestError, match="KV block 1 is out of range"):
        going.go_on([3])
        program.run(going)


def test_a_profile_knows_what_a_weight_costs(program):
    name = next(iter(program.network.weights))
    if PROFILE not in program.can:
        with pytest.raises(RequestError, match="this backend has no profile"):
            program.weight_bytes(name)
        with pytest.raises(RequestError, match="this backend has no profile"):
            program.groups()
        return
    assert program.weight_bytes(name) > 0
    steps = program.network.entries["main"]
    assert {program.arithmetic(step) for step in steps} == {"f32"}
    for group in program.groups():
        assert group.at in group.steps and group.steps == tuple(sorted(set(group.steps)))
        assert group.pattern == "+".join(steps[i].op for i in group.steps)


def test_a_trace_has_a_row_for_every_step(program):
    program.reserve(BLOCKS)
    if TRACE not in program.can:
        with pytest.raises(NumflowError, match="a trace shows the devices of one machine"):
            program.trace(batch(text(4)))
        return
    rows = program.trace(batch(text(4)))
    assert [row.index for row in rows] == list(range(len(rows)))
    assert all((".py:" in row.kernel or row.kernel == "-") and row.microseconds >= 0 for row in rows)
    ops = {row.op for row in rows}
    assert ops >= {step.op for step in program.network.entries["main"]}
    assert any(".py:" in row.kernel for row in rows)
    assert next(row for row in rows if row.op == "linear").shapes.startswith("[4, ")


def test_a_closed_program_says_so(program):
    program.reserve(BLOCKS)
    program.close()
    program.close()
    with pytest.raises(NumflowError, match="this program was closed"):
        program.run(batch(text(4)))


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
def test_devices_meet_in_a_world(backend):
    world = executor(backend).World({0: model_of("qwen3")[0]}, 1)
    try:
        assert isinstance(world, contract.World)
    finally:
        world.close()


ASKS = {"getattr", "hasattr", "isinstance"}
DISPATCHERS = {"partition/run/workers.py", "partition/cluster/stage.py"}  # commands by name, for remote devices


def questions(source):
    """Lines that test the type of an object named program (or its classes) instead of using the contract."""
    def names(node):
        return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | \
            {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name) and node.func.id in ASKS
            and any("program" in name.lower() for arg in node.args[:1] for name in names(arg))]


def test_nobody_asks_a_program_what_it_is():
    found = {path.relative_to(PACKAGE).as_posix(): questions(path.read_text(encoding="utf-8"))
             for path in sorted(PACKAGE.rglob("*.py"))}
    asking = {name for name, lines in found.items() if lines and not name.startswith("executor/")}
    assert asking == DISPATCHERS


def test_the_check_finds_what_it_should():
    assert questions("def f(program):\n    return hasattr(program, 'x') or program.can\n") == [2]
    assert questions("getattr(model.program, 'x', 1)\nisinstance(self._world.program(0), int)") == [1, 2]
    assert questions("getattr(model, 'program')\nhasattr(os, 'x')\nprogram.run(getattr(batch, 'x'))") == []
