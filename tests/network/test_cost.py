"""Costs of steps against loops that count operations and bytes."""

from dataclasses import replace

import pytest

from numflow.network.cost import StepCost, Workload, step_cost, weight_bytes
from numflow.ops import Buffer, Cache, Network, Step, View, Weight

X, Y = View("x", 0, 64), View("y", 0, 96)


def network(*steps: Step, **weights: Weight) -> Network:
    return Network("toy", {"main": steps}, {name: Buffer(name, "tokens", 256) for name in "xy"}, weights,
                   {"kv": Cache("kv", 2, 16, 8), "cross": Cache("cross", 2, 16, 8, "cross")}, {}, {})


@pytest.mark.parametrize("new", [1, 5, 9])
@pytest.mark.parametrize("cached", [0, 3, 20])
@pytest.mark.parametrize("window", [0, 1, 4, 16, 100])
def test_pairs_are_those_that_a_loop_counts(new, cached, window):
    seen = [(query, key) for query in range(cached, cached + new) for key in range(query + 1)
            if not window or key > query - window]
    load = Workload(3, new, cached)
    assert load.pairs(window=window) == 3 * len(seen)
    assert load.keys(window) == 3 * len({key for _, key in seen})


def test_every_pair_of_a_bidirectional_text_is_seen():
    assert Workload(3, 7).pairs(causal=False) == 3 * 7 * 7


