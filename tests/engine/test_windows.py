"""Texts longer than several attention windows: the same tokens as with full KV memory, in less memory."""

import numpy as np
import pytest

import numflow
from numflow.engine.runner import runner as sequence
from numflow.errors import RequestError
from numflow.network.windows import most_blocks
from tests.engine.tiny import write_checkpoint

WINDOW, CHUNK, SIZE, CONTEXT = 24, 16, 4, 512
CONFIG = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "max_position_embeddings": CONTEXT,
          "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
NARROW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": CONTEXT,
          "sliding_window": WINDOW}
TEXT = [4 + (7 * i * i + i) % 41 for i in range(300)]
REFERENCE = {"backend": "reference", "block_size": SIZE}
EXECUTORS = {"reference": REFERENCE, "cpu": {"backend": "cpu", "threads": 2},
             "few bits": {"backend": "cpu", "threads": 1, "kv_k": "q4", "kv_v": "q4"},
             "layers": {"backend": "cpu", "devices": "0;1", "threads": 1},
             "tensors": {"backend": "cpu", "devices": "0&1", "threads": 1},
             "processes": {"backend": "cpu", "devices": "0;1", "transport": "processes", "threads": 1}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("mixed") / "model", **CONFIG)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """All layers have a window."""
    return write_checkpoint(tmp_path_factory.mktemp("narrow") / "model", **NARROW)


