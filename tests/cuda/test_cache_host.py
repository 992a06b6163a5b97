"""Keys and values in host memory: copies that overlap with the layers, ordered by events."""

from collections import defaultdict

import numpy as np
import pytest

from numflow.cuda.device.call import Sizes
from numflow.cuda.device.device import Order, Simulated
from numflow.cuda.device.gpu import Gpu
from numflow.cuda.program import Program
from numflow.cuda.state.cache_host import on_host
from numflow.cuda.survey import Notebook
from numflow.lab.shapes import Shape, random_network
from numflow.learn.cases.build import run_case
from numflow.learn.cases.cases import CASES
from numflow.network import WeightSource
from numflow.ops import Batch
from tests.cuda.fake_driver import OK, fake_binary
from tests.cuda.lazy_driver import Event, LazyDriver

pytest.importorskip("greenlet", reason="the simulator of the GPU needs greenlet")
pytestmark = pytest.mark.slow  # .ci/cuda runs them


class TwoQueues(LazyDriver):
    """A driver that captures a second stream once it waits for the captured one, and replays both in the order of
    events."""

    def __init__(self, seed):
        super().__init__(seed=seed)
        self.inside = set()  # events recorded during the capture

    def cuEventRecord(self, event, stream):
        if stream not in self.captured:
            return super().cuEventRecord(event, stream)
        self.inside.add(event)
        self.captured[stream].append(("record", event))
        return (OK,)

    def cuStreamWaitEvent(self, stream, event, flags):
        if event not in self.inside:
            assert stream not in self.captured, "a graph that waits for what is not in it"
            return super().cuStreamWaitEvent(stream, event, flags)
        self.captured.setdefault(stream, []).append(("wait", event))
        return (OK,)

    def cuStreamEndCapture(self, stream):
        graph, self.captured, self.inside = list(self.captured.items()), {}, set()
        last = [works[-1] for other, works in graph if other is not stream]
        assert all(kind == "record" and ("wait", event) in dict(graph)[stream] for kind, event in last), "an open end"
        return OK, graph

    def cuGraphLaunch(self, graph, stream):
        self.replays += 1
        events = defaultdict(Event)
        for queue, works in graph:
            for work in works:
                if work[0] == "record":
                    self._put(queue, lambda event=events[work[1]]: setattr(event, "come", 1))
                elif work[0] == "wait":
                    self._put(queue, lambda: None, lambda event=events[work[1]]: event.come == 1)
                else:
                    self._put(queue, lambda work=work: self._run(*work))
        return (OK,)


def program(layers, **options) -> Program:
    network, checkpoint = random_network(Shape(layers, 32, 2, 1, 32, 40, 128), "q4")
    made = Program(network, WeightSource(network, checkpoint), activations="f32", **options)
    made.reserve(4)
    return made


def logits(layers, gpu, **options) -> np.ndarray:
    """Logits of four tokens, each after random keys: 70 keys in two blocks, and 3 keys in one block."""
    made, found, rng = program(layers, gpu=gpu, **options), [], np.random.default_rng(0)
    made.load_blocks(range(4), rng.normal(size=(4, made.block_bytes // 4)).astype(np.float32).view(np.uint8))
    for i in range(4):
        found.append(made.run(Batch(rng.integers(0, 40, 2), np.array([70 + i, 3 + i]), np.arange(3),
                                    np.array([[2, 0], [3, -1]]), np.arange(2))))
    made.close()
    return np.concatenate(found)


@pytest.fixture(scope="module")
def expected():
    return logits(3, Simulated())


@pytest.mark.parametrize(("seed", "percent"), [(0, 100), (1, 67)])
def test_queues_that_get_on_as_they_like(seed, percent, expected):
    """Streams in any order that events allow, also in a CUDA graph: the last two tokens replay one."""
    fake = TwoQueues(seed)
    found = logits(3, Gpu(fake, 0, fake_binary), host_kv_percent=percent)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)  # graphs are for more keys, cut into more parts
    assert fake.replays == 3
    assert fake.swaps > 20
    assert fake.memory == {}


def test_the_order_of_copies_and_layers():
    """A copy starts after the last use of its buffer by an earlier layer, and a layer waits for its own copy only."""
    made = program(4, gpu=Notebook(), host_kv_percent=100)
    text = []
    for _, calls in made.bound("main"):
        for work in (work for call in calls for work in call.launches(Sizes((1,) * 4, 40))):
            if isinstance(work, Order):
                text.append(("beside " if work.beside else "") + ("await " if work.waits else "signal ") + work.event)
            elif work.beside or work.kernel.name.startswith("attention"):
                text.append("copy" if work.beside else "attention")
    first = ["signal begin", "beside await begin", "copy", "beside signal here 0", "copy", "beside signal here 1"]
    again = [["await here 0", "attention", "signal free 2", "beside await free 2", "copy", "beside signal here 2"],
             ["await here 1", "attention", "signal free 3", "beside await free 3", "copy", "beside signal here 3"],
             ["await here 2", "attention"], ["await here 3", "attention"]]
    assert text == [*first, *(line for layer in again for line in layer)]


def test_blocks_come_from_where_they_are_kept():
    made = program(2, gpu=Simulated(), host_kv_percent=50)
    before = made.save_blocks([1])
    data = np.random.default_rng(0).integers(0, 200, before.shape, dtype=np.uint8)
    made.load_blocks([1], data)
    made.copy_blocks([1], [3])
    np.testing.assert_array_equal(made.save_blocks([3]), data)
    made.close()


def test_memory_of_an_encoder():
    """Keys of an encoder are written in one entry and read in another."""
    case = next(case for case in CASES if case.encoder)
    plain, hosted = (run_case(case, Program, activations="f32", gpu=Simulated(), host_kv_percent=percent)
                     for percent in (0, 100))
    for a, b in zip(hosted, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_layers_of_a_share():
    assert on_host(4, 0) == set()
    assert on_host(4, 50) == {1, 3}
    assert on_host(4, 75) == {1, 2, 3}
    assert on_host(5, 100) == set(range(5))