@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("cached", [0, 3, 20])
@pytest.mark.parametrize("every", [1, 4, 30])
@pytest.mark.parametrize("most", [0, 1, 3, 100])
def test_entries_are_those_that_a_loop_counts(new, cached, every, most):
    seen = [min((token + 1) // every, most or 1000) for token in range(cached, cached + new)]
    load, whole = Workload(3, new, cached), (cached + new) // every
    assert load.entry_pairs(every, most) == 3 * sum(seen)
    assert load.entries(every, most) == 3 * min(whole, most * new or whole)


def test_entries_are_read_as_they_are_chosen():
    """One sequence of 8 tokens after 32: 10 entries of 4 tokens each, of which a query reads 2 or all."""
    chosen, params = View("y", 64, 2), {"cache": "keys", "heads": 4, "scale": 1.0, "window": 5, "entries": "entries"}
    index = Step("index_select", (X, View("x", 64, 2)), (chosen,), {}, {"cache": "entries", "heads": 2, "top_k": 2})
    whole, best = (Step("attention", (X, *more), (View("y", 0, 64),), {}, params) for more in ((), (chosen,)))
    pool = Step("pool", (), (View("y", 0, 16),), {}, {"cache": "rows", "every": 4, "series": 2})
    write = Step("cache_write", (View("y", 0, 16),), (), {}, {"cache": "entries"})
    made = replace(network(index, whole, best, pool, write), caches={
        "keys": Cache("keys", 1, 16, 0, prefix=16), "entries": Cache("entries", 1, 16, 0, prefix=16, every=4),
        "rows": Cache("rows", 1, 64, 0, prefix=64, every=1)})
    cost = {name: step_cost(made, step, Workload(1, 8, 32), kv_bytes=2) for name, step in (
        ("index", index), ("whole", whole), ("best", best), ("pool", pool), ("write", write))}
    ended = 3 * 8 + 4 * 9 + 10  # of the queries at 32 .. 39
    assert cost["index"].cache == 10 * 16 * 4 and cost["index"].operations == 2 * ended * 2 * 17
    assert cost["whole"].cache == 12 * 16 * 2 + 10 * 16 * 4
    assert cost["whole"].operations == 2 * (8 * 5 + ended) * 4 * 32
    assert cost["best"].cache == 12 * 16 * 2 + 10 * 16 * 4 and cost["best"].operations == 2 * (8 * 5 + 16) * 4 * 32
    assert cost["pool"].cache == 8 * 2 * 64 * 4 and cost["write"].cache == 8 / 4 * 16 * 4


def test_keys_of_selected_blocks_are_read():
    """One sequence of 1 token after 99: two of the blocks of 8 keys."""
    chosen, params = View("y", 64, 2), {"cache": "keys", "heads": 4, "scale": 1.0}
    index = Step("block_select", (X,), (chosen,), {}, {"cache": "index", "heads": 2, "top_k": 2, "block": 8})
    whole, best = (Step("attention", (X, *more), (View("y", 0, 64),), {}, params | own)
                   for more, own in (((), {}), ((chosen,), {"block": 8})))
    made = replace(network(index, whole, best), caches={
        "keys": Cache("keys", 2, 16, 16), "index": Cache("index", 1, 16, 0, prefix=16)})
    load, steps = Workload(1, 1, 99), (index, whole, best)
    index_cost, all_cost, cost = (step_cost(made, step, load, kv_bytes=2) for step in steps)
    assert index_cost.cache == 100 * 16 * 2 and index_cost.operations == 2 * 100 * 2 * 17
    assert (all_cost.cache, cost.cache) == (100 * 64 * 2, 16 * 64 * 2)
    assert (all_cost.operations, cost.operations) == (2 * 100 * 4 * 32, 2 * 16 * 4 * 32)


def test_a_linear_reads_its_matrix_once_whatever_the_batch():
    weight = Weight("w", (96, 64), types=("Q4_0",))
    step = Step("linear", (X,), (Y,), {"weight": "w"})
    one, many = (step_cost(network(step, w=weight), step, Workload(n)) for n in (1, 32))
    assert one.weights == many.weights == weight_bytes(weight) == 96 * 64 // 32 * 18
    assert (one.operations, many.operations) == (2 * 96 * 64, 2 * 96 * 64 * 32)
    assert many.activations == 32 * 4 * (96 + 64)


def test_matrices_whose_parts_differ_are_float32():
    assert weight_bytes(Weight("w", (96, 64), types=("Q4_0", "Q8_0"))) == 96 * 64 * 4
    assert weight_bytes(Weight("b", (96,), types=("F16",))) == 96 * 4


def test_a_lookup_reads_rows():
    table = Weight("t", (1000, 64), types=("F16",))
    step = Step("embed", (), (X,), {"table": "t"})
    assert step_cost(network(step, t=table), step, Workload(2, 3)).weights == 6 * 64 * 2
    part = Step("embed", (), (X,), {"table": "t"}, {"first": 1000, "vocabulary": 3000})
    assert step_cost(network(part, t=table), part, Workload(2, 3)).weights == 2 * 64 * 2


def test_attention_reads_keys_once_for_all_heads():
    params = {"cache": "kv", "heads": 4, "scale": 1.0}
    step = Step("attention", (X,), (View("y", 0, 32),), {}, params)
    cost = step_cost(network(step), step, Workload(2, 1, 9), kv_bytes=2)
    assert cost.cache == 2 * 10 * 2 * (16 + 8) * 2
    assert cost.operations == 2 * 2 * 10 * 4 * (16 + 8)
    cross = Step("attention", (X,), (View("y", 0, 32),), {}, params | {"cache": "cross"})
    assert step_cost(network(cross), cross, Workload(2, 1, 9, encoded=5)).cache == 2 * 5 * 2 * 24 * 2


def test_experts_are_read_as_they_are_chosen():
    ids = View("y", 0, 2)
    route = Step("moe_route", (X,), (ids, View("y", 2, 2)))
    weight = Weight("w", (8 * 96, 64), groups=8, types=("F16",))
    step = Step("expert_linear", (X, ids), (View("x", 64, 96),), {"weight": "w"})
    one, many = (step_cost(network(route, step, w=weight), step, Workload(n)) for n in (1, 1000))
    assert one.weights == pytest.approx(weight_bytes(weight) * (1 - (7 / 8) ** 2))
    assert many.weights == pytest.approx(weight_bytes(weight))
    assert one.operations == 2 * 2 * 96 * 64


def test_costs_add_up():
    weight = Weight("w", (96, 64), types=("F16",))
    step = Step("linear", (X,), (Y,), {"weight": "w"})
    one = step_cost(network(step, w=weight), step, Workload(4))
    assert one + StepCost() == one
    assert (one + one).bytes == 2 * one.bytes and (one + one).operations == 2 * one.operations
