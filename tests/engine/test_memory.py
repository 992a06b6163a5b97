"""Memory plan: limit of the KV memory, and behaviour at the limit."""

import mmap

import numpy as np
import pytest

from numflow.cpu.memory.arena import Arena
from numflow.cpu.memory.buffers import aligned
from numflow.engine.engine import Engine
from numflow.engine.load import load
from numflow.engine.runner import kv_memory as memory
from numflow.engine.runner.kv_memory import FLOOR_BYTES, LEAST_LEFT, MemoryPlan, block_bytes, plan_memory
from numflow.errors import OutOfMemoryError, RequestError
from tests.engine.fake import fake_model
from tests.engine.tiny import write_checkpoint

GB = 10**9


class Program:
    weights_bytes, block_bytes, cross_block_bytes, block_size = 2 * GB, 1_000_000, 0, 16


@pytest.fixture
def machine(monkeypatch):
    """A machine of 16 GB, of which machine["free"] are free."""
    found = {"free": 10 * GB}
    monkeypatch.setattr(memory, "free_memory", lambda: found["free"])
    monkeypatch.setattr(memory, "whole_memory", lambda: 16 * GB)
    return found


def test_a_plan_leaves_the_machine_usable(machine):
    plan = plan_memory(Program, 11 * GB)
    assert (plan.free, plan.left, plan.most, plan.blocks) == (9 * GB, 1600 * 10**6, 7400 * 10**6, 7400)
    assert str(plan) == ("weights 2.0 GB; keys and values up to 7.4 GB (118,400 tokens, 62 kB a token); 9.0 GB are "
                         "free, of which 1.6 GB are left to others")
    machine["free"] = 3 * GB  # others have come
    assert plan_memory(Program, 11 * GB).most == 3 * GB - plan.left
    assert plan_memory(Program, GB).most == FLOOR_BYTES  # weights that are larger than memory still run
    assert plan_memory(Program, None).most is None


def test_little_machines_keep_something(machine, monkeypatch):
    monkeypatch.setattr(memory, "whole_memory", lambda: GB)
    assert plan_memory(Program, 11 * GB).left == LEAST_LEFT
    assert "left to others" not in str(MemoryPlan(GB, 10**6, 16))


def test_keys_and_values_grow_only_as_far(machine):
    plan = plan_memory(Program, 11 * GB)
    plan.check(100, 7000)
    plan.check(10**6, 0)
    with pytest.raises(OutOfMemoryError, match=r"no memory for 8.5 GB more .* left to others"):
        plan.check(100, 8500)
    machine["free"] = 0
    plan.check(0, FLOOR_BYTES // Program.block_bytes)
    with pytest.raises(OutOfMemoryError):
        plan.check(1000, 1)


def planned(blocks: int):
    """A fake model whose plan holds so many blocks."""
    model = fake_model()
    size = block_bytes(model.program) or 1
    model.core.plan(MemoryPlan(0, size, model.program.block_size, blocks * size, 0))
    return model


def test_a_request_that_can_never_fit_is_told(monkeypatch):
    monkeypatch.setattr(memory, "FLOOR_BYTES", 1)
    model = planned(4)
    most = 4 * model.program.block_size
    for settings in ({"max_tokens": most}, {"max_tokens": most // 2, "n": 3, "temperature": 1.0},
                     {"max_tokens": most // 2, "num_beams": 3}):
        with pytest.raises(RequestError, match="memory for keys and values holds 4"):
            model.generate([1, 2], **settings)
    assert len(model.generate([1, 2], max_tokens=None, ignore_eos=True).ids) == most - 2  # as many as there are
    with Engine(model) as engine:
        with pytest.raises(RequestError, match="memory for keys and values holds 4"):
            engine.submit([1, 2], max_tokens=most)
        assert engine.stats["kv_blocks_limit"] == 4
        assert len(engine.submit([1, 2], max_tokens=None, ignore_eos=True).result().ids) == most - 2
    assert model.runner.blocks.limit == 4


def test_no_memory_now_is_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr(memory, "FLOOR_BYTES", 1)
    model = planned(100)
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    with pytest.raises(OutOfMemoryError, match="no memory for the keys and values"):
        model.generate([1, 2], max_tokens=4)
    with Engine(model) as engine, pytest.raises(MemoryError):
        engine.submit([1, 2], max_tokens=4).result()


def test_what_makes_room_stays_within_the_plan_too(monkeypatch):
    monkeypatch.setattr(memory, "FLOOR_BYTES", 1)
    model = planned(100)
    host = model.core.host
    assert host.allocator.can_allocate(2)
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    assert not host.allocator.can_allocate(50)  # then texts are read again instead


def test_loading_makes_a_plan(tmp_path):
    with load(write_checkpoint(tmp_path), backend="reference") as model:
        plan = model.runner.memory
        assert plan.weights == model.program.weights_bytes and model.runner.blocks.limit == plan.blocks > 0
        with Engine(model, kv_memory="1MB") as engine:
            assert engine.memory.most == 10**6 and "as asked for" in str(engine.memory)
        with pytest.raises(OutOfMemoryError, match="more than the"):
            Engine(model, kv_memory="9000TB")
        with Engine(model) as engine:
            assert engine.memory == plan


def test_the_system_has_no_memory_left(monkeypatch):
    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    for wanted in (lambda: aligned(1 << 24, np.uint8), lambda: Arena().zeros(10)):
        with pytest.raises(MemoryError, match="no .* bytes left"):
            wanted()
