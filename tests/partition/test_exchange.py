"""Exchanges alone: both executors against NumPy, repeatedly, with several threads, and when a device is missing."""

import threading

import numpy as np
import pytest

from numflow.cpu.exchange import world as world_module
from numflow.cpu.exchange.world import World
from numflow.cpu.program import Program
from numflow.errors import DeviceError
from numflow.ops import Batch, Buffer, Network, Step, View, Weight
from numflow.reference.program import Program as Reference
from numflow.reference.program import World as ReferenceWorld

WIDTH, ROWS = 52, 37


class _Constants:
    """A weight source of constants."""

    def __init__(self, network):
        self.network = network

    def f32(self, name):
        return self.network.weights[name].constant

    def raw(self, name):
        from numflow.network import WeightSource

        return WeightSource(self.network, None).raw(name)


def _network(table, *steps, wide=WIDTH):
    """A network: x [T, D] is the rows of a table, then `steps`; y is the output."""
    x, y = View("x", 0, table.shape[1]), View("y", 0, wide)
    embed = Step("embed", (), (x,), {"table": "table"}, label="embed")
    select = Step("select_rows", (y,), (View("out", 0, wide),), label="select_rows")
    buffers = {"x": Buffer("x", "tokens", x.width), "y": Buffer("y", "tokens", wide),
               "out": Buffer("out", "logits", wide)}
    weights = {"table": Weight("table", table.shape, constant=table, types=("F32",))}
    return Network("toy", {"main": (embed, *steps, select)}, buffers, weights, {}, {"out": View("out", 0, wide)}, {})


def _batch(rows=ROWS):
    each = np.arange(rows, dtype=np.int32)
    return Batch(each, each, np.array([0, rows], np.int32), np.zeros((1, 0), np.int32), each)


def _run(kind, networks, threads=1, runs=1, rows=ROWS, crowded=False):
    """The output of each device, run concurrently; crowded: as if other programs used the cores."""
    program_class, world_class = (Reference, ReferenceWorld) if kind == "reference" else (Program, World)
    world = world_class(dict(enumerate(networks)), threads)
    if crowded:
        world._memory[world_module.CROWDED:world_module.CROWDED + 8] = np.array([1 << 62]).view(np.uint8)
    programs = [program_class(network, _Constants(network), threads=threads, world=world, device=i)
                for i, network in enumerate(networks)]
    results = [None] * len(networks)

    def work(i):
        for _ in range(runs):
            results[i] = programs[i].run(_batch(rows), output="out")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(networks))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    return results


def _tables(count, widths=None):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((ROWS, widths[i] if widths else WIDTH)).astype(np.float32) for i in range(count)]


@pytest.mark.parametrize(("kind", "threads"), [("reference", 1), ("cpu", 1), ("cpu", 2)])
@pytest.mark.parametrize("adds", [(0, 1, 2), (2, 0), (1,)])
def test_all_reduce(kind, threads, adds):
    tables = _tables(3)
    y = View("y", 0, WIDTH)
    steps = [Step("all_reduce", (View("x", 0, WIDTH),) if i in adds else (), (y,),
                  params={"group": (0, 1, 2), "adds": adds}) for i in range(3)]
    expected = tables[adds[0]]
    for i in adds[1:]:
        expected = expected + tables[i]
    for found in _run(kind, [_network(t, s) for t, s in zip(tables, steps, strict=True)], threads, runs=3):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("kind", "threads"), [("reference", 1), ("cpu", 1), ("cpu", 2)])
