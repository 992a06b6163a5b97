"""A plan as a program: the executors' interface, several batches in flight, and failing devices."""

import os
import signal

import numpy as np
import pytest

import numflow
from numflow.errors import DeviceError, RequestError
from numflow.network import WeightSource
from numflow.network.passes.merge_linears import fuse_linears
from numflow.ops import Batch
from numflow.partition.run import program as program_module
from tests.engine.tiny import write_checkpoint
from tests.partition.plans import executor, model_of, options, placed


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


def _batch(ids, first_block, start=0):
    count = len(ids)
    each = np.arange(start, start + count, dtype=np.int32)
    return Batch(np.array(ids, np.int32), each, np.array([0, count], np.int32),
                 np.array([[first_block, first_block + 1]], np.int32), np.array([count - 1], np.int32))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("devices", ["0;1", "0&1"])
def test_several_batches_in_flight(model, backend, devices):
    built, checkpoint, _ = model
    batches = [_batch([3 + i, 7, 1 + i], 2 * i) for i in range(5)]
    program = placed(built, checkpoint, backend, devices)
    program.reserve(10)
    alone = [program.run(batch) for batch in batches]
    together = program.run_many(batches)
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a, b)
    assert program.run_many(batches, output=None) == [None] * 5
    program.close()


def test_blocks_are_copied_saved_and_loaded(model):
    built, checkpoint, _ = model
    whole = fuse_linears(built)
    one = executor("cpu").Program(whole, WeightSource(whole, checkpoint), **options("cpu"))
    program = placed(built, checkpoint, "cpu", "0&1;2")
    for each in (one, program):
        each.reserve(6)
    assert program.block_bytes == one.block_bytes and program.kv_bytes == one.kv_bytes
    assert program.block_size == one.block_size
    ids = [5, 9, 2, 4, 8]
    program.run(_batch(ids, 0))
    saved = program.save_blocks([0, 1])
    assert saved.shape == (2, program.block_bytes) and saved.any()
    follow = _batch([7], 0, start=5)
    expected = program.run(follow)
    program.copy_blocks([0, 1], [2, 3])
    np.testing.assert_array_equal(program.run(_batch([7], 2, start=5)), expected)
    program.load_blocks([4, 5], saved)
    np.testing.assert_array_equal(program.run(_batch([7], 4, start=5)), expected)
    one.close()
    program.close()


def test_trace_names_the_devices(model):
    built, checkpoint, _ = model
    program = placed(built, checkpoint, "cpu", "0;1&2")
    program.reserve(2)
    rows = program.trace(_batch([1, 2], 0))
    assert [row.index for row in rows] == list(range(len(rows)))
    assert {row.label.split(": ")[0] for row in rows} == {"0", "1", "2"}
    kernels = {row.op: row.kernel for row in rows}
    for op in ("send", "receive", "all_reduce", "all_gather"):
        assert kernels[op].startswith("numflow/cpu/exchange/exchange_kernels.py:")
    program.close()


def test_what_one_request_does_wrong_hurts_no_other(model):
    built, checkpoint, _ = model
    program = placed(built, checkpoint, "cpu", "0;1")
    program.reserve(2)
    expected = program.run(_batch([1, 2], 0))
    for wrong, message in ((_batch([10**6], 0), "token id 1000000"), (_batch([1], 7), "KV block 7")):
        with pytest.raises(RequestError, match=message):
            program.run(wrong)
        np.testing.assert_array_equal(program.run(_batch([1, 2], 0)), expected)
    with pytest.raises(RequestError, match="has no entry 'encode'"):
        program.run(_batch([1], 0), "encode")
    with pytest.raises(RequestError, match="has no 'logit'; did you mean 'logits'"):
        program.run(_batch([1], 0), output="logit")
    program.close()
    with pytest.raises(DeviceError, match="closed"):
        program.run(_batch([1], 0))
    program.close()


@pytest.mark.merge
def test_a_device_that_does_not_answer(model, monkeypatch):
    built, checkpoint, _ = model
    program = placed(built, checkpoint, "reference", "0&1", timeout=1.0)
    program.reserve(2)
    expected = program.run(_batch([1, 2], 0))
    slow = program._workers[1]
    command = slow.command
    monkeypatch.setattr(slow, "command", lambda *given: None)  # it never hears of the run
    monkeypatch.setattr(program_module, "_GRACE_S", 0.5)
    with pytest.raises(DeviceError, match="no answer from device 0, 1 within 1 s"):
        program.run(_batch([1, 2], 0))
    monkeypatch.setattr(slow, "command", command)
    with pytest.raises(DeviceError, match="device 1 does not answer any more; load the model again"):
        program.run(_batch([1, 2], 0))
    assert expected.size
    program.close()


@pytest.mark.parametrize("transport", ["threads", "processes"])
@pytest.mark.merge
def test_a_run_that_is_broken_off(transport, tmp_path):
    with numflow.load(write_checkpoint(tmp_path), devices="0&1", transport=transport, threads=1) as model:
        expected = model.logits([1, 2])
        model.program.abort()
        with pytest.raises(DeviceError, match="broken off"):
            model.logits([1, 2])
        np.testing.assert_array_equal(model.logits([1, 2]), expected)


def test_a_device_that_cannot_start(model):
    built, checkpoint, _ = model

    def source(part):
        if "x" in part.buffers and "logits" in part.outputs:
            raise MemoryError("Unable to allocate 9.00 GiB")
        return WeightSource(part, checkpoint)

    from numflow.partition.cut.cut import partition

    with pytest.raises(DeviceError, match=r"device 1: no memory .*Unable to allocate 9.00 GiB"):
        program_module.PlanProgram(partition(built, "0;1"), executor("cpu"), source, **options("cpu"))


def test_no_such_transport(model):
    built, checkpoint, _ = model
    with pytest.raises(DeviceError, match="no transport 'thread'; did you mean 'threads'"):
        placed(built, checkpoint, "cpu", "0;1", transport="thread")
    with pytest.raises(DeviceError, match="use transport 'threads'"):
        placed(built, checkpoint, "reference", "0;1", transport="processes")


def test_load_says_what_is_wrong(tmp_path):
    folder = write_checkpoint(tmp_path)
    with pytest.raises(DeviceError, match="position 3: expected a device"):
        numflow.load(folder, devices="0;x")
    with pytest.raises(DeviceError, match="devices '': position 1: expected a device"):
        numflow.load(folder, devices="")
    with pytest.raises(DeviceError, match="2 layers cannot be cut into 3 groups of devices: name at most 2 groups"):
        numflow.load(folder, devices="0;1;2")
    with pytest.raises(RequestError, match="transport='processes' is between devices: name them with devices"):
        numflow.load(folder, transport="processes")
    with pytest.raises(RequestError, match="has no option 'world'"):
        numflow.load(folder, world=None)


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path):
    folder = write_checkpoint(tmp_path)
    with numflow.load(folder, devices="3;7", transport="processes", threads=1) as model:
        ids = model.generate([1, 2], max_tokens=4, ignore_eos=True).ids
        with numflow.load(folder, threads=1) as one:
            assert one.generate([1, 2], max_tokens=4, ignore_eos=True).ids == ids
        os.kill(model.program._workers[1].process.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="the process of device 7 was killed by signal 9; load the model again"):
            model.generate([1, 2], max_tokens=4, ignore_eos=True)
