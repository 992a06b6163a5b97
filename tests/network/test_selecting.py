"""Rows whose output is not requested are dropped after the last attention; the others are bit-identical."""

import numpy as np
import pytest

from numflow import network
from numflow.network.passes.select_rows import select_early
from numflow.ops import Batch, Buffer, Network, Step, View
from numflow.reference.program import Program
from tests.network.toy import checkpoint


def build():
    ck = checkpoint()
    spec = network.choose_spec(ck)
    return network.build(spec, ck, fuse=False), network.build(spec, ck), ck


def test_the_last_feed_forward_runs_on_wanted_rows():
    plain, early, _ = build()
    rows = {step.label: early.buffers[step.outputs[0].buffer].rows for step in early.entries["main"] if step.outputs}
    assert rows["blk.0.ffn_down"] == rows["blk.1.attention"] == "tokens"
    assert rows["blk.1.attn_output"] == rows["blk.1.ffn_down"] == "logits"
    count = [sum(step.op == "select_rows" for step in net.entries["main"]) for net in (plain, early)]
    assert count == [1, 2]  # of what attention returns and of the residual stream
    network.verify(early)


@pytest.mark.parametrize("rows", [[6], [0, 3, 6], [], range(7)])
def test_wanted_rows_are_the_same_bits(rows):
    plain, early, ck = build()
    batch = Batch(np.arange(7, dtype=np.int32), np.arange(7, dtype=np.int32), np.array([0, 7], np.int32),
                  np.zeros((1, 1), np.int32), np.array(rows, np.int32))
    results = []
    for net in (plain, early):
        made = Program(net, network.WeightSource(net, ck))
        made.reserve(1)
        results += [made.run(batch), made.run(batch, output="hidden")]
    for a, b in zip(results[:2], results[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)  # NumPy's sums depend on the number of rows
        assert len(a) == len(batch.logit_rows)


def toy(*steps):
    buffers = {name: Buffer(name, "tokens", 4) for name in "xyz"} | {"r": Buffer("r", "logits", 4)}
    return Network("toy", {"main": steps}, buffers, {}, {}, {"hidden": View("r", 0, 4)}, {})


X, Y, Z, R = (View(name, 0, 4) for name in "xyzr")
ALONE = (Step("scale", (X,), (Y,), {}, {"scale": 2.0}), Step("add", (X, Y), (X,)))
SELECT = Step("select_rows", (X,), (R,), label="select_rows")


def test_what_is_read_again_stays():
    moved = select_early(toy(Step("embed", (), (X,), {"table": "t"}), *ALONE, SELECT)).entries["main"]
    assert [step.op for step in moved] == ["embed", "select_rows", "scale", "add", "copy"]
    for steps in ((SELECT,), (*ALONE, SELECT, Step("copy", (X,), (Z,))), ALONE, (*ALONE, SELECT, SELECT)):
        assert select_early(toy(*steps)).entries["main"] == steps
