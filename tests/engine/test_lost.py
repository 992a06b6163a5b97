"""Loss of a device with its KV memory: requests recompute their tokens and give the same results."""

import pytest

import numflow
from numflow.engine.model import Model
from numflow.engine.run.core import MOST_LOSSES
from numflow.errors import DeviceLostError
from tests.engine.fake import BOS, EOS, FakeProgram, FakeTokenizer, fake_model, network, used_blocks
from tests.engine.test_engine import PROMPTS, facts, noisy

SETTINGS = [{}, {"temperature": 1.0, "seed": 4}, {"num_beams": 3}, {"temperature": 1.0, "seed": 7, "n": 3}]


class Losing(FakeProgram):
    """Loses all memory at the runs (or copies, or savings) whose numbers are given."""

    def __init__(self, rule, losses):
        super().__init__(rule)
        self.losses, self.calls = losses, 0

    def _lose(self):
        self.calls += 1
        if self.calls in self.losses:
            self.memory = {}
            raise DeviceLostError("device 1 was lost")

    def run(self, batch, entry="main", output="logits"):
        self._lose()
        return super().run(batch, entry, output)

    def copy_blocks(self, sources, targets):
        self._lose()
        super().copy_blocks(sources, targets)

    def save_blocks(self, blocks):
        self._lose()
        return super().save_blocks(blocks)


def _losing_model(losses):
    return Model(network(), Losing(noisy, losses), FakeTokenizer, ends=frozenset({EOS}), bos=BOS)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"kv_memory": 52 * 16, "preemption": "swap"},
                                     {"kv_memory": 52 * 16, "preemption": "recompute"}, {"max_step_tokens": 7}])
@pytest.mark.parametrize("losses", [{1}, {3, 4, 9}, set(range(5, 90, 7))])
@pytest.mark.thin(5)
def test_no_request_notices(options, losses):
    requests = [(prompt, {"max_tokens": 8, **settings}) for prompt in PROMPTS for settings in SETTINGS]
    alone = [facts(fake_model(noisy).generate(prompt, **settings)) for prompt, settings in requests]
    model = _losing_model(losses)
    with numflow.Engine(model, **options) as engine:
        handles = [engine.submit(prompt, **settings) for prompt, settings in requests]
        found = [[[getattr(one, name) for name in ("ids", "text", "finish_reason", "score")]
                  for one in handle.results(30)] for handle in handles]
    assert found == alone
    assert model.program.calls > min(losses)
    assert used_blocks(model) == 0


def test_not_for_ever():
    model = _losing_model(set(range(3, 10_000)))
    with numflow.Engine(model) as engine:
        handles = [engine.submit([i, 2, 3], max_tokens=20, ignore_eos=True) for i in range(3)]
        for handle in handles:
            with pytest.raises(DeviceLostError, match="device 1 was lost"):
                handle.result(10)
    assert model.program.calls <= 3 + 2 * MOST_LOSSES
    assert used_blocks(model) == 0
