"""Rows of hashed n-grams (op `ngram_ids`). The state of a sequence is its last N - 1 tokens, plus 1; 0 stands for a
token that n-grams do not reach. Threads share the sequences."""

import numpy as np

from numflow.cpu.runtime.kernel import Call, Code, slots
from numflow.ops import Step, param

_CODE = Code("numflow.cpu.state.ngrams_kernels")
# multipliers, sizes, starts: addresses of int64 arrays [before + 1], [parts] and [parts].
SLOTS = slots("header y y_stride state state_stride multipliers sizes starts before parts separator")


def ngram_ids(step: Step, ctx) -> list[Call]:
    """y i32 [T, H]."""
    y, multipliers, sizes = step.outputs[0], param(step, "multipliers"), param(step, "sizes")
    return [Call.named(step, _CODE.kernel("ngram_ids"), SLOTS, header=ctx.header, **ctx.strided("y", y),
                       **ctx.state_slots("state", param(step, "state")), multipliers=np.array(multipliers, np.int64),
                       sizes=np.array(sizes, np.int64), starts=np.cumsum([0, *sizes[:-1]], dtype=np.int64),
                       before=len(multipliers) - 1, parts=len(sizes), separator=param(step, "separator"))]
