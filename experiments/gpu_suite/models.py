"""Speed of whole models: tokens per second by type and batch, prompts, KV blocks copied to the host, several
devices."""

import threading
import time

import numpy as np

from experiments.gpu_suite.setting import Setting
from numflow.cuda.program import Program
from numflow.decoding.choice import Choice
from numflow.lab.shapes import Shape, random_network
from numflow.network import WeightSource
from numflow.ops import Batch

SHAPES = {"1b": Shape(16, 2048, 32, 8, 8192, 128256, 8192), "8b": Shape(32, 4096, 32, 8, 14336, 128256, 8192)}
TOY = {"toy": Shape(1, 64, 4, 2, 96, 101, 512)}
KINDS = ("F16", "q8", "Q4_0", "q4", "q3h", "q3h+0.5%", "q3", "q2")
CONTEXT = 512


def speed(setting: Setting) -> None:
    """Decoding at batches of 1 to 64 after a context of 512, and prompts of 512 and 2048 tokens."""
    for name, shape in (TOY if setting.quick else SHAPES).items():
        for kind in ("F16", "q4") if setting.quick else KINDS:
            if setting.is_over:
                return
            if setting.was_tried(model=name, weights=kind):
                continue
            with setting.attempt(model=name, weights=kind):
                _speed(setting, shape, name, kind)


def _speed(setting: Setting, shape: Shape, name: str, kind: str) -> None:
    program = _program(setting, shape, kind)
    for batch in (1, 2) if setting.quick else (1, 4, 8, 16, 64):
        if setting.was_tried(model=name, weights=kind, what="decode", batch=batch):
            continue
        with setting.attempt(model=name, weights=kind, what="decode", batch=batch):
            _decode(setting, program, name, kind, batch)
            _growing(setting, program, name, kind, batch)
    for tokens in (12,) if setting.quick else (512, 2048):
        if setting.was_tried(model=name, weights=kind, what="prefill", tokens=tokens):
            continue
        with setting.attempt(model=name, weights=kind, what="prefill", tokens=tokens):
            one = _batch(program, shape, 1, 0, tokens)
            program.run(one, output=None)
            took = _wall(program, lambda b=one: program.run(b, output=None), 3)
            setting.add(model=name, weights=kind, what="prefill", tokens=tokens, tokens_per_s=tokens / took,
                        milliseconds=took * 1e3)
    program.close()


def fusing(setting: Setting) -> None:
    """Decoding with separate steps, with fused steps, with fusions whose blocks compute 32 adjacent results, and the
    same without programmatic dependent launch."""
    forms = {"alone": {"fused": False}, "neighbours": {"units": False}, "units": {}, "units in turn": {}}
    for name, shape in (TOY if setting.quick else SHAPES).items():
        for kind in ("q4",) if setting.quick else ("F16", "q8", "q4", "q3h"):
            for form, options in forms.items():
                if setting.is_over:
                    return
                if setting.was_tried(model=name, weights=kind, form=form):
                    continue
                with setting.attempt(model=name, weights=kind, form=form):
                    program = _program(setting, shape, kind, **options)
                    if form == "units in turn":
                        program.device.dependent = False
                    batch = _batch(program, shape, 1, 8 if setting.quick else CONTEXT, 1)
                    for _ in range(3):
                        program.run(batch, output=None)
                    took = _wall(program, lambda p=program, b=batch: p.run(b, output=None), 1 if setting.quick else 50)
                    setting.add(model=name, weights=kind, form=form, tokens_per_s=1 / took, milliseconds=took * 1e3,
                                gigabytes_per_s=program.weights_bytes / took / 1e9)
                    program.close()


