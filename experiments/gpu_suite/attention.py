"""Speed of attention: decoding over contexts and batches, prompts, and cache writes, by type of keys and values. 32
query heads over 8 key/value heads of 128 columns."""

import numpy as np

from experiments.gpu_suite.setting import Setting, each
from numflow.cuda.device.call import Sizes
from numflow.cuda.program import Program
from numflow.ops import Batch
from numflow.quant.kv import CODED, KV_TYPES
from tests.cuda.attention_shapes import attention_case

LARGEST = 32 << 30  # bytes of keys and values


def _toy(setting: Setting) -> tuple[int, int, int]:
    """Query heads, key heads, and columns of a head; small if `quick`."""
    return (4, 2, 32) if setting.quick else (32, 8, 128)


def _bits(kind: str) -> float:
    return CODED[kind].bits_per_value if kind in CODED else {"f32": 32, "f16": 16}[kind]


def decoding(setting: Setting) -> None:
    """One new token for each sequence. bytes: of the keys and values that are read."""
    for kind in ("f16", "q4") if setting.quick else KV_TYPES:
        for context in (40,) if setting.quick else (512, 4096, 16384, 65536):
            for batch in (1, 2) if setting.quick else (1, 8, 64):
                if setting.is_over:
                    return
                _measure(setting, kind, context, batch, 1)


def prompts(setting: Setting) -> None:
    """New tokens at the end of a context. operations: of the products with visible keys."""
    lengths = ((20, 20), (40, 4)) if setting.quick else ((512, 512), (2048, 2048), (8192, 8192), (16384, 512),
                                                         (16384, 64))
    for kind in ("f16", "q4") if setting.quick else ("f16", "q8", "q4", "q3h", "q2", "f32"):
        for context, tokens in lengths:
            if setting.is_over:
                return
            if kind != "f32" or tokens <= 2048:  # float32 has no tensor cores
                _measure(setting, kind, context, 1, tokens)


def _measure(setting: Setting, kind: str, context: int, batch: int, tokens: int) -> None:
    heads, groups, size = _toy(setting)
    key_bytes = 2 * groups * size * _bits(kind) / 8
    if batch * context * key_bytes > LARGEST:
        return
    if setting.was_tried(kv=kind, context=context, batch=batch, tokens=tokens):
        return
    with setting.attempt(kv=kind, context=context, batch=batch, tokens=tokens):
        case = attention_case(heads, groups, size, size)
        program = Program(case.network, case.weights, gpu=setting.device(), kv_type=kind)
        blocks, rows = -(-context // program.block_size), batch * tokens
        program.reserve(batch * blocks)
        table = np.arange(batch * blocks).reshape(batch, blocks)
        # Every block has numbers before it is read: those of the first.
        program.run(_batch(0, min(program.block_size, context), table[:1, :1]), output=None)
        program.copy_blocks([0] * (batch * blocks - 1), range(1, batch * blocks))
        program.run(_batch(context - tokens, tokens, table), output=None)
        sizes, seconds, names = Sizes((rows, batch, rows, batch), context), {}, {}
        for op in ("attention", "cache_write"):
            works = [work for step, calls in program.bound("main") if step.op == op for call in calls
                     for work in call.launches(sizes)]
            seconds[op], names[op] = each(program.device, works, 2), works[0].kernel.name
        seen = batch * tokens * (context - (tokens - 1) / 2)
        setting.add(kv=kind, context=context, batch=batch, tokens=tokens, microseconds=seconds["attention"] * 1e6,
                    gigabytes_per_s=batch * context * key_bytes / seconds["attention"] / 1e9,
                    tflops=4 * heads * size * seen / seconds["attention"] / 1e12,
                    writing_microseconds=seconds["cache_write"] * 1e6, kernel=names["attention"])
        program.close()


def _batch(begin: int, count: int, table: np.ndarray) -> Batch:
    sequences = len(table)
    return Batch(np.arange(count * sequences) % 97, np.tile(np.arange(begin, begin + count), sequences),
                 np.arange(sequences + 1) * count, table, np.arange(sequences))
