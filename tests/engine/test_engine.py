"""The engine on a fake program: threads, queues, priorities, cancelling, failures, asyncio."""

import asyncio
import threading
import time

import numpy as np
import pytest

import numflow
from numflow.errors import QueueFullError, RequestError, TokenizerError
from tests.engine.fake import EOS, VOCABULARY, fake_model, one_hot, used_blocks, writes


def noisy(history):
    """Random logits that follow from all that was written; the end token comes now and then."""
    row = np.random.default_rng(history).normal(0, 2, VOCABULARY).astype(np.float32)
    row[EOS] += 3
    return row


class Gate:
    """A rule that waits until it is opened, so that a test decides when steps happen."""

    def __init__(self, rule=lambda history: (history[-1] + 1) % 256):
        self.rule, self.open, self.reached = rule, threading.Event(), threading.Event()

    def __call__(self, history):
        self.reached.set()
        assert self.open.wait(10)
        return self.rule(history)


SETTINGS = [{}, {"temperature": 1.0, "seed": 4}, {"num_beams": 3}, {"no_repeat_ngram": 2}, {"stop": "\x05"},
            {"min_tokens": 4}, {"max_tokens": 0}, {"temperature": 0.7, "top_k": 9, "seed": 0}, {"ignore_eos": True},
            {"temperature": 1.0, "seed": 7, "n": 3}]
PROMPTS = [[1], [2, 3, 4, 5, 6], "hello", list(range(40)), [9, 9], "wörld"]
FACTS = "ids", "text", "finish_reason", "score"


def facts(result):
    return [[getattr(one, name) for name in FACTS] for one in result.choices or [result]]