def whole(path, **options):
    """The model with one table for all layers: every block is kept."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sequence, "kinds", lambda network: (0,))
        model = numflow.load(path, chunk=CHUNK, **options)
    assert len(model.runner.pools) == 1
    return model


def windowed(path, **options):
    return numflow.load(path, chunk=CHUNK, **options)


def used(model):
    return [pool.allocator.used for pool in model.runner.pools]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.thin(3)
def test_the_numbers_are_those_of_a_model_that_keeps_everything(executor, checkpoint):
    with whole(checkpoint, **EXECUTORS[executor]) as model:
        logits, ids = model.logits(TEXT), model.generate(TEXT[:200], max_tokens=60, ignore_eos=True).ids
    with windowed(checkpoint, **EXECUTORS[executor]) as model:
        assert [pool.window for pool in model.runner.pools] == [0, WINDOW]
        assert model.program.window_bytes[0] + model.program.window_bytes[WINDOW] == model.program.block_bytes
        np.testing.assert_array_equal(model.logits(TEXT), logits)
        assert model.generate(TEXT[:200], max_tokens=60, ignore_eos=True).ids == ids
        size = model.program.block_size
        assert "of windows" in str(model.runner.memory) and "tokens of one text" in str(model.runner.memory)
        assert model.runner.pools[1].allocator.capacity <= most_blocks(WINDOW, CONTEXT, CHUNK, size)
        assert used(model) == [0, 0]


def test_a_long_text_holds_a_window_and_a_chunk(checkpoint):
    """At every step, and reserved memory grows no further."""
    with windowed(checkpoint, **REFERENCE) as model:
        most, seen, run = most_blocks(WINDOW, CONTEXT, CHUNK, SIZE), [], model.program.run

        def watched(batch, *args):
            seen.append((len(batch.tokens), *used(model)))
            return run(batch, *args)

        model.program.run = watched
        model.generate(TEXT, max_tokens=50, ignore_eos=True)
        assert WINDOW // SIZE < max(count for _, _, count in seen) <= most < seen[-1][1] == -(-349 // SIZE)
        assert seen[-1][2] <= most_blocks(WINDOW, CONTEXT, 1, SIZE) + CHUNK // SIZE
        assert model.runner.kv_bytes() <= sum(
            count * pool.size for count, pool in zip((-(-350 // SIZE), most), model.runner.pools))


SETTINGS = [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3}, {"speculate": "ngram"}]
PROMPTS = [TEXT[:90], TEXT[:130], TEXT[50:190], [*TEXT[:90], 5, 6]]


@pytest.fixture(scope="module", params=["mixed", "narrow"])
def expected(request, checkpoint, narrow):
    """A checkpoint, and each prompt by each of SETTINGS alone where everything is kept."""
    path = checkpoint if request.param == "mixed" else narrow
    with whole(path, **REFERENCE) as model:
        return path, [[one.ids for one in model.generate(prompt, max_tokens=20, ignore_eos=True, **own).choices]
                      for prompt in PROMPTS for own in SETTINGS]


@pytest.mark.parametrize("options", [{}, {"preemption": "swap"}, {"preemption": "recompute"}, {"prefix_cache": False},
                                     {"max_step_tokens": 7}], ids=str)
@pytest.mark.thin(4)
def test_side_by_side(expected, options):
    """Samples, beams, guesses, swapped and read again: each gives what it gives alone where everything is kept."""
    path, expected = expected
    with windowed(path, **REFERENCE) as model:
        if "preemption" in options:
            options = {**options, "kv_memory": 78 * model.program.block_bytes}
        with numflow.Engine(model, **options) as engine:
            handles = [engine.submit(prompt, max_tokens=20, ignore_eos=True, priority=number % 2, **own)
                       for number, prompt in enumerate(PROMPTS) for own in SETTINGS]
            found = [[one.ids for one in handle.results(100)] for handle in handles]
            stats = engine.stats
        assert found == expected
        assert all(count == 0 for count in used(model)) and stats["kv_bytes_used"] >= 0
        if "preemption" in options:
            assert stats["preemptions"] > 0
            assert stats["kv_bytes"] <= 78 * model.program.block_bytes
            assert (stats["swaps"] > 0) is (options["preemption"] == "swap")


def test_a_long_text_fits_where_it_would_not_if_all_was_kept(checkpoint):
    blocks = most_blocks(0, 350, CHUNK, SIZE)
    with whole(checkpoint, **REFERENCE) as model:
        expected = model.generate(TEXT, max_tokens=50, ignore_eos=True).ids
        size, budget = model.program.block_bytes, 0
    with windowed(checkpoint, **REFERENCE) as model:
        budget = sum(count * pool.size for count, pool in
                     zip((blocks, most_blocks(WINDOW, 350, CHUNK, SIZE)), model.runner.pools)) + size
        with numflow.Engine(model, kv_memory=budget) as engine:
            assert engine.submit(TEXT, max_tokens=50, ignore_eos=True).result().ids == expected
            assert engine.submit([4, 5], max_tokens=50, ignore_eos=True).result().ids  # and a short one after it
            assert engine.submit(TEXT, max_tokens=50, ignore_eos=True).result().ids == expected
            assert len(engine.submit(TEXT, max_tokens=None, ignore_eos=True).result().ids) >= 50
            assert engine.stats["kv_bytes"] <= budget
            with pytest.raises(RequestError, match="of keys and values may be needed, and the memory for them holds"):
                engine.submit(TEXT, max_tokens=150)
    with whole(checkpoint, **REFERENCE) as model, numflow.Engine(model, kv_memory=budget) as engine, \
            pytest.raises(RequestError, match="may be needed"):
        engine.submit(TEXT, max_tokens=50)


def test_a_text_goes_on_where_its_window_was_kept(checkpoint):
    with windowed(checkpoint, **REFERENCE) as model:
        fresh = [model.generate(ids, max_tokens=8, ignore_eos=True).ids for ids in (TEXT[:200], TEXT[:260])]
        with numflow.Engine(model) as engine:
            run = [engine.submit(ids, max_tokens=8, ignore_eos=True).result() for ids in (TEXT[:200], TEXT[:260])]
            assert [one.ids for one in run] == fresh
            # The whole of the first text but what does not fill a block, though most of its windows are gone.
            assert engine.stats["prefix_tokens"] == 200
            # Of another text that begins alike there is no window: it is read again, and its border is kept then.
            other = [*TEXT[:100], *TEXT[:150]]
            for expected in (200, 300):
                engine.submit([*other, expected // 10], max_tokens=8, ignore_eos=True).result()
                other[120:] = TEXT[100:230]
                assert engine.stats["prefix_tokens"] == expected


def test_a_draft_model_takes_tokens_back(checkpoint):
    with windowed(checkpoint, **REFERENCE) as plain:
        expected = plain.generate(TEXT[:150], max_tokens=40, ignore_eos=True).ids
    with windowed(checkpoint, **REFERENCE) as draft, windowed(checkpoint, **REFERENCE) as model:
        held = draft.runner.open(300)
        held.last(TEXT[:200])
        assert held.rewind(190) == 190 and held.rewind(100) == 0
        logits = held.last(TEXT[:120])
        held.close()
        np.testing.assert_allclose(logits, model.logits(TEXT[:120])[-1], atol=1e-4)
        assert used(draft) == [0, 0]
        assert model.generate(TEXT[:150], max_tokens=40, ignore_eos=True).ids == expected


def test_growing_again_keeps_what_is_still_to_be_saved(checkpoint):
    """A pool that shrank grows a little in the same plan: the blocks that its saves read stay allocated."""
    with windowed(checkpoint, **REFERENCE) as model:
        runner = model.runner
        allocator = runner.pools[1].allocator
        allocator.on_grow(6)
        allocator.grow(6)
        allocator.pinned = 6
        allocator.shrink(2)
        allocator.on_grow(4)
        allocator.grow(4)
        assert runner._reserved[1] == 6
        runner.trim()
        assert runner._reserved[1] == 4