def _program(setting: Setting, shape: Shape, kind: str, **options) -> Program:
    network, checkpoint = random_network(shape, kind)
    program = Program(network, WeightSource(network, checkpoint), gpu=setting.device(), **options)
    program.reserve((64 if not setting.quick else 2) * -(-2112 // program.block_size))
    return program


def _batch(program: Program, shape: Shape, sequences: int, begin: int, count: int) -> Batch:
    blocks = -(-(begin + count) // program.block_size)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, sequences * count)
    return Batch(tokens, np.tile(np.arange(begin, begin + count), sequences), np.arange(sequences + 1) * count,
                 np.arange(sequences * blocks).reshape(sequences, blocks), np.arange(1, sequences + 1) * count - 1)


def _decode(setting: Setting, program: Program, name: str, kind: str, sequences: int) -> None:
    shape = (TOY | SHAPES)[name]
    batch = _batch(program, shape, sequences, 8 if setting.quick else CONTEXT, 1)
    for _ in range(3):  # eager, recorded, replayed
        program.run(batch, output=None)
    took = _wall(program, lambda: program.run(batch, output=None), 2 if setting.quick else 50)
    setting.add(model=name, weights=kind, what="decode", batch=sequences, tokens_per_s=sequences / took,
                milliseconds=took * 1e3, gigabytes=program.weights_bytes / 1e9,
                gigabytes_per_s=program.weights_bytes / took / 1e9)


def _growing(setting: Setting, program: Program, name: str, kind: str, sequences: int) -> None:
    """Tokens that are sampled and decoded further, each with one key more than the one before; and the host's time per
    token."""
    shape, steps, begin = (TOY | SHAPES)[name], 2 if setting.quick else 50, 3 if setting.quick else CONTEXT
    blocks, rows, times = -(-(begin + 3 + steps) // program.block_size), np.arange(sequences), []
    table = np.arange(sequences * blocks).reshape(sequences, blocks)
    prompt, starts = np.random.default_rng(0).integers(0, shape.vocabulary, begin), np.arange(sequences + 1)
    for row in rows:
        program.run(Batch(prompt, np.arange(begin), np.array([0, begin]), table[row:row + 1], np.array([begin - 1])),
                    output=None)
    ids = np.full(sequences, prompt[-1])
    for step in range(3 + steps):  # the first ones record
        batch = Batch(ids, np.full(sequences, begin + step), starts, table, rows)
        started, host = time.perf_counter(), time.process_time()
        ids = program.sample(batch, [Choice()] * sequences)
        times.append((time.perf_counter() - started, time.process_time() - host))
    took, host = np.median(times[3:], axis=0).tolist()
    setting.add(model=name, weights=kind, what="growing", batch=sequences, tokens_per_s=sequences / took,
                milliseconds=took * 1e3, host_microseconds=host * 1e6)


def _wall(program: Program, work, repeats: int) -> float:
    """Wall-clock seconds of one of `repeats` runs."""
    program.device.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    program.device.synchronize()
    return (time.perf_counter() - begin) / repeats


def offload(setting: Setting) -> None:
    """KV blocks copied to the host and back; then decoding with a part of the layers' keys and values in host
    memory."""
    name, shape = next(iter((TOY if setting.quick else SHAPES).items()))
    with setting.attempt(model=name, what="blocks to the host and back"):
        _swapping(setting, name, shape)
    for percent in (0, 100) if setting.quick else (0, 10, 25, 50, 100):
        if setting.was_tried(model=name, host_kv_percent=percent):
            continue
        with setting.attempt(model=name, host_kv_percent=percent):
            _offloaded(setting, name, shape, percent)


def _swapping(setting: Setting, name: str, shape: Shape) -> None:
    program = _program(setting, shape, "q4")
    for count in (1, 2) if setting.quick else (1, 8, 64):
        blocks = list(range(count))
        saved = program.save_blocks(blocks)
        out = _wall(program, lambda b=blocks: program.save_blocks(b), 3)
        back = _wall(program, lambda b=blocks, s=saved: program.load_blocks(b, s), 3)
        setting.add(model=name, blocks=count, megabytes=saved.nbytes / 1e6,
                    out_gigabytes_per_s=saved.nbytes / out / 1e9, back_gigabytes_per_s=saved.nbytes / back / 1e9)
    program.close()


def _offloaded(setting: Setting, name: str, shape: Shape, percent: int) -> None:
    program = _program(setting, shape, "q4", host_kv_percent=percent)
    for context in (8,) if setting.quick else (512, 2048, 8000):
        if setting.is_over:
            return
        batch = _batch(program, shape, 1, context, 1)
        for _ in range(3):
            program.run(batch, output=None)
        took = _wall(program, lambda p=program, b=batch: p.run(b, output=None), 2 if setting.quick else 20)
        setting.add(model=name, host_kv_percent=percent, context=context, tokens_per_s=1 / took,
                    milliseconds=took * 1e3)
    program.close()


def several(setting: Setting) -> None:
    """Programs on separate devices, which are streams of one GPU: first in turn, then at the same time."""
    name, shape = next(iter((TOY if setting.quick else SHAPES).items()))
    for count in (1, 2) if setting.quick else (1, 2, 4):
        if setting.was_tried(model=name, devices=count):
            continue
        with setting.attempt(model=name, devices=count):
            programs = [_program(setting, shape, "q4") for _ in range(count)]
            batch = _batch(programs[0], shape, 1, 8, 1)
            for program in programs * 3:
                program.run(batch, output=None)
            steps = 2 if setting.quick else 50
            alone = sum(_wall(program, lambda p=program, b=batch: p.run(b, output=None), steps) for program in programs)
            begin = time.perf_counter()
            threads = [threading.Thread(target=_wall, args=(p, lambda p=p, b=batch: p.run(b, output=None), steps))
                       for p in programs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            together = (time.perf_counter() - begin) / steps
            setting.add(model=name, devices=count, milliseconds_one_by_one=alone * 1e3,
                        milliseconds_together=together * 1e3)
            for program in programs:
                program.close()