def test_memory_grows_in_large_steps():
    """Each step may copy all that is there; prompts that nobody repeats are kept while memory may grow."""
    model, sizes = fake_model(context=64), []

    def reserve(blocks, cross_blocks=0):
        sizes.append(blocks)
        model.program.blocks = blocks

    model.program.reserve = reserve
    with numflow.Engine(model, max_batch=8) as engine:
        handles = [engine.submit([20 + i % 200, i // 200 + 20, *range(30, 50)], max_tokens=8, ignore_eos=True)
                   for i in range(400)]
        assert all(len(handle.result().ids) == 8 for handle in handles)
    assert sizes[-1] > 1000  # nearly all prompts are there
    assert sum(sizes) < 8 * sizes[-1]  # and blocks were copied a few times each, not hundreds


@pytest.mark.parametrize("options", [{}, {"batching": "static"}, {"prefix_cache": False}, {"max_batch": 5},
                                     {"kv_memory": 52 * 16, "preemption": "swap"}, {"max_step_tokens": 7},
                                     {"kv_memory": 52 * 16, "preemption": "recompute"}])
@pytest.mark.thin(4)
def test_requests_in_company_give_what_they_give_alone(options):
    requests = [(prompt, {"max_tokens": 8, **settings}) for prompt in PROMPTS for settings in SETTINGS]
    alone = [facts(fake_model(noisy).generate(prompt, **settings)) for prompt, settings in requests]
    model = fake_model(noisy)
    with numflow.Engine(model, **options) as engine:
        handles = [engine.submit(prompt, priority=number % 3, **settings)
                   for number, (prompt, settings) in enumerate(requests)]
        for handle, expected in zip(handles, alone, strict=True):
            assert [[getattr(one, name) for name in FACTS] for one in handle.results(20)] == expected
        stats = engine.stats
    assert (stats["running"], stats["waiting"], stats["finished"]) == (0, 0, len(requests))
    assert stats["kv_blocks_used"] == used_blocks(model) == 0
    assert stats["new_tokens"] == sum(len(one[0]) for choices in alone for one in choices)
    if "kv_memory" in options:
        assert stats["kv_blocks_capacity"] == stats["kv_blocks_limit"] == 52
        assert stats["preemptions"] > 0
        assert (stats["swaps"] > 0) is (options["preemption"] == "swap")


def test_pieces_come_as_they_are_made():
    gate = Gate(writes(b" world", prompt=6))
    with numflow.Engine(fake_model(gate)) as engine:
        handle = engine.submit("hello")
        assert not handle.done
        with pytest.raises(TimeoutError, match="not done after 0.01 s"):
            handle.result(timeout=0.01)
        gate.open.set()
        pieces = list(handle)
        assert [(str(piece), piece.id) for piece in pieces] == [*((c, ord(c)) for c in " world"), ("", None)]
        assert list(handle) == []
        assert handle.done
        assert (handle.result().text, handle.result().finish_reason) == (" world", "stop")
        assert handle.result().stats["new_tokens"] == 6


def test_samples_say_which_they_are():
    with numflow.Engine(fake_model(noisy)) as engine:
        handle = engine.submit([1], n=3, temperature=2.0, seed=1, max_tokens=9, ignore_eos=True)
        ids = {0: [], 1: [], 2: []}
        for piece in handle:
            if piece.id is not None:
                ids[piece.index].append(piece.id)
        assert [one.ids for one in handle.results()] == list(ids.values())
        assert len({tuple(own) for own in ids.values()}) == 3


def test_a_full_queue_refuses():
    gate = Gate()
    with numflow.Engine(fake_model(gate), max_batch=1, max_queue=2) as engine:
        first = engine.submit([1], max_tokens=3)
        assert gate.reached.wait(10)
        waiting = [engine.submit([2], max_tokens=3) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait already, max_queue=2"):
            engine.submit([3])
        assert engine.stats["waiting"] == 2
        gate.open.set()
        assert [handle.result(10).ids for handle in (first, *waiting)] == [[2, 3, 4], [3, 4, 5], [3, 4, 5]]
        engine.submit([3], max_tokens=1).result(10)


def test_higher_priority_is_served_first():
    seen = []
    gate = Gate(lambda history: seen.append(history[0]) or (history[-1] + 1) % 256)
    with numflow.Engine(fake_model(gate), max_batch=1) as engine:
        handles = [engine.submit([1], max_tokens=2)]
        assert gate.reached.wait(10)
        handles += [engine.submit([number], max_tokens=2, priority=priority)
                    for number, priority in ((10, 0), (20, 5), (30, 1))]
        gate.open.set()
        assert [handle.result(10).ids for handle in handles] == [[2, 3], [11, 12], [21, 22], [31, 32]]
        assert engine.stats["preemptions"] == 1
    assert seen == [1, 20, 20, 30, 30, 1, 10, 10]


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.thin(3)
def test_a_cancelled_request_leaves_the_others_alone(moment):
    model, seen = fake_model(noisy), []
    expected = fake_model(noisy).generate([1, 2, 3], max_tokens=20, ignore_eos=True).ids
    beams = fake_model(noisy).generate([5, 6, 7, 8, 9], max_tokens=8, num_beams=3).ids

    class Counting:
        def __call__(self, history):
            if len(seen) == 3 * moment:
                victim.cancel()
            seen.append(len(history))
            return noisy(history)

    rule, model.program.rule = Counting(), noisy
    with numflow.Engine(model) as engine:
        victim = engine.submit([5, 6, 7, 8], max_tokens=20, ignore_eos=True, temperature=1.0, seed=3, n=2)
        model.program.rule = rule
        others = [engine.submit([1, 2, 3], max_tokens=20, ignore_eos=True),
                  engine.submit([5, 6, 7, 8, 9], max_tokens=8, num_beams=3)]
        assert [other.result(10).ids for other in others] == [expected, beams]
        assert victim.result(10).finish_reason in ("cancelled", "length")
        list(victim)
    assert used_blocks(model) == 0


def test_a_failing_step_reaches_those_concerned_and_the_engine_goes_on():
    def rule(history):
        if history[0] == 66:
            raise ValueError("a broken kernel")
        return noisy(history)

    model = fake_model(rule)
    with numflow.Engine(model) as engine:
        good = engine.submit([1], max_tokens=5).result(10)
        bad = engine.submit([66], max_tokens=5)
        with pytest.raises(ValueError, match="a broken kernel"):
            bad.result(10)
        with pytest.raises(ValueError, match="a broken kernel"):
            list(bad)
        assert engine.submit([1], max_tokens=5).result(10).ids == good.ids
        stats = engine.stats
    assert (stats["failed"], stats["kv_blocks_used"]) == (1, 0)


def test_what_is_wrong_with_one_request_does_not_concern_others():
    gate = Gate(lambda history: np.full(VOCABULARY, np.nan) if history[0] == 66 else one_hot((history[-1] + 1) % 256))
    with numflow.Engine(fake_model(gate)) as engine:
        bad, good = engine.submit([66], max_tokens=9), engine.submit([1], max_tokens=3)
        gate.open.set()
        with pytest.raises(RequestError, match="not finite numbers"):
            bad.result(10)
        assert good.result(10).ids == [2, 3, 4]


def test_closing_waits_or_cancels():
    gate = Gate()
    engine = numflow.Engine(fake_model(gate))
    handle = engine.submit([1], max_tokens=5)
    assert gate.reached.wait(10)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(10)
    assert handle.result(0).ids == [2, 3, 4, 5, 6]
    with pytest.raises(RequestError, match="the engine is closed"):
        engine.submit([1])
    handle.cancel()
    engine.close()
    numflow.Engine(engine.model).close()
    model = fake_model(lambda history: time.sleep(0.002) or 65, context=4096)
    engine = numflow.Engine(model)
    handle = engine.submit([1], max_tokens=4000)
    engine.close(timeout=0.05)
    assert handle.result(0).finish_reason == "cancelled"
    assert used_blocks(model) == 0
    with pytest.raises(KeyError), numflow.Engine(model) as engine:
        handle = engine.submit([1], max_tokens=4000)
        raise KeyError
    assert handle.result(0).finish_reason == "cancelled"


def test_one_engine_at_a_time_and_the_model_beside_it():
    model = fake_model(noisy)
    alone = model.generate([1, 2, 3], max_tokens=9).ids
    with numflow.Engine(model) as engine:
        with pytest.raises(RequestError, match="has an engine already"):
            numflow.Engine(model)
        handle = engine.submit([4], max_tokens=50, ignore_eos=True)
        assert model.generate([1, 2, 3], max_tokens=9).ids == alone
        assert model.logits([1, 2]).shape == (2, VOCABULARY)
        assert len(handle.result(10).ids) == 50
    with numflow.Engine(model, prefix_cache=False) as engine:
        assert engine.submit([1, 2, 3], max_tokens=9).result(10).ids == alone
    assert model.runner.blocks.cached == 0


def test_a_known_beginning_is_not_run_again():
    model = fake_model(noisy, context=200)
    prompt = list(range(100))
    with numflow.Engine(model) as engine:
        first = engine.submit(prompt, max_tokens=4, ignore_eos=True).result(10)
        before = sum(model.program.batches)
        again = engine.submit([*prompt, *first.ids, 7], max_tokens=4, ignore_eos=True).result(10)
        assert sum(model.program.batches) - before == 105 - 100 + 3
        stats = engine.stats
        assert stats["prefix_tokens"] == 100
        assert stats["kv_blocks_cached"] > 0
    assert again.ids == fake_model(noisy, context=200).generate([*prompt, *first.ids, 7], max_tokens=4,
                                                                ignore_eos=True).ids


@pytest.mark.parametrize(("options", "message"), [
    ({"max_queue": -1}, "max_queue should be"), ({"max_batch": 0}, "max_batch should be"),
    ({"max_step_tokens": 0}, "max_step_tokens should be"),
    ({"kv_memory": "2 apples"}, "kv_memory should be a size"),
    ({"kv_memory": 3}, "hold no block of 4 tokens, which takes 16"),
    ({"batching": "x"}, "batching should be one of dynamic, static, is 'x'"),
    ({"preemption": "x"}, "preemption should be one of swap, recompute, is 'x'")])
def test_bad_options(options, message):
    model = fake_model()
    with pytest.raises(RequestError, match=message):
        numflow.Engine(model, **options)
    numflow.Engine(model).close()


@pytest.mark.parametrize(("settings", "message"), [
    ({"n": 0}, "n should be a whole number from 1"), ({"priority": 0.5}, "priority should be a whole number"),
    ({"max_tokens": -1}, "max_tokens"), ({"temprature": 1}, "did you mean 'temperature'"),
    ({"max_tokens": 63}, "KV blocks of 4 tokens may be needed, and the memory for keys and values holds 8")])
def test_bad_requests_are_refused_at_once(settings, message):
    with numflow.Engine(fake_model(), kv_memory=8 * 16) as engine:
        with pytest.raises(RequestError, match=message):
            engine.submit([1, 2], **{"max_tokens": 4, **settings})
        assert engine.stats["waiting"] == 0
    with numflow.Engine(fake_model(tokenizer=False)) as engine, pytest.raises(TokenizerError):
        engine.submit("text")


def test_as_many_tokens_as_memory_holds():
    with numflow.Engine(fake_model(), kv_memory=8 * 16) as engine:
        assert len(engine.submit([1, 2], max_tokens=None).result(10).ids) == 30
        assert len(engine.submit([1, 2], max_tokens=None, temperature=1.0, n=2, ignore_eos=True).result(10).ids) == 14


def test_asyncio():
    async def main():
        async with numflow.AsyncEngine(fake_model(writes(b" world", prompt=6))) as engine:
            handles = [await engine.submit("hello", max_tokens=9) for _ in range(3)]
            texts = ["".join([piece async for piece in handle]) for handle in handles[:2]]
            assert texts == [" world"] * 2
            assert (await handles[2].result(10)).text == " world"
            assert [one.done for one in handles] == [True] * 3
            long = await engine.submit([1] * 6, max_tokens=50, ignore_eos=True)
            long.cancel()
            assert (await long.result(10)).finish_reason in ("cancelled", "length")
            with pytest.raises(RequestError, match="prompt has token id -1"):
                await engine.submit([-1])
            return engine.stats

    assert asyncio.run(main())["kv_blocks_used"] == 0


def test_asyncio_failures_arrive():
    def fails(history):
        raise ValueError("broken")

    async def main():
        async with numflow.AsyncEngine(fake_model(fails)) as engine:
            handle = await engine.submit([1])
            with pytest.raises(ValueError, match="broken"):
                await handle.result(10)
            with pytest.raises(ValueError, match="broken"):
                [piece async for piece in handle]

    asyncio.run(main())


def test_many_threads_submit_cancel_and_wait():
    model, failures = fake_model(noisy), []
    expected = {start: fake_model(noisy).generate([start], max_tokens=12, ignore_eos=True).ids for start in range(8)}

    def work(start):
        rng = np.random.default_rng(start)
        for _ in range(6):
            handle = engine.submit([start], max_tokens=12, ignore_eos=True)
            if rng.random() < 0.3:
                handle.cancel()
                if handle.result(20).ids != expected[start][:len(handle.result().ids)]:
                    failures.append(start)
            elif handle.result(20).ids != expected[start]:
                failures.append(start)

    with numflow.Engine(model, max_batch=5, kv_memory=16 * 18) as engine:
        threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
    assert used_blocks(model) == 0


def test_several_beams_are_told_as_they_are_returned():
    """Pieces of all beams that were asked for, each with its number, and the results of the other ways in."""
    model = fake_model(noisy)
    settings = {"max_tokens": 6, "num_beams": 4, "n": 3}
    expected = [(one.ids, one.text, one.score) for one in model.generate([5, 6, 7], **settings).choices]
    with numflow.Engine(model) as engine:
        handle = engine.submit([5, 6, 7], **settings)
        pieces = list(handle)
        results = handle.results()
    assert len(expected) == 3 and len({tuple(ids) for ids, _, _ in expected}) == 3
    assert [(one.ids, one.text, one.score) for one in results] == expected
    assert [score for _, _, score in expected] == sorted((score for _, _, score in expected), reverse=True)
    for index, (ids, text, _) in enumerate(expected):
        assert [piece.id for piece in pieces if piece.index == index and piece.id is not None] == ids
        assert "".join(piece for piece in pieces if piece.index == index) == text
    assert all(one.finish_reason in ("stop", "length") and one.stats for one in results)