def test_all_gather(kind, threads):
    spans = ((0, 20), (20, 20), (20, 52), (16, 36))  # one has nothing, one overlaps its neighbours
    whole = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype(np.float32)
    networks = []
    for begin, end in spans:
        table = whole[:, begin:end] if end > begin else whole[:, :4]
        x = (View("x", 0, end - begin),) if end > begin else ()
        step = Step("all_gather", x, (View("y", 0, WIDTH),), params={"group": (0, 1, 2, 3), "spans": spans})
        networks.append(_network(np.ascontiguousarray(table), step))
    for found in _run(kind, networks, threads, runs=2):
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(("kind", "threads"), [("reference", 1), ("cpu", 1), ("cpu", 2)])
def test_send_and_receive(kind, threads):
    tables, x, y = _tables(2), View("x", 0, WIDTH), View("y", 0, WIDTH)
    keep = Step("copy", (x,), (y,))
    there = [Step("send", (x,), (), params={"peer": 1}), keep]
    back = [Step("receive", (), (y,), params={"peer": 0}), Step("add", (x, y), (y,))]
    first, second = _run(kind, [_network(tables[0], *there), _network(tables[1], *back)], threads, runs=4)
    np.testing.assert_array_equal(first, tables[0])
    np.testing.assert_array_equal(second, tables[1] + tables[0])


def test_devices_nap_where_other_programs_want_the_cores():
    table, y = _tables(1)[0], View("y", 0, WIDTH)
    steps = [Step("all_reduce", (View("x", 0, WIDTH),), (y,), params={"group": (0, 1), "adds": (0, 1)})] * 2
    for found in _run("cpu", [_network(table, step) for step in steps], 2, runs=20, crowded=True):
        np.testing.assert_array_equal(found, table + table)


def test_values_larger_than_a_slot_go_through_in_rounds(monkeypatch):
    monkeypatch.setattr(world_module, "SLOT_BYTES", 4 * 64 * 3)  # three rows
    monkeypatch.setattr(world_module, "_RING", (2, 2))
    test_all_reduce("cpu", 2, (0, 1, 2))
    test_all_gather("cpu", 2)
    test_send_and_receive("cpu", 2)


def test_no_rows():
    tables = _tables(2)
    reduce = Step("all_reduce", (View("out", 0, WIDTH),), (View("out", 0, WIDTH),),
                  params={"group": (0, 1), "adds": (0, 1)})
    networks = [_network(t, Step("copy", (View("x", 0, WIDTH),), (View("y", 0, WIDTH),))) for t in tables]
    for network in networks:
        network.entries["main"] += (reduce,)
    batch = _batch()
    batch.logit_rows = np.zeros(0, np.int32)
    world = World(dict(enumerate(networks)), 1)
    programs = [Program(n, _Constants(n), threads=1, world=world, device=i) for i, n in enumerate(networks)]
    assert [program.run(batch, output="out").shape for program in programs] == [(0, WIDTH)] * 2


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_nobody_waits_for_ever(kind):
    """The other device never arrives: aborting the run ends the wait, and the world can be used again."""
    tables, y = _tables(2), View("y", 0, WIDTH)
    steps = [Step("all_reduce", (View("x", 0, WIDTH),), (y,), params={"group": (0, 1), "adds": (0, 1)})] * 2
    networks = [_network(table, step) for table, step in zip(tables, steps, strict=True)]
    program_class, world_class = (Reference, ReferenceWorld) if kind == "reference" else (Program, World)
    world = world_class(dict(enumerate(networks)), 1)
    programs = [program_class(network, _Constants(network), threads=1, world=world, device=i)
                for i, network in enumerate(networks)]
    errors = []

    def work():
        try:
            programs[0].run(_batch(), output="out")
        except DeviceError as error:
            errors.append(str(error))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(0.2)
    assert worker.is_alive() and world.progress >= 1
    world.abort()
    worker.join(10)
    assert not worker.is_alive() and "broken off" in errors[0]
    world.reset()
    assert world.progress == 0 and not world.aborted


def test_a_part_alone_cannot_be_bound():
    network = _network(_tables(1)[0], Step("receive", (), (View("y", 0, WIDTH),), params={"peer": 1}))
    with pytest.raises(DeviceError, match="cannot run without the other devices"):
        Program(network, _Constants(network), threads=1)
