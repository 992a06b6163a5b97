"""Encoders and encoder-decoders in the engine: batched, with generating requests, and short of memory."""

import threading

import numpy as np
import pytest

import numflow
from numflow.engine.load import load
from numflow.engine.model import Model
from numflow.engine.schedule.scheduler import StepLimits
from tests.engine.fake import used_blocks
from tests.engine.published import write_case
from tests.engine.tiny import write_checkpoint

SOURCES = [[5, 6, 2], list(range(40)), [9], [100, 101, 102, 103, 104], [7] * 30]


@pytest.mark.parametrize(("backend", "options"), [
    ("cpu", {}), ("reference", {"max_batch": 4}), ("reference", {"max_step_tokens": 5, "prefix_cache": False}),
    ("reference", {"preemption": "swap"}), ("reference", {"preemption": "recompute"})])
@pytest.mark.thin(6)
def test_an_encoder_decoder(backend, options, tmp_path):
    settings = [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 3, "n": 2}]
    size = {} if backend == "cpu" else {"block_size": 4}
    with load(write_case("m2m100", tmp_path, eos_token_id=2), backend=backend, **size) as model:
        alone = [model.generate(source, max_tokens=12, ignore_eos=True, **own) for source in SOURCES
                 for own in settings]
        model = Model(model.network, model.program, ends=frozenset({2}))  # with nothing reserved
        if "preemption" in options:  # twelve blocks, as three beams need in the end; 40 tokens of an encoder take ten
            options = {**options, "kv_memory": 12 * (model.program.block_bytes + model.program.cross_block_bytes)}
        with numflow.Engine(model, **options) as engine:
            handles = [engine.submit(source, max_tokens=12, ignore_eos=True, priority=number % 2, **own)
                       for number, source in enumerate(SOURCES) for own in settings]
            found = [[one.ids for one in handle.results(60)] for handle in handles]
            stats = engine.stats
        assert found == [[one.ids for one in result.choices] for result in alone]
        assert used_blocks(model) == 0
        if "preemption" in options:
            assert stats["preemptions"] > 0
            assert (stats["swaps"] > 0) is (options["preemption"] == "swap")
            assert stats["kv_blocks_capacity"] == 12


def test_reading_beside_generating(tmp_path):
    texts = [list(range(1, 1 + n)) for n in (3, 30, 1, 17, 40)]
    with load(write_checkpoint(tmp_path), activations="f32") as model:
        hidden, logits = [model.hidden(ids) for ids in texts], model.logits_batch(texts)
        alone = model.generate([4, 5], max_tokens=50, ignore_eos=True).ids
        found = {}

        def read(number):
            found[number] = model.hidden(texts[number]), model.logits(texts[number])

        with numflow.Engine(model, max_step_tokens=16) as engine:
            handle = engine.submit([4, 5], max_tokens=50, ignore_eos=True)
            threads = [threading.Thread(target=read, args=(number,)) for number in range(len(texts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert handle.result(20).ids == alone
        for number in range(len(texts)):
            np.testing.assert_array_equal(found[number][0], hidden[number])
            np.testing.assert_array_equal(found[number][1], logits[number])
        assert used_blocks(model) == 0


def test_encoders_read_in_batches_of_so_many_tokens(tmp_path):
    class Counting:
        def __init__(self, program):
            self.program, self.batches = program, []

        def __getattr__(self, name):
            return getattr(self.program, name)

        def run(self, batch, entry="main", output="logits"):
            self.batches.append((entry, output, len(batch.tokens)))
            return self.program.run(batch, entry, output)

    with load(write_case("m2m100", tmp_path, eos_token_id=2), backend="reference") as made:
        model = Model(made.network, Counting(made.program), ends=frozenset({2}))
        model.core.open(StepLimits(encoder_tokens=16))
        model.generate_batch([[5] * 7] * 5, max_tokens=1)
        assert [n for entry, _, n in model.program.batches if entry == "encode"] == [14, 14, 7]
        model.program.batches.clear()
        model.hidden([5] * 30)
        assert model.program.batches == [("encode", "encoder_hidden", 30)]
        assert used_blocks(model) == 0
